"""Running a sweep: the parts that the schedule asks for are computed by a pool, or taken from the output folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from fedplat import system
from fedplat.errors import DataError
from fedplat.simulation.engines.registry import ProcessesOptions
from fedplat.simulation.run_folder import CHECKPOINT_S
from fedplat.sweep import file as files
from fedplat.sweep.file import SweepFile
from fedplat.sweep.plan import Configuration, Outcome
from fedplat.sweep.pool import ProcessPool, SweepPool
from fedplat.sweep.result import SweepFolder, SweepResult, open_folder
from fedplat.sweep.schedule import ChooseBatch, Evaluated, RunKey, RunPart, TrialChooser, once, schedule
from fedplat.sweep.worker import DoneReply, PartRequest, RoundReply, WorkerSetup


class WorkerOptions(Struct, frozen=True, kw_only=True):
    """Where runs are computed: `jobs` processes, or with `ray` actors (0: one for each core).

    Runs in progress write a checkpoint every `checkpoint_s` seconds. Results do not depend on any of these.
    """

    jobs: int = 0
    ray: bool = False
    checkpoint_s: float = CHECKPOINT_S


class StepProgress(Struct, frozen=True, kw_only=True):
    """The progress of a run. `value` is the metric after `round`, if it is known.

    `is_done` is true at the end of the part, and `is_stored` if it was computed by an earlier process. `num_done` of
    the `num_runs` runs of the sweep have ended or were stopped early.
    """

    part: RunPart
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
    cores = system.num_cores()
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
        parts: Sequence[RunPart] = []
        try:
            parts = next(stages)
            while True:
                outcomes = self._compute(parts)
                following = stages.send(outcomes)
                if parts[0].until:  # those that do not continue were stopped
                    self._ended |= {part.key for part in parts} - {part.key for part in following}
                parts = following
        except StopIteration as end:
            return end.value

    def _compute(self, parts: Sequence[RunPart]) -> Mapping[RunKey, Outcome]:
        self._check({part.configuration.number: part.configuration for part in parts})
        found = {part.key: self._store.outcome(part.key, part.until) for part in parts}
        for part in parts:
            if (outcome := found[part.key]) is not None:
                self._report(part, outcome, is_stored=True)
        missing = [part for part in parts if found[part.key] is None]
        missing.sort(key=lambda part: -self._costs[part.configuration.number])  # a long run last would run alone
        requests = {self._request(part).folder: part for part in missing}
        for request, reply in self._pool.compute([self._request(part) for part in missing]):
            part = requests[request.folder]
            match reply:
                case RoundReply():
                    self._observe(
                        StepProgress(
                            part=part,
                            round=reply.round,
                            num_rounds=self._num_rounds[part.configuration.number],
                            value=reply.value,
                            is_done=False,
                            is_stored=False,
                            num_done=len(self._ended),
                            num_runs=self._file.num_runs,
                        )
                    )
                case DoneReply():
                    outcome = self._store.outcome(part.key, part.until)
                    if outcome is None:
                        raise DataError(f"the run {request.folder} has no outcome; was its folder removed?")
                    found[part.key] = outcome
                    self._report(part, outcome, is_stored=False)
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

    def _request(self, part: RunPart) -> PartRequest:
        changes = self._file.changes(part.configuration, part.seed)
        return PartRequest(folder=part.key.folder, changes=changes, until=part.until)

    def _report(self, part: RunPart, outcome: Outcome, is_stored: bool) -> None:
        if not outcome.until:
            self._ended.add(part.key)
        number = part.configuration.number
        self._observe(
            StepProgress(
                part=part,
                round=min(part.until or self._num_rounds[number], self._num_rounds[number]),
                num_rounds=self._num_rounds[number],
                value=outcome.score(self._file.objective, part.until),
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
