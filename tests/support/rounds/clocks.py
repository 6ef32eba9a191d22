"""The clocks of jobs with `[mode] kind = "ssp"`, counted a second time from the stored assignments."""

from __future__ import annotations

from collections import Counter

from fedplat.rounds import AssignmentId, Change, JobState
from fedplat.rounds.protocols.ssp import clocks_of
from fedplat.rounds.states import AssignmentState, AttemptKind, Reason


class Clocks:
    """Follows each change of a job: who joined at which clock, and how many of its updates were merged since."""

    def __init__(self) -> None:
        self._joined: dict[str, dict[str, int]] = {}
        self._merged: dict[str, Counter[str]] = {}
        self._seen: set[AssignmentId] = set()

    def follow(self, before: JobState, change: Change) -> None:
        """Check the clocks after one change against the counts."""
        job, mode = change.job, change.job.spec.stale_synchronous
        if mode is None:
            assert not clocks_of(job).clocks
            return
        joined, merged = self._joined.setdefault(job.job_id, {}), self._merged.setdefault(job.job_id, Counter())
        trained = [row for row in change.assignments if row.kind is AttemptKind.TRAIN]
        merged.update(row.client_id for row in trained if row.state is AssignmentState.MERGED)
        members, were = clocks_of(job).clocks, clocks_of(before)
        for name in [name for name in joined if name not in members]:
            del joined[name], merged[name]
        for name in [name for name in members if name not in joined]:
            joined[name], merged[name] = members[name], 0
            assert members[name] in (were.minimum, were.ahead.get(name)), "it joins at the minimum or its own"
        assert members == {name: clock + merged[name] for name, clock in joined.items()}
        assert len(members) <= mode.concurrency
        assert {each.client_id for each in job.open_assignments if each.kind is AttemptKind.TRAIN} <= members.keys()
        slowest = min(members.values(), default=clocks_of(job).minimum)
        assert were.minimum <= clocks_of(job).minimum == slowest
        assert all(slowest <= clock <= slowest + mode.slack + 1 for clock in members.values()), "out of bounds"
        for row in trained:
            if row.id not in self._seen:
                self._seen.add(row.id)
                assert members[row.client_id] - slowest <= mode.slack, "it begins too far ahead"
                # All merged updates are in the version that it begins with, so it reads those that it must.
                assert row.base_version == job.latest.version
            assert row.reason is not Reason.TOO_STALE
            assert not (row.state in (AssignmentState.LATE, AssignmentState.FAILED) and row.client_id in members)
