"""Private jobs (`[privacy]`): a wrapper around the protocol of their training (`fedplat.rounds.privacy_rules`).

It changes what makes a release: when a round may begin, how many clients it needs, and when it may close. Which numbers
of a client are stored or shown is not part of it: that holds for all attempts of a job, also for its evaluations.
"""

from __future__ import annotations

import dataclasses

from fedplat.rounds import closing, commands, privacy_rules, records, states
from fedplat.rounds.protocols.base import AttemptSizes, Ending, RoundProtocol


def wrap(inner: RoundProtocol) -> RoundProtocol:
    """Return the protocol of jobs that train as `inner`, privately.

    A minimum number of reports would depend on the participants, so it is 0, unless masks are removed: that reveals
    their number in any case.
    """

    def begin(job: records.JobState, context: commands.Context) -> commands.Transition | None:
        """Pause instead of opening a round for which the budget does not suffice."""
        begun = inner.begin(job, context)
        if begun is None or begun.job.open_attempt is None:
            return begun
        spent = privacy_rules.describe_spent_budget(job)
        return commands.Transition(closing.set_status(job, states.JobStatus.PAUSED, spent)) if spent else begun

    def judge_end(job: records.JobState, attempt: records.Attempt, context: commands.Context) -> Ending:
        """Close an attempt that hides its sample only at its moment."""
        if attempt.closes_at is None:
            return inner.judge_end(job, attempt, context)
        return Ending.WAIT if context.now < attempt.closes_at else Ending.CLOSE

    def sizes(job: records.JobState) -> AttemptSizes:
        return inner.sizes(job) if inner.has_masks else inner.sizes(job)._replace(minimum=0)

    return dataclasses.replace(
        inner,
        name=f"private {inner.name}",
        may_be_empty=not inner.has_masks,
        begin=begin,
        sizes=sizes,
        count_candidates=privacy_rules.count_candidates,
        closes_at=privacy_rules.closes_at,
        judge_end=judge_end,
    )
