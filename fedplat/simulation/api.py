"""The simulation API: `simulate("job.toml")`."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import fedplat
from fedplat.job import find_mechanism
from fedplat.learner import ArrayLearner
from fedplat.model import Parameters
from fedplat.plugins import digests
from fedplat.privacy.cost import Cost, cost_of
from fedplat.simulation.data import Federation
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import Result
from fedplat.simulation.report.summary import Series, Summary, series, summarize
from fedplat.simulation.run import run as play
from fedplat.simulation.run_folder import Observer, RunFolderOptions, open_run_folder, remove_journal
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.setup import Setup, prepare

if TYPE_CHECKING:
    from fedplat.pytorch.training import Learner

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished simulation: all numbers (`result`), the most important ones (`summary`), and the data.

    `privacy` is the privacy cost that the releases of a private job would have in production.
    """

    file: SimulationFile
    result: Result
    summary: Summary
    computed: SimulatedRun
    federation: Federation | None = None
    privacy: Cost | None = None

    @property
    def model(self) -> Parameters | None:
        """The last committed model; None if nothing was trained."""
        return self.result.model

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
            **({"privacy": msgspec.to_builtins(self.privacy)} if self.privacy is not None else {}),
        }
        return folders.finite(numbers)

    def to_json(self) -> str:
        """Return the text of `results.json`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, default=str) + "\n"

    def plot(self, folder: str | Path) -> list[Path]:
        """Draw all plots into a folder and return their paths. Raises `MissingExtraError` without matplotlib."""
        from fedplat.simulation.report import plots

        return plots.draw(self.result, self.summary, Path(folder), self.federation)

    def save(self, folder: Path) -> None:
        """Write `results.json`, the participation of every client, and the model to a folder."""
        counts = {
            field.name: getattr(self.result.participation, field.name)
            for field in dataclasses.fields(self.result.participation)
        }
        folders.write(folder / folders.PARTICIPATION, Parameters.from_arrays(counts).to_bytes())
        if self.model is not None:
            folders.write(folder / folders.MODEL, self.model.to_bytes())
        folders.write(folder / folders.RESULTS, self.to_json().encode())


def simulate(
    file: str | Path | SimulationFile,
    changes: Mapping[str, object] | Sequence[str] = (),
    *,
    data: Federation | None = None,
    learner: Learner | ArrayLearner | None = None,
    observe: Observer = lambda record: None,
    run_folder: RunFolderOptions | None = None,
) -> Run:
    """Simulate a job.

    `changes` replace keys of the file. `data` and `learner` replace the file's data and model. `observe` is called with
    each attempt that has ended. With `run_folder`, the run is written to a folder, from which it can be resumed. Raises
    `JobFileError`, `DataError`, `MissingExtraError`, and what training raises.

    >>> run = simulate("examples/digits-iid.toml", {"rounds": 3})
    >>> run.summary.last.round, run.series("accuracy").values.shape
    (3, (3,))
    """
    if not isinstance(file, SimulationFile):
        file = files.read(Path(file), changes if not isinstance(changes, Mapping) else format_changes(changes))
    with prepare(file, data, learner) as setup:
        return execute(file, setup, observe, run_folder)


def execute(
    file: SimulationFile,
    setup: Setup,
    observe: Observer,
    run_folder: RunFolderOptions | None = None,
    on_replayed: Callable[[], object] = lambda: None,
) -> Run:
    """Run a prepared simulation. A resumed run first calls `observe` with the attempts that were computed before.

    `on_replayed` is called after each of those: clocks that measure the run restart then.
    """
    plugins = {**digests(file.job), **digests(file.simulation)}
    inputs = {"simulation": file.raw, "versions": versions(), "plugins": plugins}
    with open_run_folder(run_folder, inputs, observe, on_replayed) as (hooks, pace):
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
    spec, mechanism = setup.simulation.spec, find_mechanism(setup.simulation.spec)
    run = Run(
        file=file,
        result=result,
        summary=summary,
        computed=computed,
        federation=setup.federation,
        privacy=cost_of(spec.privacy, mechanism, len(result.rounds)) if spec.privacy and mechanism else None,
    )
    if run_folder is not None:
        run.save(run_folder.folder)
        remove_journal(run_folder)
    return run


def format_changes(changes: Mapping[str, object]) -> list[str]:
    """Return changes by key as `key=value` texts, the arguments of `--set`."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def versions() -> dict[str, str]:
    """Return the versions of fedplat, Python, NumPy and, if it is loaded, PyTorch."""
    import sys

    numbers = {"fedplat": fedplat.__version__, "python": platform.python_version(), "numpy": np.__version__}
    torch = sys.modules.get("torch")
    return numbers if torch is None else {**numbers, "torch": str(torch.__version__)}
