"""Running a sweep: the steps that the schedule asks for are computed by a pool, or taken from the output folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from fedplat.errors import DataError
from fedplat.simulation.engines.registry import ProcessesOptions
from fedplat.simulation.run_folder import CHECKPOINT_S
from fedplat.sweep import file as files
from fedplat.sweep.file import SweepFile
from fedplat.sweep.outcome import Outcome
from fedplat.sweep.plan import Configuration
from fedplat.sweep.pool import ProcessPool, SweepPool
from fedplat.sweep.result import SweepResult
from fedplat.sweep.schedule import ChooseBatch, Evaluated, RunKey, RunStep, once, schedule
from fedplat.sweep.search import TrialChooser
from fedplat.sweep.store import SweepFolder, open_folder
from fedplat.sweep.worker import DoneReply, RoundReply, StepRequest, WorkerSetup


class WorkerOptions(Struct, frozen=True, kw_only=True):
    """Where runs are computed: `jobs` processes, or with `ray` actors (0: one for each core).

    Runs in progress write a checkpoint every `checkpoint_s` seconds. Results do not depend on any of these.
    """

    jobs: int = 0
    ray: bool = False
    checkpoint_s: float = CHECKPOINT_S


class StepProgress(Struct, frozen=True, kw_only=True):
    """The progress of a run. `value` is the metric after `round`, if it is known.

    `is_done` is true at the end of the step, and `is_stored` if it was computed by an earlier process. `num_done` of
    the `num_runs` runs of the sweep have ended or were stopped early.
    """

    step: RunStep
    round: int
    num_rounds: int
    value: float | None
    is_done: bool
    is_stored: bool
    num_done: int
    num_runs: int


Observe = Callable[[StepProgress], object]


def compute(file: SweepFile, folder: Path, options: WorkerOptions, observe: Observe) -> list[Evaluated]:
    """Compute all runs of a sweep that are not in the folder yet, and return all evaluated configurations.

    Raises `DataError`, `EngineError`, `JobFileError` and `MissingExtraError`; the same call continues the sweep.
    """
    choose = TrialChooser(file.options.search, file.objective) if file.options.search else once(file.configurations)
    with open_folder(folder, file) as store, contextlib.closing(_open_pool(file, store, options)) as pool:
        return _Runner(file, store, pool, observe).run(choose)


def num_processes(file: SweepFile, options: WorkerOptions) -> int:
    """Return the number of processes: one for each core, or fewer if each run uses several processes of its own."""
    if options.jobs:
        return options.jobs
    cores = len(os.sched_getaffinity(0))
    own = (file.base.simulation.workers or cores) if isinstance(file.base.simulation.engine, ProcessesOptions) else 1
    return max(1, cores // own)


class _Runner:
    def __init__(self, file: SweepFile, store: SweepFolder, pool: SweepPool, observe: Observe) -> None:
        self._file, self._store, self._pool, self._observe = file, store, pool, observe
        self._num_rounds: dict[int, int] = {}
        self._costs: dict[int, float] = {}
        self._ended: set[RunKey] = set()

    def run(self, choose: ChooseBatch) -> list[Evaluated]:
        stages = schedule(choose, self._file.seeds, self._file.objective, self._file.options.stopping)
        steps: Sequence[RunStep] = []
        try:
            steps = next(stages)
            while True:
                outcomes = self._compute(steps)
                following = stages.send(outcomes)
                if steps[0].until:  # those that do not continue were stopped
                    self._ended |= {step.key for step in steps} - {step.key for step in following}
                steps = following
        except StopIteration as end:
            return end.value

    def _compute(self, steps: Sequence[RunStep]) -> Mapping[RunKey, Outcome]:
        self._check({step.configuration.number: step.configuration for step in steps})
        found = {step.key: self._store.outcome(step.key, step.until) for step in steps}
        for step in steps:
            if (outcome := found[step.key]) is not None:
                self._report(step, outcome, is_stored=True)
        missing = [step for step in steps if found[step.key] is None]
        missing.sort(key=lambda step: -self._costs[step.configuration.number])  # a long run last would run alone
        requests = {self._request(step).folder: step for step in missing}
        for request, reply in self._pool.compute([self._request(step) for step in missing]):
            step = requests[request.folder]
            match reply:
                case RoundReply():
                    self._observe(
                        StepProgress(
                            step=step,
                            round=reply.round,
                            num_rounds=self._num_rounds[step.configuration.number],
                            value=reply.value,
                            is_done=False,
                            is_stored=False,
                            num_done=len(self._ended),
                            num_runs=self._file.num_runs,
                        )
                    )
                case DoneReply():
                    outcome = self._store.outcome(step.key, step.until)
                    if outcome is None:
                        raise DataError(f"the run {request.folder} has no outcome; was its folder removed?")
                    found[step.key] = outcome
                    self._report(step, outcome, is_stored=False)
                case _:
                    raise AssertionError(reply)  # the pool raises the errors of failed runs
        return {key: outcome for key, outcome in found.items() if outcome is not None}

    def _check(self, configurations: Mapping[int, Configuration]) -> None:
        """Check new configurations of a search, and estimate the cost of their runs."""
        new = [each for number, each in configurations.items() if number not in self._costs]
        for configuration, file in zip(new, self._file.check(new), strict=True):
            epochs = file.job.config.get("epochs", 1)
            self._num_rounds[configuration.number] = file.job.rounds
            work = file.job.rounds * file.job.selection.goal * (epochs if isinstance(epochs, int) else 1)
            self._costs[configuration.number] = float(work)

    def _request(self, step: RunStep) -> StepRequest:
        changes = self._file.changes(step.configuration, step.seed)
        return StepRequest(folder=step.key.folder, changes=changes, until=step.until)

    def _report(self, step: RunStep, outcome: Outcome, is_stored: bool) -> None:
        if not outcome.until:
            self._ended.add(step.key)
        number = step.configuration.number
        self._observe(
            StepProgress(
                step=step,
                round=min(step.until or self._num_rounds[number], self._num_rounds[number]),
                num_rounds=self._num_rounds[number],
                value=outcome.score(self._file.objective, step.until),
                is_done=True,
                is_stored=is_stored,
                num_done=len(self._ended),
                num_runs=self._file.num_runs,
            )
        )


def _open_pool(file: SweepFile, store: SweepFolder, options: WorkerOptions) -> SweepPool:
    objective = file.objective
    setup = WorkerSetup(
        base_text=file.base_text,
        base_folder=str(file.folder),
        runs=str(store.runs.absolute()),
        metric=objective.metric,
        maximize=objective.maximize,
        best=objective.best,
        target=objective.target,
        checkpoint_s=options.checkpoint_s,
    )
    if not options.ray:
        return ProcessPool(num_processes(file, options), setup)
    from fedplat.sweep.pool import RayPool

    return RayPool(options.jobs, setup)


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
