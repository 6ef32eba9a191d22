"""A job with a procedure (`[procedure]`), which asks the same sites for sums in each round.

`wrap` changes what has to do with the sites. The first attempt draws them, and all others have the same: with other
sites the difference of two sums would be what one site has. So an attempt needs the replies of all of them, and the job
pauses while one is away, or if one cannot answer; a retry asks the same sites for the same integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
from msgspec import Struct, structs

from fedplat import texts
from fedplat.config.decoding import prepare_type
from fedplat.job import JobSpec
from fedplat.job.secure import group_minimum
from fedplat.job.tables import require_procedure
from fedplat.model import Parameters
from fedplat.procedures import contract, versions
from fedplat.rounds import attempts, closing, pacing, states
from fedplat.rounds.commands import Context, Transition
from fedplat.rounds.demand import Demand
from fedplat.rounds.events import AttemptAggregated, CandidatesDrawn
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.averaging import AVERAGING
from fedplat.rounds.protocols.base import AttemptSizes, RoundProtocol, register
from fedplat.rounds.protocols.secure import SECURE
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.secure_aggregation import setup

_MAX_NAMED = 10
_NO_ROLLBACK = "cannot roll back a procedure, whose steps follow from each other; submit a new job instead"


class ProcedureState(Struct, frozen=True, forbid_unknown_fields=True):
    """The sites of a job, none before they were drawn, and whether the latest version is the result."""

    cohort: tuple[str, ...] = ()
    is_finished: bool = False


_BEFORE = ProcedureState()


def state_of(job: JobState) -> ProcedureState:
    """Return what a job with a procedure keeps between attempts."""
    return job.protocol if isinstance(job.protocol, ProcedureState) else _BEFORE


def _write_state(job: JobState) -> object:
    return None if state_of(job) == _BEFORE else msgspec.to_builtins(state_of(job))


def _read_state(stored: object, spec: JobSpec) -> ProcedureState | None:
    return None if stored is None else msgspec.convert(stored, prepare_type(ProcedureState))


def _first_model(spec: JobSpec) -> Parameters:
    return versions.begin(require_procedure(spec)).model


def _refuse_rollback(job: JobState) -> str:
    return _NO_ROLLBACK


def _size(job: JobState) -> AttemptSizes:
    goal = job.spec.selection.goal
    return AttemptSizes(goal, goal, goal)


def _describe_cohort(spec: JobSpec) -> str:
    return f"the same {texts.format_count(spec.selection.goal, 'site')} in each"


def _list_plain(spec: JobSpec) -> list[str]:
    """Return what leaves a site, and who sees it."""
    seen = "the server sees these numbers of each site, and operators see the result"
    return [*map(str, require_procedure(spec).disclosures()), seen]


def _list_masked(spec: JobSpec) -> list[str]:
    """Return what leaves a site, and who sees it."""
    fewest = group_minimum(spec)
    seen = f"the server sees only sums of these numbers over {fewest} sites or more, and operators see the result"
    return [*map(str, require_procedure(spec).disclosures()), seen]


def _pause(failed: Transition, text: str) -> Transition:
    """Pause a job whose attempt has failed, if it would be retried."""
    if failed.job.status is not states.JobStatus.RUNNING:
        return failed
    return structs.replace(failed, job=closing.set_status(failed.job, states.JobStatus.PAUSED, text))


def _describe_lost(job: JobState, present: tuple[str, ...]) -> str:
    """Return which sites of the cohort are away, for an operator."""
    lost = [site for site in state_of(job).cohort if site not in present]
    text = f"step {job.round + 1} needs all {texts.format_count(len(state_of(job).cohort), 'site')} of the first step, "
    text += f"and {len(lost):,} did not come within deadlines.selection_s = {job.spec.deadlines.selection_s:g} s"
    if disclosure_of(job.spec).shows_clients:
        text += f": {', '.join(lost[:_MAX_NAMED])}" + (", ..." if len(lost) > _MAX_NAMED else "")
    return f"{text}; resume the job when they are back, or submit a new job for the others"


def _on_drawn(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    """Assign the sites if all of them are there. Those of the first attempt are the sites of the job."""
    state = state_of(job)
    if len(event.client_ids) >= attempt.minimum:
        cohort = state.cohort or tuple(event.client_ids)
        job = structs.replace(job, protocol=structs.replace(state, cohort=cohort))
        return attempts.assign(job, attempt, event.client_ids, context)
    if not state.cohort:
        return attempts.assign_cohort(job, attempt, event, context)
    text = _describe_lost(job, tuple(event.client_ids))
    return _pause(closing.fail_attempt(job, text, context), text)


def _count_candidates(job: JobState, attempt: Attempt, event: CandidatesDrawn) -> tuple[int, int]:
    return len(event.client_ids), attempt.minimum


def wrap(
    inner: RoundProtocol, name: str, features: frozenset[str], list_disclosures: Callable[[JobSpec], list[str]]
) -> RoundProtocol:
    """Return the protocol of jobs whose replies are added up as the updates of `inner`, always of the same sites."""

    def begin(job: JobState, context: Context) -> Transition | None:
        """End the job after the result, or after the last round."""
        if state_of(job).is_finished:
            return Transition(closing.set_status(job, states.JobStatus.COMPLETED, ""))
        if job.round >= job.spec.rounds:
            text = f"the procedure has no result after rounds = {job.spec.rounds:,} steps; submit it with more"
            return Transition(closing.set_status(job, states.JobStatus.FAILED, text))
        return inner.begin(job, context)

    def demand(job: JobState, attempt: Attempt) -> Demand | None:
        wanted, cohort = inner.demand(job, attempt), state_of(job).cohort
        return dataclasses.replace(wanted, cohort=frozenset(cohort)) if wanted is not None and cohort else wanted

    def advance(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
        after = inner.advance(job, attempt, context)
        return _pause_if_lasting(after) if after is not None else None

    def on_ended(job: JobState, ended: Assignment, context: Context) -> Transition:
        return _pause_if_lasting(inner.on_ended(job, ended, context))

    def on_committed(job: JobState, event: AttemptAggregated) -> Transition:
        after = inner.on_committed(job, event)
        state = structs.replace(state_of(after.job), is_finished=not event.cohort)
        return structs.replace(after, job=structs.replace(after.job, protocol=state))

    return dataclasses.replace(
        inner,
        name=name,
        has_rule=False,
        features=features,
        write_state=_write_state,
        read_state=_read_state,
        first_model=_first_model,
        describe_cohort=_describe_cohort,
        list_disclosures=list_disclosures,
        begin=begin,
        sizes=_size,
        demand=demand,
        count_candidates=_count_candidates,
        on_drawn=_on_drawn,
        advance=advance,
        on_ended=on_ended,
        on_committed=on_committed,
        refuse_rollback=_refuse_rollback,
    )


def _pause_if_lasting(after: Transition) -> Transition:
    """Pause the job at once if its attempt has failed because a site cannot answer: it would not another time."""
    attempt = after.job.attempt
    if attempt is None or attempt.phase is not states.AttemptPhase.ABANDONED:
        return after
    cause = next((each for each in attempt.assignments.values() if each.reason in pacing.LASTING), None)
    if cause is None:
        return after
    text = pacing.explain(cause)
    text = f"client {cause.client_id}: {text}" if disclosure_of(after.job.spec).shows_clients else text
    return _pause(after, f"step {attempt.key.round} failed: {text}; remove the cause and resume the job, or cancel it")


PROCEDURE = register(wrap(AVERAGING, "procedure", frozenset({contract.FEATURE}), _list_plain))
SECURE_PROCEDURE = register(
    wrap(SECURE, "secure_procedure", frozenset({contract.FEATURE, setup.EXACT_FEATURE}), _list_masked)
)
