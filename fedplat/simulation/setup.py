"""Building the parts of a simulation from its file: data, fleet, model, engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, cast

from fedplat import aggregate, initial, job, model, system
from fedplat.config import user_code
from fedplat.config.plugins import name_of
from fedplat.errors import DataError, JobFileError, ModelError
from fedplat.job.spec import describe_algorithm, describe_coarse_steps, describe_copies
from fedplat.learner import ArrayLearner
from fedplat.procedures import ColumnFrame
from fedplat.simulation import clients, run
from fedplat.simulation.data import Dataset, Federation, divide, federation
from fedplat.simulation.data.federation import check_finite
from fedplat.simulation.engines import registry, tasks
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.protocols.registry import kind_of
from fedplat.simulation.scenario import building, feasible
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.scenario.options import SimulationOptions

if TYPE_CHECKING:
    from fedplat.pytorch.training import Learner, LocalOptions

OnProgress = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """A simulation that is ready to run; `federation` is None without data, `engine` is the engine's name or "none".

    `algorithm` are the options of the clients' local algorithm; None without training.
    """

    simulation: run.Simulation
    federation: Federation | None
    engine: str
    workers: int
    algorithm: aggregate.LocalAlgorithmOptions | None = None

    @property
    def choice(self) -> str:
        """The engine's name, and the engine that it chose if it chooses among others."""
        choice = getattr(self.simulation.engine, "choice", "")
        return f"{self.engine}: {choice}" if choice else self.engine


@contextlib.contextmanager
def prepare(
    file: SimulationFile,
    data: Federation | Dataset | None = None,
    learner: Learner | ArrayLearner | None = None,
    on_progress: OnProgress = lambda text: None,
    tables: Mapping[str, ColumnFrame] | None = None,
) -> Generator[RunSetup]:
    """Build all parts; the engine's processes end with the block.

    `on_progress` gets a text before a slow step, and for each key of `[config]` that no training reads.

    `data`, `learner` and `tables` replace the file's data, model and tables; the file's partition divides a `Dataset`.
    Raises `JobFileError`, `DataError`, `MissingExtraError`, and what the function of the tables raises.
    """
    feasible.check_supported(file.job)
    options = file.simulation
    if (answers := _prepare_tables(file, tables, on_progress)) is not None:
        yield answers
        return
    data = _check_data(data, options)
    clients_data = data if data is not None else load_data(file, on_progress)
    num_clients = clients_data.num_clients if clients_data is not None else 0
    fleet = clients.build_fleet(options.fleet, options.seed, num_clients, file.folder)
    if warning := feasible.check_feasible(file.job, fleet):
        on_progress(f"warning: {warning}")
    if clients_data is not None:
        clients_data = _hold_out(file, clients_data)
        fleet = fleet.with_examples(clients_data.sizes(), clients_data.sizes_held_out())
    simulation = run.Simulation(
        spec=job.calibrate(file.job),
        fleet=fleet,
        seed=options.seed,
        until_s=options.until_s,
        secure_aggregation=options.secure_aggregation,
        links=options.links,
    )
    if not options.training:
        size = options.model_bytes or initial.of_job(file.job, file.folder).schema.file_size_bytes
        yield RunSetup(dataclasses.replace(simulation, model_bytes=float(size)), clients_data, "none", 0)
        return
    if clients_data is None:
        raise JobFileError(
            "simulation.data: training needs data; add a table [simulation.data] with a source, or simulate only the "
            "scheduling (training = false, --no-training)"
        )
    if file.job.evaluation.clients is not None and not clients_data.held_out:
        raise JobFileError(
            "evaluation.clients: clients have no examples but those that they train on; set the part of them that they "
            "keep to score models with (simulation.held_out = 0.2), or leave the table [evaluation.clients] out"
        )
    if not len(clients_data.test_inputs) and file.job.evaluation.clients is None:
        on_progress(f"warning: {_describe_unscored(options)}")
    engine, initial_model, algorithm = _open_engine(file, clients_data, learner, on_progress)
    workers = getattr(engine, "num_workers", 0) or options.workers or system.num_cores()
    simulation = dataclasses.replace(simulation, engine=engine, initial=initial_model)
    with contextlib.closing(engine):
        yield RunSetup(simulation, clients_data, name_of(options.engine), workers, algorithm)


def _check_data(data: Federation | Dataset | None, options: SimulationOptions) -> Federation | None:
    """Return data that replaces the file's, divided among clients."""
    if isinstance(data, Dataset):
        data = divide(data, options.partition, options.seed)
    if data is not None and not isinstance(cast(object, data), Federation):
        raise DataError(
            f"data is a {type(data).__name__}; expected a Federation, or a Dataset such as Dataset.from_arrays(inputs, "
            "targets)"
        )
    if data is not None:
        check_finite(data)
    return data


def _prepare_tables(
    file: SimulationFile, tables: Mapping[str, ColumnFrame] | None, on_progress: OnProgress
) -> RunSetup | None:
    """Return the simulation of a job whose clients answer from tables; None for other jobs."""
    options, found = file.simulation, _load_tables(file, tables)
    if found is None:
        return None
    fleet = clients.build_fleet(options.fleet, options.seed, len(found), file.folder)
    if warning := feasible.check_feasible(file.job, fleet):
        on_progress(f"warning: {warning}")
    simulation = run.Simulation(spec=file.job, fleet=fleet, seed=options.seed, until_s=options.until_s, tables=found)
    return RunSetup(simulation, None, "none", 0)


def _load_tables(file: SimulationFile, given: Mapping[str, ColumnFrame] | None) -> Mapping[str, ColumnFrame] | None:
    """Return the table of each site; None if the job reads none."""
    named = file.simulation.tables
    if kind_of(file.job).answer is None:
        if given is not None or named is not None:
            raise JobFileError("simulation.tables: only a job with the table [procedure] reads tables; leave them out")
        return None
    if not file.simulation.training:
        raise JobFileError(
            "simulation.training = false: how many steps a procedure has follows from the tables; leave the key out "
            "(--no-training)"
        )
    if given is None and named is None:
        raise JobFileError(
            'simulation.tables: a procedure reads the table of each site; expected tables = "module:function", which '
            "returns them by the names of sites, or simulate(..., tables=...)"
        )
    found = given if given is not None else user_code.call(cast(str, named), file.folder)
    if not isinstance(found, Mapping) or not found:
        raise JobFileError(
            f"simulation.tables: {named or 'tables'} is a {type(found).__name__}; expected the table of each site by "
            'its name, such as {"north": frame, "south": frame}'
        )
    return cast(Mapping[str, ColumnFrame], found)


def _describe_unscored(options: SimulationOptions) -> str:
    """Explain why the models of a run get no score, and what would give them one."""
    key = next((key for key in ("test_fraction", "test_path") if hasattr(options.data, key)), "")
    some = f"simulation.data.{key}" if key else "test examples"
    return (
        "no model is scored, because the data has no test examples that no client has; for a metric on held-out data "
        f"set {some}, or simulation.held_out with [evaluation.clients] goal"
    )


def load_data(file: SimulationFile, on_progress: OnProgress = lambda text: None) -> Federation | None:
    """Load the data that the file describes, partitioned over clients; returns None if it describes no data."""
    options = file.simulation
    if options.data is None:
        if options.partition is not None:
            raise JobFileError("simulation.partition: there is no data to partition; add a table [simulation.data]")
        return None
    on_progress("reading the data")
    return federation(options.data, options.partition, seed=options.seed, folder=file.folder)


def _hold_out(file: SimulationFile, data: Federation) -> Federation:
    """Split off the examples that clients keep from training, if `simulation.held_out` is set."""
    options = file.simulation
    if not options.held_out:
        return data
    if data.held_out:
        raise JobFileError(
            f"simulation.held_out = {options.held_out}: the data already defines which examples clients keep from "
            "training; leave the key out"
        )
    partition_seed = None if options.partition is None else options.partition.seed
    return data.with_held_out(options.held_out, options.seed if partition_seed is None else partition_seed)


def _open_engine(
    file: SimulationFile, data: Federation, given: Learner | ArrayLearner | None, on_progress: OnProgress
) -> tuple[Engine, model.Parameters, aggregate.LocalAlgorithmOptions | None]:
    """Return the engine, the initial model, and the clients' algorithm."""
    if given is None:
        _check_references(file)
        learner, initial_model = building.build_learner(file)
    else:
        learner, initial_model = given, building.make_initial(given, file.simulation.seed)
    try:
        requirements = job.build_rule(file.job).requirements
        initial_model = requirements.extend(initial_model)
        if misfit := requirements.explain_misfit(initial_model.schema):
            raise ModelError(misfit)
    except ModelError as exc:
        raise JobFileError(f"model.initial = {file.job.model.initial!r}: {exc}") from exc
    for text in (*describe_coarse_steps(file.job, initial_model), *describe_copies(file.job, initial_model)):
        on_progress(f"warning: {text}")
    algorithm: aggregate.LocalAlgorithmOptions | None = None
    if getattr(learner, "personal", ()):  # without a client's personal layers a model cannot be scored
        data = dataclasses.replace(data, test_inputs=data.test_inputs[:0], test_targets=data.test_targets[:0])
    if isinstance(learner, ArrayLearner):
        if getattr(learner, "sums", False):
            feasible.check_sums(file.job)
        task = tasks.ClientTraining(data, learner, file.job.config, file.simulation.seed, file.job.rounds)
    else:
        from fedplat.pytorch.training import LocalOptions

        options = LocalOptions.from_config(file.job.config, file.plugins)
        algorithm = options.algorithm
        for text in _list_doubts(file, options, learner):
            on_progress(text)
        task = tasks.ClientTraining(data, learner, options, file.simulation.seed)
    return registry.open_engine(file.simulation.engine, task, file.simulation.workers), initial_model, algorithm


def _list_doubts(file: SimulationFile, options: LocalOptions, learner: Learner) -> Generator[str]:
    """Yield what the training of a PyTorch module does otherwise than its author may expect."""
    for text in describe_algorithm(file.job):
        yield f"warning: {text}"
    for key, hint in options.find_unknown(file.job.config).items():
        yield f"warning: config.{key} is ignored: local training has no such key{hint}"
    if learner.has_unknown_answers and file.simulation.target_metric == "accuracy":
        yield (
            "there is no accuracy, since only you know what your loss makes of outputs; set [simulation.model] "
            'accuracy, or Learner(accuracy=...), or target_metric = "loss"'
        )


def _check_references(file: SimulationFile) -> None:
    """Raise `JobFileError` if no model is named, or one that the workers of Ray cannot import."""
    if file.job.model.initial == building.OF_LEARNER:
        raise JobFileError("model: missing; expected make_job(model, ...) or simulate(..., learner=Learner(model=...))")
    options = file.simulation.model
    keys = ("module", "loss", "accuracy")
    named = (file.job.model.initial, *(getattr(options, key, "") for key in keys))
    if isinstance(file.simulation.engine, registry.RayOptions) and any(each.startswith("__main__:") for each in named):
        raise JobFileError(
            'simulation.engine = "ray": its workers cannot import a model from a notebook or script; define it in a '
            "module, or call simulate(..., learner=Learner(model=...))"
        )
