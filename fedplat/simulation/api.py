"""The call of one line: `simulate("job.toml")`."""

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
from fedplat.model import Parameters
from fedplat.privacy.cost import Cost, cost_of
from fedplat.simulation.data import Federation
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import Result
from fedplat.simulation.report.summary import Series, Summary, series, summarize
from fedplat.simulation.run import run as play
from fedplat.simulation.run_folder import Observer, RunFolderOptions, forget, open_run_folder
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.setup import Setup, prepare

if TYPE_CHECKING:
    from fedplat.pytorch.training import Learner

FORMAT = 1
"""Of `results.json`; it changes where a program that reads one would notice."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """How it was computed, and how long that took: the only part of a run that no seed decides.

    `wall_s` is the time of the last process alone, from its first round on, and `updates` what was merged in it.
    """

    engine: str
    workers: int
    wall_s: float
    updates: int
    updates_per_s: float
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A simulation that is over: all its numbers (`result`), the few that count (`summary`), and its data.

    `privacy` is what a private job's releases would cost in the field.
    """

    file: SimulationFile
    result: Result
    summary: Summary
    computed: SimulatedRun
    federation: Federation | None = None
    privacy: Cost | None = None

    @property
    def model(self) -> Parameters | None:
        """The last committed model, if something was trained."""
        return self.result.model

    def series(self, metric: str = "accuracy") -> Series:
        """A metric on held-out data: rounds, virtual seconds and values as arrays."""
        return series(self.result.attempts, metric)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as `results.json` has them."""
        numbers = {
            "format": FORMAT,
            "summary": msgspec.to_builtins(self.summary),
            "simulation": self.file.raw,
            **self.result.to_dict(),
            "computed": msgspec.to_builtins(self.computed),
            **({"privacy": msgspec.to_builtins(self.privacy)} if self.privacy is not None else {}),
        }
        return folders.finite(numbers)

    def to_json(self) -> str:
        """All numbers, as `results.json` has them."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, default=str) + "\n"

    def plot(self, folder: str | Path) -> list[Path]:
        """Draws all pictures into a folder and names them. Raises `MissingExtraError` without matplotlib."""
        from fedplat.simulation.report import plots

        return plots.draw(self.result, self.summary, Path(folder), self.federation)

    def save(self, folder: Path) -> None:
        """Writes `results.json`, the participation of every client, and the model."""
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
    learner: Learner | None = None,
    observe: Observer = lambda record: None,
    keep: RunFolderOptions | None = None,
) -> Run:
    """Simulates a job, in one call.

    `changes` replace keys of the file. `data` and `learner` are used instead of what the file says. `observe` hears of
    each attempt when it has ended. With `keep` the run has a folder, and one that was stopped goes on. Raises
    `JobFileError`, `DataError`, `MissingExtraError`, and what training raises.

    >>> run = simulate("examples/digits-iid.toml", {"rounds": 3})
    >>> run.summary.last.round, run.series("accuracy").values.shape
    (3, (3,))
    """
    if not isinstance(file, SimulationFile):
        file = files.read(Path(file), changes if not isinstance(changes, Mapping) else texts(changes))
    with prepare(file, data, learner) as setup:
        return execute(file, setup, observe, keep)


def execute(
    file: SimulationFile,
    setup: Setup,
    observe: Observer,
    keep: RunFolderOptions | None = None,
    begins: Callable[[], object] = lambda: None,
) -> Run:
    """Runs what was prepared. A run that goes on begins by telling `observe` what was computed before.

    After each attempt of those `begins` is called: what is measured by the clock counts from then on.
    """
    given = {"simulation": file.raw, "versions": versions()}
    with open_run_folder(keep, given, observe, begins) as (hooks, pace):
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
    if keep is not None:
        run.save(keep.folder)
        forget(keep)
    return run


def texts(changes: Mapping[str, object]) -> list[str]:
    """Changes by key as the texts that `--set` takes."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def versions() -> dict[str, str]:
    """Versions of what computes."""
    import sys

    found = {"fedplat": fedplat.__version__, "python": platform.python_version(), "numpy": np.__version__}
    torch = sys.modules.get("torch")
    return found if torch is None else {**found, "torch": str(torch.__version__)}
