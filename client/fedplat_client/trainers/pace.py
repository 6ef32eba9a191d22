"""The pace of a training: its progress, and its end before the deadline if partial work counts."""

from __future__ import annotations

import dataclasses

from fedplat_client.task import Task


@dataclasses.dataclass
class StepClock:
    """Reports progress, and ends a training before its deadline if partial work counts.

    Reserves twice the duration of the longest step so far for one more step, and a twentieth of the whole time for the
    work after the training.
    """

    task: Task
    partial_work: bool
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        self._now = self.task.control.options.clock  # not remaining_s, which the server may change
        self._last_at = self._now()
        self._begin_s = self.task.remaining_s

    def after_step(self, done: int, total: int) -> bool:
        """Report that `done` of all steps are completed, and return whether to continue. Raises `Cancelled`."""
        self.task.progress(done / total)
        if not self.partial_work:
            return True
        now = self._now()
        self.longest_s = max(self.longest_s, now - self._last_at)
        self._last_at = now
        return self.task.remaining_s > 2 * self.longest_s + self._begin_s / 20
