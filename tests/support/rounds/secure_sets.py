"""The sets of a secure aggregation that clients are asked about: each is fixed once, and never changes afterwards."""

from __future__ import annotations

from collections.abc import Iterable

from fedplat.job.secure import group_minimum, require_secure
from fedplat.rounds import Attempt, AttemptKey, JobState
from fedplat.rounds.protocols import secure_phases
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase
from fedplat.secure_aggregation.setup import Graph

_PHASES = [
    AttemptPhase.SELECTING,
    AttemptPhase.ADVERTISING,
    AttemptPhase.SHARING,
    AttemptPhase.COLLECTING,
    AttemptPhase.CONFIRMING,
    AttemptPhase.UNMASKING,
    AttemptPhase.COMMITTING,
    AttemptPhase.COMMITTED,
]
_STATES = {
    AttemptPhase.ADVERTISING: {AssignmentState.TRAINING, AssignmentState.ADVERTISED},
    AttemptPhase.SHARING: {AssignmentState.ADVERTISED, AssignmentState.SHARED},
    AttemptPhase.COLLECTING: {AssignmentState.SHARED, AssignmentState.UPLOADING, AssignmentState.REPORTED},
    AttemptPhase.CONFIRMING: {AssignmentState.REPORTED},
    AttemptPhase.UNMASKING: {AssignmentState.REPORTED},
    AttemptPhase.COMMITTING: {AssignmentState.REPORTED},
}
"""The states of the open assignments of each phase."""


class SecureSets:
    """What clients were asked about in each attempt, by phase, as it was when the phase began."""

    def __init__(self) -> None:
        self.asked: dict[tuple[AttemptKey, str], object] = {}
        self.unmasked: dict[str, tuple[int, ...]] = {}

    def check(self, jobs: Iterable[JobState]) -> None:
        """After each step: the sets are the same, and large enough."""
        for job in jobs:
            released = self.unmasked.get(job.job_id, ())
            assert job.unmasked[: len(released)] == released, "a release is not counted any more"
            self.unmasked[job.job_id] = job.unmasked
            attempt = job.attempt
            if attempt is None or job.spec.secure_aggregation is None or attempt.kind is not AttemptKind.TRAIN:
                continue
            if attempt.is_open and attempt.phase is not AttemptPhase.SELECTING:
                self._check_attempt(job, attempt)

    def _check_attempt(self, job: JobState, attempt: Attempt) -> None:
        reached = _PHASES.index(attempt.phase)
        groups = secure_phases.list_groups(attempt)
        working = {each.state for each in attempt.assignments.values() if each.is_open}
        assert working <= _STATES[attempt.phase]
        assert bool(groups) == (reached >= 2)
        if reached >= 2:
            self._fix(
                attempt, "roster", [[(m.client_id, secure_phases.messages_of(m).keys) for m in g] for g in groups]
            )
            sizes = [len(members) for members in groups]
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= require_secure(job.spec).group
        if reached >= 3:
            self._fix(attempt, "shares", [[secure_phases.messages_of(m).shares for m in g] for g in groups])
        if reached >= 4:
            self._check_survivors(job, attempt)
        if reached >= 5:
            self._fix(
                attempt, "confirmations", [[secure_phases.messages_of(m).confirmation for m in g] for g in groups]
            )
            assert attempt.num_survivors >= group_minimum(job.spec)
        if reached >= 6:
            self._fix(attempt, "answers", [[secure_phases.messages_of(m).answer for m in g] for g in groups])

    def _check_survivors(self, job: JobState, attempt: Attempt) -> None:
        found = [secure_phases.find_survivors(members) for members in secure_phases.list_groups(attempt)]
        self._fix(attempt, "survivors", found)
        for members, sets in zip(secure_phases.list_groups(attempt), found, strict=True):
            graph = Graph.of(require_secure(job.spec), len(members))
            assert not set(sets.survivors) & set(sets.dropped)
            assert len(sets.survivors) >= max(group_minimum(job.spec), graph.threshold)
            assert all(secure_phases.messages_of(members[place]).shares for place in (*sets.survivors, *sets.dropped))
            if attempt.phase is AttemptPhase.COMMITTING:
                answered = [place for place, each in enumerate(members) if secure_phases.messages_of(each).answer]
                assert graph.is_recoverable((*sets.survivors, *sets.dropped), answered)

    def _fix(self, attempt: Attempt, name: str, found: object) -> None:
        assert self.asked.setdefault((attempt.key, name), found) == found, f"the {name} have changed"
