"""What the coordinator remembers of a job's clients: who took part when, and what was last heard of them.

It stands beside the jobs' states, not in them: a step copies nothing of it. Only clients that took part are in it.
It follows from the stored assignments alone, so that a server that is started again makes the very same (`recall`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from fedplat.job import JobSpec
from fedplat.rounds.records import Assignment, JobState
from fedplat.rounds.states import ENDED_JOBS
from fedplat.sampling import ClientHistory


@dataclasses.dataclass(frozen=True, slots=True)
class Participation:
    """What is remembered of one assignment of an attempt to train. `took_s` is None unless it was reported."""

    client_id: str
    round: int
    attempt: int
    num_examples: float
    took_s: float | None
    metrics: Mapping[str, float]


def participations_of(assignments: Iterable[Assignment]) -> list[Participation]:
    """Assignments in the order of their reports, and after them those without one."""
    ordered = sorted(assignments, key=lambda each: (each.report_number is None, each.report_number or 0))
    return [
        Participation(each.client_id, each.key.round, each.key.number, each.num_examples, each.took_s, each.metrics)
        for each in ordered
    ]


NEVER = 1 << 40
"""Beyond all rounds."""


class ParticipationHistory:
    """The clients of one job. `min_separation`: how many rounds a client rests after one that it took part in.

    A client that was assigned in round r is not drawn before round r + min_separation + 1, and never again once it was
    assigned in `max_participations` rounds (0: any number). But a further attempt at round r may draw it, since nothing
    came of the attempt before. Rounds count in which its update was lost, or is not there yet: whether it is in the
    version is not known when the next round draws, and a limit that counts too much costs use, not privacy.
    """

    def __init__(self, min_separation: int = 0, max_participations: int = 0) -> None:
        self.clients: dict[str, ClientHistory] = {}
        self.utilities: list[float] = []
        self._rest = min_separation
        self._most = max_participations
        self._reported: dict[str, tuple[int, int]] = {}

    @classmethod
    def recall(cls, spec: JobSpec, participations: Iterable[Participation]) -> ParticipationHistory | None:
        """The memory of a job with these in its store, in the order of rounds; None if it has no use for one."""
        if not spec.remembers:
            return None
        memory = cls(spec.selection.min_separation, spec.max_participations)
        for each in participations:
            memory.record(each)
        return memory

    def record(self, now: Participation) -> bool:
        """Remembers a participation, as far as it has come. Says whether it is new; said again, it changes nothing."""
        name = (now.round, now.attempt)
        past = self.clients.get(now.client_id)
        is_new = past is None or (past.round, past.attempt) < name
        if past is None:
            past = self.clients[now.client_id] = ClientHistory(*name)
        elif is_new:
            past.num_rounds += past.round < now.round
            past.round, past.attempt = name
            past.num_participations += 1
        if now.took_s is not None and self._reported.get(now.client_id, (0, 0)) < name:
            self._reported[now.client_id] = name
            past.num_examples, past.duration_s, past.loss = now.num_examples, now.took_s, _loss(now.metrics)
            self.utilities += [0.0] * (now.round + 1 - len(self.utilities))
            self.utilities[now.round] += past.utility
        return is_new

    def rounds_to_rest(self, client_id: str, round_: int, attempt: int = 0) -> int:
        """How many rounds have to pass before the client may be drawn; 0: it may be for this attempt at this round.

        `NEVER` for one at its limit; but in the last round that it took part in, and while it rests, it is asked about
        again, since a further attempt at that round may draw it.
        """
        past = self.clients.get(client_id)
        if past is None or not (self._rest or self._most) or (past.round == round_ and past.attempt != attempt):
            return 0
        is_last = self.is_at_limit(client_id)
        if past.round + self._rest < round_:
            return NEVER if is_last else 0
        return past.round + self._rest + 1 - round_ if self._rest or is_last else 0

    def is_at_limit(self, client_id: str) -> bool:
        """Whether the client took part in as many rounds as it may."""
        past = self.clients.get(client_id)
        return past is not None and 0 < self._most <= past.num_rounds


def rounds_to_recall(job: JobState) -> range:
    """The rounds whose participations a memory needs; none for a job that has no use for one."""
    spec, selection = job.spec, job.spec.selection
    if job.status in ENDED_JOBS or not spec.remembers:
        return range(0)
    whole = selection.sampling.remembers or spec.max_participations > 0
    first = 1 if whole else max(1, job.round + 1 - selection.min_separation)
    return range(first, job.round + 2)


def _loss(metrics: Mapping[str, float]) -> float | None:
    """The root mean square of the loss, as far as the client tells it; a negative one is worth nothing."""
    squared, mean = metrics.get("loss_squared"), metrics.get("loss")
    if squared is not None and math.isfinite(squared):
        return math.sqrt(max(squared, 0.0))
    return max(mean, 0.0) if mean is not None and math.isfinite(mean) else None
