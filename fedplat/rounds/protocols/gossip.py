"""A decentralised job (`[mode] kind = "gossip"`): silos exchange models, and rounds make no versions.

`fedplat.gossip.coordinator` decides what happens: which silos exchange models, what counts, and when the job ends. Its
state is that of the job (`JobState.protocol`). This module gives that coordinator a place among the others: each of its
rounds is an attempt to train, each silo's part an assignment, and its timer is the deadline of the attempt
(`step_ends_at`).

A silo that checks in while models are announced gets an assignment. It is TRAINING until its model is announced, then
ADVERTISED until the round is over, and MERGED if it is in the round: mixed, or part of a mean. The job's only version
besides the initial model is the mean that the silos agree on in the end, of which the server has the digest alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from msgspec import structs

from fedplat.config.decoding import require_known
from fedplat.gossip import coordinator as gossip
from fedplat.gossip import messages, stated, steps
from fedplat.gossip.state import GossipPhase, GossipRules, GossipState, state_from_builtins, state_to_builtins
from fedplat.job import JobSpec
from fedplat.rounds import attempts, closing, demand, pacing, privacy_rules, selection, states
from fedplat.rounds.commands import (
    Command,
    Context,
    NextStep,
    Transition,
    abort_commands,
    end_assignment,
    put_assignment,
)
from fedplat.rounds.events import CandidatesDrawn, JobEvent, SiloReported, SilosLost
from fedplat.rounds.protocols.base import Ending, Membership, PhaseProgress, RoundProtocol, register
from fedplat.rounds.records import NO_FUTILE, Assignment, Attempt, AttemptKey, JobState, ModelVersion
from fedplat.texts import format_count

_PHASES: Mapping[GossipPhase, states.AttemptPhase] = {
    GossipPhase.EXCHANGING: states.AttemptPhase.EXCHANGING,
    GossipPhase.OFFERING_KEYS: states.AttemptPhase.REDUCING,
    GossipPhase.REDUCING: states.AttemptPhase.REDUCING,
}


def make_rules(spec: JobSpec) -> GossipRules:
    """Return the rules of a decentralised job."""
    assert spec.gossip is not None
    return GossipRules(
        options=spec.gossip,
        rounds=spec.rounds,
        goal=spec.selection.goal,
        minimum=spec.selection.minimum,
        training_s=spec.deadlines.training_s,
        exchange_s=spec.deadlines.upload_s,
        max_attempts=spec.retry.max_attempts,
        by_examples=spec.updates.weighting == "examples",
    )


def wants_silos(attempt: Attempt) -> bool:
    """Return whether silos that check in still take part in the round."""
    return attempt.phase in (states.AttemptPhase.SELECTING, states.AttemptPhase.COLLECTING)


def advance(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Process a timer that has passed; None if there is nothing to do."""
    is_over = attempt.step_ends_at is not None and attempt.step_ends_at <= context.now
    return _step(job, messages.TimerPassed(state_of(job).timer), context) if is_over else None


def begin(job: JobState, context: Context) -> Transition | None:
    """Begin a round, or continue a paused one."""
    state = find_state(job)
    if state is None:
        state, _ = gossip.begin(make_rules(job.spec))
    elif job.attempt is not None and job.attempt.key.round == state.round:
        state, _ = gossip.resume(state)  # it was paused
    opened = _open(structs.replace(job, protocol=state), context)
    return Transition(_set_timer(opened, context.now + _phase_s(state)))


def state_of(job: JobState) -> GossipState:
    """Return the state of a decentralised job that has begun."""
    state = find_state(job)
    assert state is not None
    return state


def find_state(job: JobState) -> GossipState | None:
    """Return the state of a decentralised job; None for other jobs, and before it begins."""
    return job.protocol if isinstance(job.protocol, GossipState) else None


def _describe_cohort(spec: JobSpec) -> str:
    least, most = spec.selection.minimum, spec.selection.goal
    silos = format_count(most, "silo")
    return f"{silos} in each" if least == most else f"{least} to {silos} in each"


def _refuse_server(spec: JobSpec) -> str:
    if spec.selection.goal <= steps.MAX_SILOS:
        return ""
    return (
        f"selection.goal = {spec.selection.goal}: a server coordinates at most {steps.MAX_SILOS} silos of a "
        "decentralised job; simulate larger ones (fedplat simulate JOB.toml)"
    )


def _count_phase(job: JobState, attempt: Attempt) -> PhaseProgress | None:
    """Count the silos that have the models of their neighbours, or the mean; None while models are announced."""
    if (state := find_state(job)) is None:
        return None
    match state.phase:
        case GossipPhase.EXCHANGING:
            num_silos = len(state.announced)
            return PhaseProgress(states.AttemptPhase.EXCHANGING, num_silos - len(state.awaited), num_silos)
        case GossipPhase.OFFERING_KEYS | GossipPhase.REDUCING:
            num_silos = len(state.offers) or len(state.candidates)
            return PhaseProgress(states.AttemptPhase.REDUCING, len(state.completed), num_silos)
        case _:
            return None


def assign(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    """Give silos that have checked in their part in the round."""
    left = _remaining_s(attempt, context)
    made: list[Assignment] = []
    commands: list[Command] = []
    for client_id in event.client_ids:
        assignment, command = attempts.make_assignment(attempt, client_id, left, 0.0, context)
        made.append(assignment)
        commands.append(command)
    if made and attempt.phase is states.AttemptPhase.SELECTING:
        phase = states.require(states.ATTEMPT_TRANSITIONS, attempt.phase, states.AttemptPhase.COLLECTING)
        attempt = structs.replace(attempt, phase=phase)
    state = state_of(job)
    for client_id in event.client_ids:
        state, _ = gossip.step(state, messages.SiloReturned(client_id))
    return Transition(structs.replace(job, attempt=attempt.with_assignments(made), protocol=state), tuple(commands))


def reassign(job: JobState, assignment: Assignment, context: Context) -> Transition:
    """Give a silo that lost the reply or was restarted its open assignment again, with a new token."""
    attempt = job.open_attempt
    assert attempt is not None
    return attempts.issue_again(job, assignment, _remaining_s(attempt, context), 0.0, context)


def on_reported(job: JobState, event: SiloReported, context: Context) -> Transition:
    """Process what a silo reports; of its assignment only if it is open."""
    assignment = job.find(event.key, event.client_id)
    if assignment is None or not assignment.is_busy:
        return Transition(job, verdict=closing.verdict_on_ended(assignment))
    after, commands = Transition(job), list[Command]()
    for each in event.events:
        if after.job.open_attempt is None or after.job.open_attempt.key != event.key:
            break  # its last report has ended the round
        if isinstance(each, messages.SiloAnnounced) and gossip.takes_model(state_of(after.job), each):
            after = structs.replace(after, job=_advertise(after.job, each, event, context))
        after = _step(after.job, each, context)
        commands.extend(after.commands)
    return structs.replace(after, commands=tuple(commands))


def on_lost(job: JobState, event: SilosLost, context: Context) -> Transition:
    """End the parts of silos that are silent, and continue without them."""
    after, commands = Transition(job), list[Command]()
    for client_id in event.client_ids:
        attempt = after.job.open_attempt
        if attempt is None:
            break
        assignment = attempt.assignments.get(client_id)
        if assignment is not None and assignment.is_busy:
            ended = end_assignment(assignment, states.AssignmentState.LATE, states.Reason.UNREACHABLE)
            after = Transition(put_assignment(after.job, ended))
            commands.extend(abort_commands([ended]))
        after = _step(after.job, messages.SiloDeparted(client_id), context)
        commands.extend(after.commands)
    return structs.replace(after, commands=tuple(commands))


def on_ended(job: JobState, assignment: Assignment, context: Context) -> Transition:
    """Continue without a silo whose assignment has ended: it failed, or was revoked."""
    return (
        _step(job, messages.SiloDeparted(assignment.client_id), context)
        if job.open_attempt is not None
        else Transition(job)
    )


def resume(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Give the open phase its whole time again after a restart of the server: silos have to reconnect."""
    return Transition(_set_timer(job, context.now + _phase_s(state_of(job))))


# --- from the commands of the decentralised job to attempts and assignments --------------------------------


def _step(job: JobState, event: messages.GossipEvent, context: Context) -> Transition:
    before = state_of(job)
    state, commands = gossip.step(before, event)
    if state is before and not commands:
        return Transition(job)
    after = _follow(structs.replace(job, protocol=state, reason=_explain(job, state)), before, commands, context)
    return _count_failure(after, context) if state.failures > before.failures else after


def _explain(job: JobState, state: GossipState) -> str:
    """Return why a phase is repeated, with the reason of the silos that failed; empty if none is."""
    why = pacing.describe_futility(job.attempt) if state.reason and job.attempt is not None else ""
    return f"{state.reason}; {why}" if why else state.reason


def _count_failure(after: Transition, context: Context) -> Transition:
    """Pause the job if its silos have failed too often in a row to try the phase again."""
    job, attempt = after.job, after.job.open_attempt
    if attempt is None:
        return after
    job = structs.replace(job, futile=pacing.count_futile(job, attempt))
    if job.status is not states.JobStatus.RUNNING or not pacing.gives_up(job):
        return structs.replace(after, job=job)
    text = pacing.describe_pause(job, f"round {attempt.key.round}", job.reason)
    ended, commands = closing.abandon_all(job, states.Reason.ATTEMPT_ABANDONED, job.reason, context)
    return Transition(
        closing.set_status(ended, states.JobStatus.PAUSED, text), after.commands + commands, after.verdict
    )


def _follow(
    job: JobState, before: GossipState, commands: Iterable[messages.GossipCommand], context: Context
) -> Transition:
    """Carry out commands; the others (models to get, rows, rings) silos find in the state."""
    found: list[Command] = []
    for command in commands:
        match command:
            case messages.BeginRound():
                job, more = _commit(job, before, context)  # `advance` opens the next attempt
            case messages.EndJob():
                job, more = _end(job, before, command, context)
            case messages.SetTimer():
                job, more = _set_timer(job, context.now + command.seconds), ()
            case _:
                more = ()
        found.extend(more)
    job, more = _enter_phase(job)
    return Transition(job, (*found, *more))


def _phase_s(state: GossipState) -> float:
    return state.rules.training_s if state.phase is GossipPhase.ANNOUNCING else state.rules.exchange_s


def _open(job: JobState, context: Context) -> JobState:
    last, round_number = job.attempt, state_of(job).round
    number = last.key.number + 1 if last is not None and last.key.round == round_number else 1
    attempt = Attempt(
        key=AttemptKey(job.job_id, round_number, number),
        kind=states.AttemptKind.TRAIN,
        phase=states.AttemptPhase.SELECTING,
        base_version=job.latest.version,
        goal=job.spec.selection.goal,
        minimum=job.spec.selection.minimum,
        target=job.spec.selection.goal,
        opened_at=context.now,
        selection_ends_at=context.now + job.spec.deadlines.training_s,
    )
    return structs.replace(job, attempt=attempt)


def _set_timer(job: JobState, ends_at: float) -> JobState:
    """Set the deadline of the open attempt, and of the silos that work for it."""
    attempt = job.open_attempt
    if attempt is None:
        return job
    busy = [structs.replace(each, deadline_at=ends_at) for each in attempt.busy]
    attempt = structs.replace(attempt, step_ends_at=ends_at, next_deadline=None).with_assignments(busy)
    return structs.replace(job, attempt=attempt)


def _enter_phase(job: JobState) -> tuple[JobState, tuple[Command, ...]]:
    """Let the attempt follow the phase of the exchange; silos that are still training then are late."""
    attempt = job.open_attempt
    if attempt is None or (phase := _PHASES.get(state_of(job).phase)) is None:
        return job, ()
    commands: tuple[Command, ...] = (NextStep(attempt.key, phase),)
    if attempt.phase is not phase:
        attempt, late = _end_late(attempt)
        attempt = structs.replace(attempt, phase=states.require(states.ATTEMPT_TRANSITIONS, attempt.phase, phase))
        job, commands = structs.replace(job, attempt=attempt), (*late, *commands)
    return job, commands


def _end_late(attempt: Attempt) -> tuple[Attempt, tuple[Command, ...]]:
    late = [
        end_assignment(each, states.AssignmentState.LATE, states.Reason.TRAIN_TIMEOUT)
        for each in attempt.busy
        if each.state is states.AssignmentState.TRAINING
    ]
    return attempt.with_assignments(late), abort_commands(late)


def _advertise(job: JobState, announced: messages.SiloAnnounced, event: SiloReported, context: Context) -> JobState:
    """Record that a silo has announced its model."""
    assignment, model = job.find(event.key, event.client_id), announced.model
    if assignment is None or assignment.state is not states.AssignmentState.TRAINING:
        return job
    advertised = structs.replace(
        assignment,
        state=states.require(states.ASSIGNMENT_TRANSITIONS, assignment.state, states.AssignmentState.ADVERTISED),
        digest=model.digest,
        num_examples=model.num_examples,
        weight=model.num_examples if state_of(job).rules.by_examples else 1.0,
        metrics=privacy_rules.disclosure_of(job.spec).kept_metrics(event.metrics),
        took_s=context.now - assignment.assigned_at,
        staleness=0,
    )
    return closing.measure_duration(put_assignment(job, advertised), assignment, context)


def _commit(job: JobState, before: GossipState, context: Context) -> tuple[JobState, tuple[Command, ...]]:
    """End the round: the silos that announced a model were part of it."""
    attempt = job.open_attempt
    assert attempt is not None
    attempt, late = _end_late(attempt)
    weights = {each.client_id: each.weight for each in attempt.busy if each.client_id not in before.left_out}
    weights = stated.limit_weights(weights) if before.rules.by_examples else weights
    merged = [
        structs.replace(
            each,
            state=states.require(states.ASSIGNMENT_TRANSITIONS, each.state, states.AssignmentState.MERGED),
            weight=weights.get(each.client_id, 0.0),
            text=f"it is not in the mean: {left}" if (left := before.left_out.get(each.client_id)) else each.text,
        )
        for each in attempt.busy
    ]
    metrics = {**closing.average_metrics(merged), **_describe(before, state_of(job))}
    job = closing.commit(job, attempt.with_assignments(merged), context, metrics)
    return structs.replace(job, round=attempt.key.round, reason="", futile=NO_FUTILE), (
        *late,
        NextStep(attempt.key, attempt.phase),
    )


def _describe(before: GossipState, after: GossipState) -> dict[str, float]:
    """Return the numbers of an exchange, as metrics of its attempt."""
    found = {"silos": float(len(before.announced))}
    if before.edges:
        found |= {"edges": float(len(before.edges)), "confirmed_edges": float(after.confirmed)}
    if before.ring is not None:
        found["bound"] = before.ring.bound
    if before.left_out:
        found["left_out"] = float(len(before.left_out))
    relative = after.consensus.relative
    return found | ({"relative_distance": relative} if math.isfinite(relative) else {})


def _end(
    job: JobState, before: GossipState, end: messages.EndJob, context: Context
) -> tuple[JobState, tuple[Command, ...]]:
    """End the job: with the mean as its version, or with the reason why the silos have no mean."""
    if end.status == "FAILED":
        failed, commands = closing.abandon_all(job, states.Reason.ATTEMPT_ABANDONED, end.reason, context)
        return closing.set_status(failed, states.JobStatus.FAILED, end.reason), commands
    assert job.attempt is not None
    key = job.attempt.key
    job, commands = _commit(job, before, context)
    assert job.attempt is not None
    merged = [each for each in job.attempt.assignments.values() if each.state is states.AssignmentState.MERGED]
    version = ModelVersion(
        version=job.latest.version + 1,
        round=key.round,
        attempt=key.number,
        digest=end.digest,
        size_bytes=job.latest.size_bytes,
        num_updates=len(merged),
        total_weight=math.fsum(each.weight for each in merged),
        is_held_by_clients=True,
    )
    return closing.set_status(structs.replace(job, latest=version), states.JobStatus.COMPLETED, ""), commands


def _remaining_s(attempt: Attempt, context: Context) -> float:
    return max(attempt.step_ends_at - context.now, 0.0) if attempt.step_ends_at is not None else 0.0


# --- the record --------------------------------------------------------------------------------------------


def _write_state(job: JobState) -> object:
    state = find_state(job)
    return state_to_builtins(state) if state is not None else None


def _read_state(stored: object, spec: JobSpec) -> GossipState | None:
    if stored is None:
        return None
    require_known(stored, GossipState)
    return state_from_builtins(stored, make_rules(spec))


def _demand(job: JobState, attempt: Attempt) -> demand.Demand | None:
    """Demand silos while models are announced; they are assigned as they arrive."""
    free = attempt.target - attempt.num_busy
    wants = wants_silos(attempt) and free > 0
    return selection.training_demand(job, attempt, free, 1) if wants else None


def _awaits(job: JobState, client_id: str) -> bool:
    state = find_state(job)
    return state is not None and client_id in state.members | state.away


def _event_of_revocation(job: JobState, client_id: str) -> JobEvent | None:
    state = find_state(job)
    is_member = state is not None and client_id in state.members
    return SilosLost(job.job_id, (client_id,)) if is_member else None


GOSSIP = register(
    RoundProtocol(
        name="gossip",
        write_state=_write_state,
        read_state=_read_state,
        keeps_updates=False,
        makes_versions=False,
        client_option="--exchange-models",
        list_needs=lambda spec: [],  # a simulation checks its silos, which are all its clients
        describe_cohort=_describe_cohort,
        refuse_server=_refuse_server,
        features=frozenset({steps.FEATURE}),
        handlers={SiloReported: on_reported, SilosLost: on_lost},
        begin=begin,
        advance=advance,
        count_phase=_count_phase,
        demand=_demand,
        selects=lambda job, attempt: False,
        on_drawn=assign,
        on_reclaimed=reassign,
        on_ended=on_ended,
        judge_end=lambda job, attempt, context: Ending.WAIT,  # `_follow` ends it
        on_deadline=lambda job, context: Transition(job),  # that of the attempt: `advance`
        resume=resume,
        deadlines=lambda job, attempt: (attempt.step_ends_at,),
        membership=Membership(awaits=_awaits, revoked=_event_of_revocation),
    )
)
