"""Which reports are stored together: how long a batch of them waits for others. Pure; times are seconds on one clock.

A report waits for those that are on their way and, if others came just before, a moment for the next one. So the number
of transactions follows the load: a report that is alone waits for none, and a thousand that arrive together cost a few
commits, however fast the machine is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable

from fedplat.rounds import Coordinator, events

ENOUGH = 100
"""The number of reports with which a batch waits no longer."""
GATHER_S = 0.25
"""The longest time for which a report waits for others."""
COMING_S = 0.1
"""The longest time for which a report is expected after its call began."""
RECENT_S = 0.25
"""The time for which more reports of a job are likely after one."""
GAP_S = 0.02
"""The time for which a report waits for the next one then, although none is on its way."""
POLL_GAP_S = 0.005
"""The same if clients that check in wait, too."""


class ComingReports:
    """By job, the reports on their way from the server's port to the runner's queue, and when the last ones came.

    A report is expected until it is queued, until its call ends, or for `COMING_S`, whichever is first. So a client
    that begins a call and sends nothing delays the reports of its own job by that time at most.
    """

    def __init__(self) -> None:
        self._begun: dict[str, dict[str, float]] = {}  # by job and client, the latest one last
        self._queued: dict[str, tuple[float, float]] = {}  # by job: the last report but one, and the last one

    @contextlib.contextmanager
    def expect(self, job_id: str, client_id: str, now: float) -> Generator[None]:
        """Expect the report of a client from now on, at most until the block ends."""
        begun = self._begun.setdefault(job_id, {})
        begun.pop(client_id, None)
        begun[client_id] = now
        try:
            yield
        finally:
            self._drop(job_id, client_id)

    def on_queued(self, report: events.UpdateReported, now: float) -> None:
        """Expect a report no more, and note its time."""
        job_id = report.key.job_id
        self._drop(job_id, report.client_id)
        _, last = self._queued.get(job_id, (-math.inf, -math.inf))
        self._queued[job_id] = last, now

    def expected_until(self, job_ids: Iterable[str]) -> float:
        """Return the time until which a report of one of these jobs is expected; minus infinity without one."""
        latest = (next(reversed(begun.values())) for each in job_ids if (begun := self._begun.get(each)))
        return max(latest, default=-math.inf) + COMING_S

    def last_but_one(self, job_id: str) -> float:
        """Return when the report of a job came that was followed by the last one; minus infinity without one."""
        return self._queued.get(job_id, (-math.inf, -math.inf))[0]

    def _drop(self, job_id: str, client_id: str) -> None:
        begun = self._begun.get(job_id, {})
        if begun.pop(client_id, None) is not None and not begun:
            del self._begun[job_id]


class Gathering:
    """How long one batch waits, which begins at `now`. The jobs do not change meanwhile."""

    def __init__(self, coordinator: Coordinator, coming: ComingReports, now: float) -> None:
        self._coordinator = coordinator
        self._coming = coming
        self._began_at = now
        self._missing: dict[str, int] = {}  # by job: the reports that close its attempt
        self._num_reports = 0
        self._gap_s = GAP_S

    def add(self, event: events.Event) -> bool:
        """Add an event to the batch; return whether the batch may wait for reports.

        It may not if it has enough, or if others wait for the event: if the event closes its attempt, or is of another
        kind. Clients that check in while many report wait with them: there are as many, and what they get is stored,
        too.
        """
        if isinstance(event, events.ClientCheckedIn | events.ClientLeft):
            self._gap_s = POLL_GAP_S
            return True
        if not isinstance(event, events.UpdateReported):
            return False
        job_id = event.key.job_id
        if job_id not in self._missing:
            job = self._coordinator.jobs.get(job_id)
            attempt = job.open_attempt if job is not None else None
            self._missing[job_id] = attempt.goal - attempt.num_reported if attempt is not None else 0
        self._missing[job_id] -= 1
        self._num_reports += 1
        return self._missing[job_id] > 0 and self._num_reports < ENOUGH

    def left_s(self, now: float) -> float:
        """Return for how long the batch waits at most, unless something moves; not above 0: no longer."""
        if not self._missing:
            return 0.0
        until = self._coming.expected_until(self._missing)
        if any(now - self._coming.last_but_one(each) < RECENT_S for each in self._missing):
            until = max(until, now + self._gap_s)
        return min(until, self._began_at + GATHER_S) - now
