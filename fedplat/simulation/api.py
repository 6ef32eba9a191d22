"""The simulation API: `simulate("job.toml")`, `simulate(job, options)`, and `compare(runs)`."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import msgspec
import numpy as np

from fedplat import errors, texts
from fedplat._version import __version__
from fedplat.config.plugins import digests
from fedplat.config.toml_text import format_toml
from fedplat.job import JobSpec, charges, find_mechanism
from fedplat.learner import ArrayLearner
from fedplat.model import Parameters
from fedplat.privacy.accounting import Cost, cost_of, cost_of_charges
from fedplat.procedures import ColumnFrame, ProcedureResult
from fedplat.procedures.versions import read_result
from fedplat.simulation.data import Dataset, Federation
from fedplat.simulation.engines.registry import AutoOptions
from fedplat.simulation.protocols.registry import runs_protocol
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult, Result, describe_end
from fedplat.simulation.report import notebook, plots, summary
from fedplat.simulation.report.comparison import Comparison, compare_results
from fedplat.simulation.report.progress import ProgressEstimate, ShowProgress, show_bar
from fedplat.simulation.report.summary import (
    CONFIDENCE,
    SecureSummary,
    Series,
    Summary,
    series,
    summarize,
    summarize_costs,
)
from fedplat.simulation.run import run as play
from fedplat.simulation.run_folder import Observer, RunFolderOptions, open_run_folder, remove_journal
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.scenario.options import SimulationOptions
from fedplat.simulation.setup import RunSetup, prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedplat.pytorch.training import Learner

PlotName = Literal["accuracy", "time", "participation", "staleness", "secure", "data"]
FORMAT = 1
"""The version of the format of `results.json`; it changes when a program that reads the file would break."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was computed, and how fast: the only part of a run that does not follow from its seed.

    `wall_s` counts only the last process of a resumed run, from its first new round on; `updates` are the updates
    merged in that time.
    """

    engine: str
    workers: int
    wall_s: float
    updates: int
    updates_per_s: float
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished simulation: all numbers (`result`), the most important ones (`summary`), and the data.

    `privacy` is the privacy cost that the releases of a private job would have in production, and `secure` what clients
    and server pay for a secure aggregation.
    """

    file: SimulationFile
    result: Result
    summary: Summary
    computed: SimulatedRun
    federation: Federation | None = None
    privacy: Cost | None = None
    secure: SecureSummary | None = None

    @property
    def model(self) -> Parameters | None:
        """The last committed model; None if nothing was trained."""
        return self.result.model

    @property
    def outcome(self) -> ProcedureResult | None:
        """The result of a procedure; None without one."""
        return None if self.model is None else read_result(self.model)

    @property
    def is_cut(self) -> bool:
        """True if the virtual time of the simulation (`until_s`) ended before its job."""
        return self.result.problem == describe_end(self.file.simulation.until_s)

    def series(self, metric: str = "accuracy") -> Series:
        """Return a metric on held-out data: rounds, virtual seconds and values as arrays."""
        return series(self.result.attempts, metric)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as in `results.json`."""
        numbers = {
            "format": FORMAT,
            "summary": msgspec.to_builtins(self.summary),
            "simulation": self.file.raw,
            **self.result.to_dict(),
            "computed": msgspec.to_builtins(self.computed),
            **({"classes": list(self.federation.classes)} if self.federation and self.federation.classes else {}),
        }
        for name, cost in (("privacy", self.privacy), ("secure_aggregation", self.secure)):
            if cost is not None:
                numbers[name] = msgspec.to_builtins(cost)
        return folders.finite(numbers)

    def to_json(self) -> str:
        """Return the text of `results.json`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, default=folders.describe) + "\n"

    def to_pandas(self) -> DataFrame:
        """Return one row for each committed round; `notebook.list_rounds` describes the columns.

        Raises `MissingExtraError` without pandas.
        """
        return notebook.to_frame(notebook.list_rounds(self.result))

    def plot(self, name: PlotName = "accuracy") -> Figure:
        """Return a plot as a figure, which a notebook shows.

        Raises `ValueError` if the run has no numbers for it, and `MissingExtraError` without matplotlib.
        """
        known = plots.pictures(self.result, self.summary, self.federation)
        if name not in known:
            raise ValueError(f"{name!r}: the run has no such plot; expected one of {', '.join(known)}")
        figure = plots.new_figure()
        known[name](figure)
        return figure

    def save_plots(self, folder: str | Path) -> list[Path]:
        """Draw all plots into a folder and return their paths. Raises `MissingExtraError` without matplotlib."""
        return plots.draw(self.result, self.summary, Path(folder), self.federation)

    def describe(self) -> dict[str, str]:
        """Return the most important numbers as texts by name, as `fedplat simulate` prints them."""
        computed = f"in {texts.duration(self.computed.wall_s)}, {self.computed.updates_per_s:.3g} client updates/s"
        return summary.describe(self.result, self.summary, self.privacy, self.secure) | {"computed": computed}

    def __str__(self) -> str:
        return summary.format_lines({"job": f"{self.result.job}, seed {self.result.seed}"} | self.describe())

    def __repr__(self) -> str:
        result, last = self.result, self.summary.last
        score = "" if last is None else f", {self.summary.metric} {last.value:.4g}"
        return f"<Run of {result.job}, seed {result.seed}: {result.status}, {result.totals.rounds} rounds{score}>"

    def _repr_html_(self) -> str:
        return notebook.format_run(self.result, self.summary)

    def save(self, folder: Path) -> None:
        """Write `results.json`, the participation of every client, and the model to a folder."""
        counts = {
            field.name: getattr(self.result.participation, field.name)
            for field in dataclasses.fields(self.result.participation)
        }
        folders.write(folder / folders.PARTICIPATION, Parameters.from_arrays(counts).to_bytes())
        if self.model is not None:
            folders.write(folder / folders.MODEL, self.model.to_bytes())
        if (outcome := self.outcome) is not None:
            folders.write(folder / folders.OUTCOME, outcome.to_json())
            (folder / folders.FILES).mkdir(exist_ok=True)
            for name, content in outcome.files.items():
                folders.write(folder / folders.FILES / name, content)
        folders.write(folder / folders.RESULTS, self.to_json().encode())


@overload
def simulate(
    file: str | Path | SimulationFile,
    changes: Mapping[str, object] | Sequence[str] = ...,
    *,
    data: Federation | Dataset | None = ...,
    learner: Learner | ArrayLearner | None = ...,
    tables: Mapping[str, ColumnFrame] | None = ...,
    observe: Observer = ...,
    run_folder: RunFolderOptions | None = ...,
    progress: ShowProgress = ...,
) -> Run: ...
@overload
def simulate(
    file: JobSpec,
    changes: SimulationOptions = ...,
    /,
    *,
    data: Federation | Dataset | None = ...,
    learner: Learner | ArrayLearner | None = ...,
    tables: Mapping[str, ColumnFrame] | None = ...,
    observe: Observer = ...,
    run_folder: RunFolderOptions | None = ...,
    progress: ShowProgress = ...,
) -> Run: ...
def simulate(  # noqa: PLR0913 - one call for scripts and notebooks; every argument but the first has a default
    file: str | Path | SimulationFile | JobSpec,
    changes: Mapping[str, object] | Sequence[str] | SimulationOptions = (),
    *,
    data: Federation | Dataset | None = None,
    learner: Learner | ArrayLearner | None = None,
    tables: Mapping[str, ColumnFrame] | None = None,
    observe: Observer = lambda record: None,
    run_folder: RunFolderOptions | None = None,
    progress: ShowProgress = "auto",
) -> Run:
    """Simulate a job: a simulation file with `changes` of its keys, or a `JobSpec` and `SimulationOptions`.

    The file `"digits"` is an example that is part of the package.

    `data` and `learner` replace the file's data and model; the file's partition divides a `Dataset`. `tables` are those
    of the sites, by their names, for a job with a procedure. `observe` is called with each attempt that has ended. With
    `run_folder`, the run is written to a folder, from which it can be resumed. `progress` shows a bar, by default on a
    terminal and in a notebook. Raises `JobFileError`, `DataError`, `PluginError`, `MissingExtraError`, what training
    raises, and `NoProgressError` for a job that cannot be completed; a run that ends with its `until_s` warns.

    >>> run = simulate("digits", {"rounds": 3})
    >>> run.summary.last.round, run.series("accuracy").values.shape
    (3, (3,))
    """
    file = _read(file, changes)
    name, rounds, metric = file.job.name, file.job.rounds, file.simulation.target_metric
    estimate = ProgressEstimate(name, rounds, metric, time.monotonic)
    with prepare(file, data, learner, tables=tables) as setup, show_bar(estimate, progress, time.monotonic) as add:

        def notify(record: AttemptResult) -> None:
            add(record)
            observe(record)

        run = execute(file, setup, notify, run_folder, estimate.begin)
    if run.is_cut:
        warnings.warn(f"{name} is not complete: {run.result.problem}", stacklevel=2)
    elif run.result.problem:
        kept = f"; its rounds are in {run_folder.folder}" if run_folder is not None else ""
        raise errors.NoProgressError(f"{name} ended in status {run.result.status}: {run.result.problem}{kept}")
    return run


def _read(
    file: str | Path | SimulationFile | JobSpec, changes: Mapping[str, object] | Sequence[str] | SimulationOptions
) -> SimulationFile:
    if isinstance(file, JobSpec):
        if not isinstance(changes, SimulationOptions):
            if changes:
                raise errors.JobFileError(
                    "changes: expected SimulationOptions after a JobSpec; msgspec.structs.replace changes a JobSpec"
                )
            changes = SimulationOptions()
        return files.of_records(file, changes)
    if isinstance(changes, SimulationOptions):
        raise errors.JobFileError("SimulationOptions: expected a JobSpec before them; a file has its own, [simulation]")
    if isinstance(file, SimulationFile):
        if changes:
            raise errors.JobFileError("changes: expected none with a SimulationFile; they apply to the path of a file")
        return file
    return files.read(Path(file), changes if not isinstance(changes, Mapping) else format_changes(changes))


def compare(
    runs: Mapping[str, Run | Sequence[Run]],
    *,
    metric: str = "",
    target: float | None = None,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare configurations by their names: the mean of a metric over the runs of each, one for each seed.

    `metric` and `target` are by default those of the first run. Raises `ValueError` if a configuration has no run, two
    runs with the same seed, or a run that has no value of the metric.
    """
    if not isinstance(cast(object, runs), Mapping):
        raise ValueError(f"runs is a {type(runs).__name__}; expected runs by name, such as {{'FedAvg': [run, other]}}")
    named = {name: [each] if isinstance(each, Run) else list(each) for name, each in runs.items()}
    first = next((run for each in named.values() for run in each), None)
    summary = first.summary if first is not None else Summary(metric=metric)
    results = {name: [run.result for run in each] for name, each in named.items()}
    return compare_results(results, metric or summary.metric, summary.target if target is None else target, confidence)


def execute(
    file: SimulationFile,
    setup: RunSetup,
    observe: Observer,
    run_folder: RunFolderOptions | None = None,
    on_replayed: Callable[[], object] = lambda: None,
) -> Run:
    """Run a prepared simulation. A resumed run first calls `observe` with the attempts that were computed before.

    `on_replayed` is called after each of those: clocks that measure the run restart then.
    """
    plugins = digests((file.job, msgspec.structs.replace(file.simulation, engine=AutoOptions()), setup.algorithm))
    inputs = {"simulation": file.raw, "versions": versions(), "plugins": plugins}
    find_cost = _cost_function(setup)
    with open_run_folder(run_folder, inputs, observe, on_replayed, find_cost=find_cost) as (hooks, pace):
        result = play(setup.simulation, hooks)
    seconds = pace.seconds()
    computed = SimulatedRun(
        engine=setup.choice,
        workers=setup.workers,
        wall_s=seconds,
        updates=pace.updates,
        updates_per_s=pace.updates / seconds if seconds else 0.0,
        versions=versions(),
    )
    options = file.simulation
    summary = summarize(result, options.target_metric, options.target)
    run = Run(
        file=file,
        result=result,
        summary=summary,
        computed=computed,
        federation=setup.federation,
        privacy=_cost_of(setup, result),
        secure=summarize_costs(result, runs_protocol=runs_protocol(setup.simulation)),
    )
    if run_folder is not None:
        run.save(run_folder.folder)
        remove_journal(run_folder)
    return run


def _cost_of(setup: RunSetup, result: Result) -> Cost | None:
    """Return the cost of a run's releases; None if the job is not private."""
    spec, find_cost = setup.simulation.spec, _cost_function(setup)
    mechanism = find_mechanism(spec)
    if spec.privacy is None or mechanism is None or find_cost is None:
        return None
    if spec.privacy.trust == "none":
        return cost_of_charges(spec.privacy, mechanism, charges(spec, result.unmasked))
    return find_cost(len(result.rounds))


def _cost_function(setup: RunSetup) -> Callable[[int], Cost] | None:
    """Return the function of the cost of a number of releases; None if the job is not private."""
    privacy, mechanism = setup.simulation.spec.privacy, find_mechanism(setup.simulation.spec)
    if privacy is None or mechanism is None:
        return None
    return functools.partial(cost_of, privacy, mechanism)


def format_changes(changes: Mapping[str, object]) -> list[str]:
    """Return changes by key as `key=value` texts, the arguments of `--set`."""
    return [f"{key}={format_toml(value, key)}" for key, value in changes.items()]


def versions() -> dict[str, str]:
    """Return the versions of fedplat, Python, NumPy and, if it is loaded, PyTorch."""
    import sys

    numbers = {"fedplat": __version__, "python": platform.python_version(), "numpy": np.__version__}
    torch = sys.modules.get("torch")
    return numbers if torch is None else {**numbers, "torch": str(torch.__version__)}
