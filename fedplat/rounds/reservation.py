"""Reservations: a job that needs many clients at the same time gets them beside jobs that take each one as it comes.

Without them, an attempt that needs every client of a population starves: each client that has ended its work for one
small job is drawn for the next one. So the attempt that has waited longest, for `PATIENCE_S` at least, reserves the
waiting clients that it may draw, and other attempts leave them to it, under two conditions:

- The clients that wait and those that work for a job of the population would be enough, or were within `RETURN_S`: a
  client that has just reported needs a moment to check in again. So an attempt whose clients are away stops no other.
- Its time for selection is not over. Then it ends or begins, and the others are free until it has waited again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedplat.rounds.records import Attempt, AttemptKey, JobState
from fedplat.rounds.selection import WaitingRoom

PATIENCE_S = 2.0
"""The time that an attempt waits before it reserves clients."""
RETURN_S = 5.0
"""The time within which a client is expected to check in after its work."""


class Reservations:
    """For each population, the job that has reserved its clients. Nothing in it is stored."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self._holders: dict[str, str] = {}
        self._reachable: dict[str, tuple[AttemptKey, float]] = {}
        """By job: its attempt, and the last moment at which there were enough clients for it."""

    def update(self, find_job: Callable[[str], JobState | None], num_busy: Mapping[str, int], now: float) -> None:
        """Find the attempts that reserve clients now. `num_busy` is the number of working clients by population."""
        demands = self._room.demands
        self._holders.clear()
        self._reachable = {job_id: known for job_id, known in self._reachable.items() if job_id in demands}
        for job_id, demand in demands.items():  # the one that has waited longest is first
            job = find_job(job_id)
            attempt = job.open_attempt if job is not None else None
            if demand.population in self._holders or attempt is None or demand.min_eligible is None:
                continue
            if attempt.opened_at + PATIENCE_S <= now < attempt.selection_ends_at and self._may_reserve(
                job_id, attempt, num_busy.get(demand.population, 0), now
            ):
                self._holders[demand.population] = job_id

    def blocks(self, job_id: str) -> bool:
        """Return whether a job must leave the clients that it could draw to the one that has reserved them."""
        holder = self._holders.get(self._room.demands[job_id].population)
        return holder is not None and holder != job_id and self._room.have_common_clients(holder, job_id)

    def _may_reserve(self, job_id: str, attempt: Attempt, num_busy: int, now: float) -> bool:
        waiting, needed = self._room.num_eligible(job_id), self._room.demands[job_id].min_eligible
        assert needed is not None
        is_late = now >= (attempt.opened_at + attempt.selection_ends_at) / 2
        if is_late and waiting + num_busy < needed:  # then the attempt begins with fewer when its time is over
            needed = attempt.minimum
        if waiting > needed:
            return False
        if waiting + num_busy >= needed:
            self._reachable[job_id] = attempt.key, now
        key, reachable_at = self._reachable.get(job_id, (None, now))
        return key == attempt.key and now - reachable_at <= RETURN_S
