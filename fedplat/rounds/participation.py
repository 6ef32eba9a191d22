"""The participation of a job's clients, as the coordinator remembers it: when they took part, and their last reports.

It is kept beside the jobs' states, so that no step copies it, and contains only clients that took part. It is derived
from the stored assignments alone, so that a restarted server rebuilds the same history (`recall`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from fedplat.job import JobSpec
from fedplat.rounds import records, states
from fedplat.sampling import ClientHistory


@dataclasses.dataclass(frozen=True, slots=True)
class Participation:
    """One assignment of an attempt to train. `took_s` is None unless it was reported."""

    client_id: str
    round: int
    attempt: int
    num_examples: float
    took_s: float | None
    metrics: Mapping[str, float]


def participations_of(assignments: Iterable[records.Assignment]) -> list[Participation]:
    """Return assignments as participations: first the reported ones in the order of their reports, then the others."""
    ordered = sorted(assignments, key=lambda each: (each.report_number is None, each.report_number or 0))
    return [
        Participation(each.client_id, each.key.round, each.key.number, each.num_examples, each.took_s, each.metrics)
        for each in ordered
    ]


NEVER = 1 << 40
"""A round number beyond all rounds."""


class ParticipationHistory:
    """The participation history of one job's clients. `min_separation`: rounds that a client rests after taking part.

    A client that was assigned in round r is not drawn before round r + min_separation + 1, and never again after it was
    assigned in `max_participations` rounds (0: no limit). Another attempt at round r may draw it, because the attempt
    before had no result. A round counts even if the client's update was lost or has not arrived: when the next round
    draws, it is unknown whether the version contains it, and counting too much costs utility, not privacy.
    """

    def __init__(self, min_separation: int = 0, max_participations: int = 0) -> None:
        self.clients: dict[str, ClientHistory] = {}
        self.utilities: list[float] = []
        self._rest = min_separation
        self._max_rounds = max_participations
        self._reported: dict[str, tuple[int, int]] = {}

    @classmethod
    def recall(cls, spec: JobSpec, participations: Iterable[Participation]) -> ParticipationHistory | None:
        """Rebuild the history from stored participations, in order of rounds; None if the job does not need one."""
        if not spec.remembers:
            return None
        history = cls(spec.selection.min_separation, spec.max_participations)
        for each in participations:
            history.record(each)
        return history

    def record(self, now: Participation) -> bool:
        """Record the current state of a participation and return whether it is new. Recording is idempotent."""
        key = (now.round, now.attempt)
        past = self.clients.get(now.client_id)
        is_new = past is None or (past.round, past.attempt) < key
        if past is None:
            past = self.clients[now.client_id] = ClientHistory(*key)
        elif is_new:
            past.num_rounds += past.round < now.round
            past.round, past.attempt = key
            past.num_participations += 1
        if now.took_s is not None and self._reported.get(now.client_id, (0, 0)) < key:
            self._reported[now.client_id] = key
            past.num_examples, past.duration_s, past.loss = now.num_examples, now.took_s, _loss(now.metrics)
            self.utilities += [0.0] * (now.round + 1 - len(self.utilities))
            self.utilities[now.round] += past.utility
        return is_new

    def rounds_to_rest(self, client_id: str, round_: int, attempt: int = 0) -> int:
        """Return how many rounds must pass before the client may be drawn; 0 if this attempt may draw it.

        `NEVER` for a client at its limit, once its rest after its last round is over. Until then the result is finite,
        because another attempt at that round may draw it.
        """
        past = self.clients.get(client_id)
        if past is None or not (self._rest or self._max_rounds) or (past.round == round_ and past.attempt != attempt):
            return 0
        is_at_limit = self.is_at_limit(client_id)
        if past.round + self._rest < round_:
            return NEVER if is_at_limit else 0
        return past.round + self._rest + 1 - round_ if self._rest or is_at_limit else 0

    def is_at_limit(self, client_id: str) -> bool:
        """Return whether the client took part in as many rounds as it may."""
        past = self.clients.get(client_id)
        return past is not None and 0 < self._max_rounds <= past.num_rounds


def rounds_to_recall(job: records.JobState) -> range:
    """Return the rounds whose participations a history needs; an empty range if the job needs no history."""
    spec, selection = job.spec, job.spec.selection
    if job.status in states.ENDED_JOBS or not spec.remembers:
        return range(0)
    whole = selection.uses_history or spec.max_participations > 0
    first = 1 if whole else max(1, job.round + 1 - selection.min_separation)
    return range(first, job.round + 2)


def _loss(metrics: Mapping[str, float]) -> float | None:
    """Return the root mean square of the loss from the metrics that the client reports; negative values count as 0."""
    squared, mean = metrics.get("loss_squared"), metrics.get("loss")
    if squared is not None and math.isfinite(squared):
        return math.sqrt(max(squared, 0.0))
    return max(mean, 0.0) if mean is not None and math.isfinite(mean) else None
