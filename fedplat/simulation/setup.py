"""From a simulation file to the parts of a simulation: data, fleet, model, engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from fedplat import initial
from fedplat.errors import JobFileError, MissingExtraError, ModelError
from fedplat.job import build_rule, calibrate
from fedplat.model import Parameters
from fedplat.simulation.clients import build_fleet
from fedplat.simulation.data import Federation, federation
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.run import Simulation
from fedplat.simulation.scenario import unsupported
from fedplat.simulation.scenario.file import SimulationFile

if TYPE_CHECKING:
    from fedplat.pytorch.training import Learner

Tell = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A simulation that may be run; `federation` is None where there is no data, `engine` says what trains."""

    simulation: Simulation
    federation: Federation | None
    engine: str
    workers: int

    @property
    def choice(self) -> str:
        """The engine's name, and what it chose if it chooses among others."""
        choice = getattr(self.simulation.engine, "choice", "")
        return f"{self.engine}: {choice}" if choice else self.engine


@contextlib.contextmanager
def prepare(
    file: SimulationFile, data: Federation | None = None, learner: Learner | None = None, tell: Tell = lambda text: None
) -> Generator[Setup]:
    """Makes all parts; processes that train are ended with the block. `tell` hears what takes its time.

    `data` and `learner` replace what the file says of them. Raises `JobFileError`, `DataError`, `MissingExtraError`.
    """
    unsupported.check(file.job)
    options = file.simulation
    dealt = data if data is not None else load_data(file, tell)
    num_clients = dealt.num_clients if dealt is not None else 0
    fleet = build_fleet(options.fleet, options.seed, num_clients, file.folder)
    if dealt is not None:
        dealt = _holding_out(file, dealt)
        fleet = fleet.with_examples(dealt.sizes(), dealt.sizes_held_out())
    simulation = Simulation(spec=calibrate(file.job), fleet=fleet, seed=options.seed, until_s=options.until_s)
    if not options.training:
        size = options.model_bytes or initial.of_job(file.job, file.folder).schema.file_size_bytes
        yield Setup(dataclasses.replace(simulation, model_bytes=float(size)), dealt, "none", 0)
        return
    if dealt is None:
        raise JobFileError(
            "simulation.data: training needs data; add a table [simulation.data] with a source, or simulate scheduling "
            "alone (training = false, --no-training)"
        )
    if file.job.evaluation.clients is not None and not dealt.held_out:
        raise JobFileError(
            "evaluation.clients: clients have no examples but those that they train on; say what part of them they "
            "keep to score models with (simulation.held_out = 0.2), or leave the table [evaluation.clients] out"
        )
    engine, start = _training(file, dealt, learner)
    workers = getattr(engine, "num_workers", 0) or options.workers or len(os.sched_getaffinity(0))
    with contextlib.closing(engine):
        yield Setup(dataclasses.replace(simulation, engine=engine, initial=start), dealt, options.engine, workers)


def load_data(file: SimulationFile, tell: Tell = lambda text: None) -> Federation | None:
    """The data that the file describes, dealt out to clients; None if it has none."""
    options = file.simulation
    if options.data is None:
        if options.partition is not None:
            raise JobFileError("simulation.partition: there is no data to deal out; add a table [simulation.data]")
        return None
    tell("reading the data")
    return federation(options.data, options.partition, seed=options.seed, folder=file.folder)


def _holding_out(file: SimulationFile, dealt: Federation) -> Federation:
    """The data with what clients keep from training."""
    options = file.simulation
    if not options.held_out:
        return dealt
    if dealt.held_out:
        raise JobFileError(
            f"simulation.held_out = {options.held_out}: the data says itself which examples clients keep from "
            "training; leave the key out"
        )
    own = None if options.partition is None else options.partition.seed
    return dealt.holding_out(options.held_out, options.seed if own is None else own)


def _training(file: SimulationFile, dealt: Federation, learner: Learner | None) -> tuple[Engine, Parameters]:
    """What trains, and the model of round 0."""
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            "training needs PyTorch; install it with: pip install 'fedplat[torch]', or use --no-training"
        ) from exc
    del torch
    from fedplat.pytorch.training import LocalOptions
    from fedplat.simulation.engines.client_trainer import ClientTraining
    from fedplat.simulation.engines.registry import open_engine
    from fedplat.simulation.scenario.model import learner_of

    options = LocalOptions.from_config(file.job.config)
    if learner is None:
        learner, start = learner_of(file)
    else:
        start = learner.initial(file.simulation.seed)
    try:
        start = build_rule(file.job).counterpart.extend(start)
    except ModelError as exc:
        raise JobFileError(f"model.initial = {file.job.model.initial!r}: {exc}") from exc
    if learner.personal:  # a model without any client's layers has no score
        dealt = dataclasses.replace(dealt, test_inputs=dealt.test_inputs[:0], test_targets=dealt.test_targets[:0])
    task = ClientTraining(dealt, learner, options, file.simulation.seed)
    return open_engine(file.simulation.engine, task, file.simulation.workers), start
