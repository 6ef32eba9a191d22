"""Running a simulation from its parts: `run(Simulation(...))`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from fedplat import errors, job, model
from fedplat.rounds import AttemptKey, privacy_rules
from fedplat.rounds.protocols.base import find_training
from fedplat.rounds.states import JobStatus
from fedplat.secure_aggregation import encoding
from fedplat.simulation.clients import Fleet
from fedplat.simulation.driver import Driver, Trace
from fedplat.simulation.federated.interface import NoTraining, TrainingModel, count_entries
from fedplat.simulation.federated.procedure import ProcedureAnswers
from fedplat.simulation.federated.training import RealTraining
from fedplat.simulation.gossip.silos import SiloTraining
from fedplat.simulation.parts import Simulation
from fedplat.simulation.protocols.registry import kind_of
from fedplat.simulation.recording.result import Result
from fedplat.simulation.recording.resuming import ReplayLog
from fedplat.simulation.recording.statistics import Observer, RunStatistics, count_staleness, measure_groups
from fedplat.simulation.scenario import feasible
from fedplat.simulation.secure.sums import setup_of


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callbacks of a run, and the folder of its journal.

    `observe` is called with each attempt that has ended, `trace` with each batch of events. With a `journal` folder and
    an engine, a stopped run resumes from its last checkpoint when it is run again; attempts that are replayed are
    observed again. A checkpoint is written after every `checkpoint_every`-th version for which `checkpoint_due` returns
    true.
    """

    observe: Observer | None = None
    trace: Trace | None = None
    journal: Path | None = None
    checkpoint_every: int = 1
    checkpoint_due: Callable[[int], bool] = lambda version: True


def run(simulation: Simulation, hooks: Hooks = Hooks()) -> Result:
    """Run a simulation to its end.

    Raises `JobFileError` for a job that only a server can run, `ValueError` if the parts do not fit together,
    `ReplayError` if the journal cannot be used, and what training raises.
    """
    spec, fleet, engine = simulation.spec, simulation.fleet, simulation.engine
    kind = kind_of(spec)
    feasible.check_supported(spec)
    kind.check(spec, fleet, simulation.links)
    with contextlib.ExitStack() as stack:
        training: TrainingModel
        learning: RealTraining | SiloTraining | ProcedureAnswers | None = None
        if kind.answer is not None and (learning := kind.answer(simulation)) is not None:
            training = learning
        elif engine is None:
            if kind.mix is not None:
                return kind.mix(simulation, hooks.observe)
            training = NoTraining(_model_bytes(simulation), _masked_bytes(simulation))
        else:
            if simulation.initial is None:
                raise ValueError("a simulation with an engine needs an initial model")
            fleet = fleet.with_examples([engine.num_examples(client) for client in range(engine.num_clients)])
            first = _extend_initial(spec, simulation.initial)
            training = learning = kind.learn(simulation, engine, first)
            # No journal has the models of all silos: a stopped run of theirs begins again.
            if hooks.journal is not None and isinstance(learning, RealTraining):
                journal = ReplayLog(
                    learning,
                    hooks.journal,
                    compute_identity(simulation, fleet),
                    hooks.checkpoint_every,
                    hooks.checkpoint_due,
                )
                training = stack.enter_context(contextlib.closing(journal))
        result = drive(simulation, fleet, training, hooks)
    return result if learning is None else dataclasses.replace(result, model=learning.model)


def drive(simulation: Simulation, fleet: Fleet, training: TrainingModel, hooks: Hooks) -> Result:
    """Run a simulation with the given fleet and training instead of its own; the result has no model."""
    statistics = RunStatistics(fleet, hooks.observe)
    driver = Driver(simulation.spec, fleet, training, statistics, simulation.seed, hooks.trace)
    stopped = driver.run(simulation.until_s)
    participation = statistics.participation()
    reason = stopped or driver.job.reason
    is_over = driver.job.status is JobStatus.COMPLETED or bool(privacy_rules.describe_spent_budget(driver.job))
    return Result(
        job=simulation.spec.name,
        seed=simulation.seed,
        num_clients=fleet.num_clients,
        status=driver.job.status.value,
        reason=reason,
        problem="" if is_over else reason,
        attempts=tuple(statistics.attempts),
        totals=statistics.totals(driver.now),
        staleness=count_staleness(statistics.attempts),
        groups=measure_groups(fleet, participation),
        participation=participation,
        unmasked=driver.job.unmasked,
    )


def compute_identity(simulation: Simulation, fleet: Fleet) -> str:
    """Return a text that only equal simulations share, as far as they can be compared without training."""
    content = [simulation.spec, fleet.options, simulation.seed]
    digest = hashlib.sha256(msgspec.json.encode(content, enc_hook=_digest_of_object))
    digest.update(fleet.examples.tobytes())
    if simulation.initial is not None:
        digest.update(simulation.initial.schema.header)
        digest.update(simulation.initial.buffer.data)
    return digest.hexdigest()


def _digest_of_object(value: object) -> str:
    """Return a text for a value of a plugin's option that JSON does not have: an array, or a function with a name."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '<>')}"
    if "<" in name:
        raise errors.ReplayError(
            f"an option of a plugin is a {type(value).__name__} without a name, so a resumed run could not be compared "
            "with this one; expected numbers, text, arrays or functions that are defined with def, or no run folder"
        )
    return name


def _extend_initial(spec: job.JobSpec, initial: model.Parameters) -> model.Parameters:
    """Return the model that a submitted job would begin with."""
    try:
        return job.build_rule(spec).requirements.extend(initial)
    except errors.ModelError as exc:
        raise ValueError(f"the initial model does not fit the job's rule: {exc}") from exc


def _masked_bytes(simulation: Simulation) -> int | None:
    """Return the size of a masked update; None if clients do not mask them."""
    if not find_training(simulation.spec).has_masks:
        return None
    setup = setup_of(simulation.spec, AttemptKey("", 1, 1), 0, count_entries(_model_bytes(simulation)))
    return encoding.file_bytes(setup)


def _model_bytes(simulation: Simulation) -> float:
    initial = simulation.initial
    if initial is None:
        return simulation.model_bytes
    return float(_extend_initial(simulation.spec, initial).schema.file_size_bytes)
