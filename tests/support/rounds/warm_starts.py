"""What must hold of warm starts."""

from __future__ import annotations

from collections.abc import Sequence

from fedplat.rounds import AttemptKey, JobState, ModelVersion, Proposal
from fedplat.rounds.commands import Abandon, RunWarmStart
from fedplat.rounds.events import Event, ServerRestarted
from fedplat.rounds.protocols import warm_start
from fedplat.rounds.states import AttemptKind, AttemptPhase


class WarmStarts:
    """Those that a server would be at work on, as the commands say."""

    def __init__(self) -> None:
        self.at_work: dict[str, AttemptKey] = {}

    def follow(self, events: Sequence[Event], proposal: Proposal) -> None:
        """One is begun when it is ordered, and ends with its attempt; a restart ends all."""
        for event in events:
            if isinstance(event, ServerRestarted):
                self.at_work.pop(event.job_id, None)
        for command in proposal.commands:
            if isinstance(command, RunWarmStart):
                assert (command.base_version, command.key.round) == (0, 0)
                assert self.at_work.setdefault(command.key.job_id, command.key) == command.key, "two at once"
            elif isinstance(command, Abandon) and self.at_work.get(command.key.job_id) == command.key:
                del self.at_work[command.key.job_id]
        for change in proposal.changes:
            if change.version is not None and change.version.round == 0 and change.version.restored_from is None:
                assert self.at_work.pop(change.job.job_id)[1:] == (0, change.version.attempt)

    def check(self, job: JobState, versions: Sequence[ModelVersion]) -> None:
        """The server works for exactly the open attempt; nothing else happens to the job before its version 1."""
        attempt, is_wanted = job.open_attempt, warm_start.is_wanted(job.spec)
        is_one = attempt is not None and attempt.kind is AttemptKind.WARM_START
        assert self.at_work.get(job.job_id) == (attempt.key if attempt is not None and is_one else None)
        if job.spec.gossip is not None:
            return  # its rounds make no versions
        made = [version for version in versions[1:] if version.restored_from is None]
        assert [version.round for version in made[:2]] == ([0, 1] if is_wanted else [1, 2])[: len(made)]
        assert len(made) == job.round + (is_wanted and len(made) > 0)
        assert job.round == (made[-1].round if made else 0) <= job.spec.rounds
        if attempt is not None and (is_one or (is_wanted and not made)):
            assert (is_wanted, is_one, made, attempt.phase) == (True, True, [], AttemptPhase.COMMITTING)
            assert not attempt.assignments
