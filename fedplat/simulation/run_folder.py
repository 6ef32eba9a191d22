"""A run's folder while it runs: what is written when, and how a run that was stopped goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from fedplat.simulation.recording import checkpoint
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report.tensorboard import EventFile
from fedplat.simulation.run import Hooks

Observer = Callable[[AttemptResult], object]
CHECKPOINT_S = 5.0
"""A checkpoint takes a few synced files: this often it costs nothing that is noticed."""


@dataclasses.dataclass(frozen=True)
class RunFolderOptions:
    """Where a run is kept. `resume` goes on with the one that is there, from its last checkpoint.

    Checkpoints are at least `checkpoint_s` seconds apart. `tensorboard`: event files are written too.
    """

    folder: Path
    resume: bool = False
    tensorboard: bool = False
    checkpoint_s: float = CHECKPOINT_S


class Pace:
    """What this process has computed, and in how much time; what was replayed from a journal does not count.

    `begins` is called while attempts are replayed, after each.
    """

    def __init__(self, replayed: int, begins: Callable[[], object]) -> None:
        self.updates = 0
        self._replayed, self._begins = replayed, begins
        self._since = time.perf_counter()

    def add(self, record: AttemptResult) -> None:
        """An attempt has ended."""
        if record.version <= self._replayed:
            self._since = time.perf_counter()
            self._begins()
        else:
            self.updates += record.counts.get("MERGED", 0)

    def seconds(self) -> float:
        """Since the first attempt that was not replayed began."""
        return time.perf_counter() - self._since


class Throttle:
    """Says at most once in so many seconds that it is time."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._last = seconds, clock, clock()

    def __call__(self) -> bool:
        """Whether it is time."""
        if self._clock() - self._last < self._seconds:
            return False
        self._last = self._clock()
        return True


@contextlib.contextmanager
def open_run_folder(
    keep: RunFolderOptions | None,
    inputs: Mapping[str, Any],
    observe: Observer,
    on_begin: Callable[[], object] = lambda: None,
) -> Generator[tuple[Hooks, Pace]]:
    """What a run tells while it runs, and its pace. `given` is what the run is given, for its folder.

    Raises `DataError` where the folder has a run and shall have none, or none and shall have one, or another one.
    """
    with contextlib.ExitStack() as stack:
        observers: list[Observer] = []
        hooks, replayed = Hooks(), 0
        if keep is not None:
            (folders.resume if keep.resume else folders.begin)(keep.folder, inputs)
            journal = keep.folder / folders.JOURNAL
            found = checkpoint.find(journal)
            replayed = 0 if found is None else found.version
            hooks = dataclasses.replace(hooks, journal=journal, checkpoint_due=Throttle(keep.checkpoint_s))
            observers.append(stack.enter_context(folders.Lines(keep.folder)).add)
            if keep.tensorboard:
                events = EventFile(keep.folder / folders.EVENTS)
                stack.callback(events.close)
                observers.append(events.add)
        pace = Pace(replayed, on_begin)
        # The folder first: what somebody sees is in it.
        observers += [observe, pace.add]

        def tell(record: AttemptResult) -> None:
            for each in observers:
                each(record)

        yield dataclasses.replace(hooks, observe=tell), pace


def forget(keep: RunFolderOptions) -> None:
    """Removes what only a run that was stopped needs."""
    shutil.rmtree(keep.folder / folders.JOURNAL, ignore_errors=True)
