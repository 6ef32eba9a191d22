"""The API of sweeps: `run("sweep.toml")`."""

from __future__ import annotations

from pathlib import Path

from fedplat.simulation.run_folder import CHECKPOINT_S
from fedplat.sweep import file as files
from fedplat.sweep.file import SweepFile
from fedplat.sweep.result import SweepResult
from fedplat.sweep.runner import Observe, WorkerOptions, compute

FOLDER = Path("sweeps")
"""The folder of the output folders of sweeps, by default."""


def run(
    file: str | Path | SweepFile,
    output: str | Path | None = None,
    *,
    jobs: int = 0,
    ray: bool = False,
    checkpoint_s: float = CHECKPOINT_S,
    observe: Observe = lambda progress: None,
) -> SweepResult:
    """Compute a sweep, or continue the one in the output folder (by default `sweeps/NAME`), and write its results.

    Runs are computed by `jobs` processes, or with `ray` by actors (0: one for each core), and write a checkpoint every
    `checkpoint_s` seconds. `observe` is called with the progress of runs. Raises `JobFileError`, `DataError`,
    `EngineError` and `MissingExtraError`; after any error, the same call continues the sweep.
    """
    if not isinstance(file, SweepFile):
        file = files.read(Path(file))
    folder = Path(output) if output is not None else default_folder(file)
    options = WorkerOptions(jobs=jobs, ray=ray, checkpoint_s=checkpoint_s)
    result = SweepResult.from_evaluated(file, compute(file, folder, options, observe), folder)
    result.save()
    return result


def default_folder(file: SweepFile) -> Path:
    """Return the output folder of a sweep if none is named."""
    return FOLDER / file.path.stem
