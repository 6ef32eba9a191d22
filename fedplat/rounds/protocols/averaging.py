"""Synchronous rounds (`[mode] kind = "sync"`): a cohort starts from one version, and its updates make the next.

Other kinds have its functions where they name none of their own (`base.register`).
"""

from __future__ import annotations

import msgspec

from fedplat.job import JobSpec
from fedplat.rounds import attempts, closing, commands, demand, events, influence, interventions, selection, states
from fedplat.rounds.protocols.base import AttemptSizes, Ending, RoundProtocol, register
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.texts import format_count


def begin(job: JobState, context: commands.Context) -> commands.Transition:
    """Open the next round, or end the job after the last."""
    if job.round >= job.spec.rounds:
        return commands.Transition(closing.set_status(job, states.JobStatus.COMPLETED, ""))
    return commands.Transition(attempts.open_attempt(job, states.AttemptKind.TRAIN, context))


def size_cohort(job: JobState) -> AttemptSizes:
    """Return the sizes in the job file."""
    selection = job.spec.selection
    return AttemptSizes(selection.goal, selection.minimum, job.spec.num_wanted)


def list_needs(spec: JobSpec) -> list[tuple[str, int]]:
    """Return the goal, and what evaluations by clients need at least."""
    selection = spec.selection
    needs = [(f"selection.goal = {selection.goal:,}", selection.goal)]
    if selection.sampling.is_trial:
        needs = [(f"selection.wait_for = {selection.wait_for:,}", selection.wait_for)]
    if (clients := spec.evaluation.clients) is not None:
        needs.append((f"evaluation.clients.goal = {clients.goal:,}", clients.minimum))
    return needs


def describe_cohort(spec: JobSpec) -> str:
    """Return how many clients are assigned and needed."""
    reports = format_count(spec.selection.goal, "report")
    return f"{format_count(spec.num_wanted, 'client')} assigned and {reports} needed in each"


def demand_cohort(job: JobState, attempt: Attempt) -> demand.Demand | None:
    """Demand a cohort while the attempt selects.

    Trials per client have no target to wait for: only `wait_for` determines when enough clients are waiting.
    """
    if attempt.phase is not states.AttemptPhase.SELECTING:
        return None
    options = job.spec.selection
    enough = options.wait_for or None if options.sampling.is_trial else max(options.wait_for, attempt.target)
    return selection.training_demand(job, attempt, attempt.target, enough)


def count_candidates(job: JobState, attempt: Attempt, event: events.CandidatesDrawn) -> tuple[int, int]:
    """Count the drawn clients; the last draw must have the minimum."""
    return len(event.client_ids), attempt.minimum if event.final else 1


def judge_end(job: JobState, attempt: Attempt, context: commands.Context) -> Ending:
    """Close at the goal, or when no client is left to wait for; with `close = "deadline"` wait for all."""
    if attempt.num_reported + attempt.num_busy < attempt.minimum:
        return Ending.FAIL
    waits_for_all = job.spec.selection.close == "deadline"
    return Ending.WAIT if attempt.num_busy and (attempt.num_reported < attempt.goal or waits_for_all) else Ending.CLOSE


def weigh(job: JobState, reported: Assignment, staleness: int) -> float:
    """Return the weight of an update by the current claims."""
    return job.spec.weight(reported.num_examples, staleness, influence.limit_by_claims(job))


def longest_s(job: JobState, assignment: Assignment) -> float:
    """Return the longest time that a client may still train after a restart; an adaptive deadline gave less."""
    return min(job.spec.deadlines.training_s, assignment.deadline_at - assignment.assigned_at)


def list_deadlines(job: JobState, attempt: Attempt) -> tuple[float | None, ...]:
    """Return the moments at which the attempt changes without an event."""
    if attempt.awaits_clients:
        return (attempt.selection_ends_at,)
    if attempt.phase in states.WORKING_PHASES:
        return attempt.next_deadline if attempt.num_busy else None, attempt.closes_at
    return (attempt.step_ends_at,)


def describe_failure(job: JobState, attempt: Attempt, event: events.AggregationFailed) -> tuple[JobState, str]:
    """Return why the attempt has failed; no client is to blame."""
    return job, f"aggregation failed: {event.text}"


def read_no_state(stored: object, spec: JobSpec) -> None:
    """Refuse a state: jobs of this kind keep nothing but their attempts."""
    if stored is not None:
        raise msgspec.ValidationError(f"Expected `null`, got `{type(stored).__name__}`")


AVERAGING = register(
    RoundProtocol(
        name="sync",
        read_state=read_no_state,
        begin=begin,
        sizes=size_cohort,
        list_needs=list_needs,
        describe_cohort=describe_cohort,
        demand=demand_cohort,
        count_candidates=count_candidates,
        on_drawn=attempts.assign_cohort,
        timeouts=attempts.timeouts,
        longest_s=longest_s,
        on_reclaimed=attempts.reassign,
        on_reported=attempts.take_report,
        judge_report=attempts.judge_claim,
        weigh=weigh,
        on_ended=attempts.go_on,
        judge_end=judge_end,
        on_deadline=closing.drop_late,
        release_busy=closing.release_surplus,
        on_aggregation_failed=describe_failure,
        resume=interventions.resume_attempt,
        deadlines=list_deadlines,
    )
)
