"""The phases of an attempt with secure aggregation. Pure functions.

`advance` moves an attempt from phase to phase; `secure` takes the messages of its clients. The sets that
clients are asked about are fixed by a transition that is stored before any client is asked, and follow from the stored
assignments alone, so that a restarted server asks for the same ones:

- the roster, when the attempt begins SHARING: the clients with a group and a position;
- the clients whose masks are in the sum, when it begins COLLECTING: those that have sent shares;
- the survivors, when it begins CONFIRMING or UNMASKING: those that have reported (`find_survivors`).

An attempt that cannot end with a sum fails, and its round is tried again with new keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.job.secure import group_minimum, num_groups, require_secure
from fedplat.rounds import closing, commands, influence, pacing
from fedplat.rounds.commands import Command, Context, NextStep, Restart, Transition
from fedplat.rounds.records import Assignment, Attempt, JobState, SecureMessages
from fedplat.rounds.states import ATTEMPT_TRANSITIONS, AssignmentState, AttemptPhase, Reason, require
from fedplat.secure_aggregation import messages, setup

MAX_BARRED = 10_000
"""Maximum number of clients that a job bars."""
_REPORTED = frozenset({AssignmentState.REPORTED, AssignmentState.MERGED})


def minimum(spec: JobSpec) -> int:
    """Return the number of reports that an attempt needs, so that each of its groups can have enough."""
    return max(spec.selection.minimum, num_groups(spec) * group_minimum(spec))


def bar_culprits(job: JobState) -> tuple[str, ...]:
    """Return the clients that the next attempts do not draw: their messages could make each of them fail."""
    group = job.attempt.assignments.values() if job.attempt is not None else ()
    return _bar(job, [each.client_id for each in group if each.reason is Reason.REJECTED_MESSAGE])


def reject_culprits(job: JobState, attempt: Attempt, client_ids: Collection[str], text: str) -> JobState:
    """Reject the reports of clients whose messages made the attempt fail, and bar those that had ended before.

    An assignment that has ended does not change, so that these are barred only until the server is restarted. But a
    client that deals wrong shares and then drops out must not make every attempt fail.
    """
    blamed = [attempt.assignments[each] for each in client_ids if each in attempt.assignments]
    rejected = [
        commands.end_assignment(each, AssignmentState.REJECTED, Reason.REJECTED_MESSAGE, text)
        for each in blamed
        if each.state is AssignmentState.REPORTED
    ]
    barred = _bar(job, [each.client_id for each in blamed if not each.is_open])
    return structs.replace(job, attempt=attempt.with_assignments(rejected), barred=barred) if blamed else job


def _bar(job: JobState, client_ids: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted({*job.barred, *client_ids})[:MAX_BARRED]) if client_ids else job.barred


def list_groups(attempt: Attempt) -> list[list[Assignment]]:
    """Return the members of each group in the order of their positions; empty before the roster is fixed."""
    placed = [each for each in attempt.assignments.values() if each.secure is not None and each.secure.group >= 0]
    groups: list[list[Assignment]] = []
    for each in sorted(placed, key=_place):
        if _place(each)[0] == len(groups):
            groups.append([])
        groups[-1].append(each)
    return groups


def find_survivors(members: Sequence[Assignment]) -> messages.Survivors:
    """Return the survivors of a group whose attempt does not collect any more, and those that dropped out.

    A client that has sent no shares is in neither: no mask of it is in the sum.
    """
    positions = [(place, each) for place, each in enumerate(members)]
    return messages.Survivors(
        survivors=tuple(place for place, each in positions if each.state in _REPORTED),
        dropped=tuple(place for place, each in positions if each.state not in _REPORTED and messages_of(each).shares),
    )


def messages_of(assignment: Assignment) -> SecureMessages:
    """Return a client's part in the secure aggregation of its attempt."""
    assert assignment.secure is not None
    return assignment.secure


def advance(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Begin the next phase of an open attempt, or fail it, if it is time to; None if there is nothing to do."""
    match attempt.phase:
        case AttemptPhase.ADVERTISING:
            return _close_roster(job, attempt, context)
        case AttemptPhase.SHARING:
            return _close_sharing(job, attempt, context)
        case AttemptPhase.COLLECTING:
            return _close_collecting(job, attempt, context)
        case AttemptPhase.CONFIRMING:
            return _close_confirming(job, attempt, context)
        case AttemptPhase.UNMASKING:
            return _close_unmasking(job, attempt, context)
        case _:
            return None


def resume(job: JobState, context: Context) -> JobState:
    """Give the steps of the open attempt their whole time again, after a restart of the server."""
    attempt, now = job.attempt, context.now
    assert attempt is not None
    step_s, upload_s = require_secure(job.spec).step_s, job.spec.deadlines.upload_s
    given: dict[AssignmentState, float] = {}
    if attempt.phase is AttemptPhase.SHARING:
        given = {AssignmentState.ADVERTISED: now + step_s, AssignmentState.SHARED: now + step_s + upload_s}
    elif attempt.phase is AttemptPhase.COLLECTING:
        given = {AssignmentState.SHARED: now + upload_s}
    elif attempt.phase in (AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING):
        attempt = structs.replace(attempt, step_ends_at=now + step_s, num_awaited=_count_awaited(attempt))
    busy = [structs.replace(each, deadline_at=given.get(each.state, each.deadline_at)) for each in attempt.busy]
    return structs.replace(job, attempt=_with_deadlines(attempt, busy))


# --- from phase to phase -----------------------------------------------------------------------------------


def _close_roster(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Fix the roster when enough clients have advertised keys, or when no client is left to wait for."""
    ready, training = _count(attempt, AssignmentState.ADVERTISED), _count(attempt, AssignmentState.TRAINING)
    if ready + training < attempt.minimum:
        text = f"{ready} of at least {attempt.minimum} needed clients sent their keys"
        return _fail(job, text, "raise selection.over_selection or deadlines.training_s", context)
    if training and (ready < attempt.goal or job.spec.selection.close == "deadline"):
        return None
    return _begin_sharing(job, attempt, context)


def _begin_sharing(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Place `goal` clients in groups of nearly equal size, in a random order; the others are surplus."""
    groups, ends_at = num_groups(job.spec), context.now + require_secure(job.spec).step_s
    ready = [each for each in attempt.assignments.values() if each.state is AssignmentState.ADVERTISED]
    order: list[int] = context.rng.permutation(len(ready)).tolist()
    changed: dict[str, Assignment] = {}
    for place, index in enumerate(order[: attempt.goal]):
        each = ready[index]
        position, group = divmod(place, groups)
        placed = structs.replace(messages_of(each), group=group, position=position)
        changed[each.client_id] = structs.replace(each, secure=placed, deadline_at=ends_at)
    surplus = [
        commands.end_assignment(each, AssignmentState.SURPLUS, Reason.SURPLUS)
        for each in attempt.busy
        if each.client_id not in changed
    ]
    after = _with_deadlines(attempt, [*changed.values(), *surplus])
    return _begin(job, after, AttemptPhase.SHARING, commands.abort_commands(surplus))


def _close_sharing(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Collect the masked updates of the clients that have shared, once the others have shared or are gone."""
    shared, waited_for = _count(attempt, AssignmentState.SHARED), _count(attempt, AssignmentState.ADVERTISED)
    if shared + waited_for < attempt.minimum:
        text = f"{shared} of at least {attempt.minimum} needed clients sent the shares of their secrets"
        return _fail(job, text, "raise secure_aggregation.step_s, or lower selection.min_fraction", context)
    if waited_for:
        return None
    if lack := _describe_lack(job, attempt, "sent the shares of their secrets", AssignmentState.SHARED):
        return _fail(job, *lack, context)
    ends_at = context.now + job.spec.deadlines.upload_s
    after = _with_deadlines(attempt, [structs.replace(each, deadline_at=ends_at) for each in attempt.busy])
    return _begin(job, after, AttemptPhase.COLLECTING)


def _close_collecting(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Fix the survivors, once each client that has shared has reported or is gone."""
    if attempt.num_reported + attempt.num_busy < attempt.minimum:
        text = f"{attempt.num_reported} of at least {attempt.minimum} needed clients reported their masked updates"
        return _fail(job, text, "raise deadlines.upload_s, or lower selection.min_fraction", context)
    if attempt.num_busy:
        return None
    if lack := _describe_lack(job, attempt, "reported their masked updates", AssignmentState.REPORTED):
        return _fail(job, *lack, context)
    commands: tuple[Command, ...] = ()
    if influence.has_dropped_folds(attempt):
        commands = (Restart(attempt.key), *closing.fold_commands(attempt, attempt.reported))
    if not require_secure(job.spec).confirm:
        return _begin_unmasking(job, attempt, context, commands)
    return _begin_step(job, attempt, AttemptPhase.CONFIRMING, context, commands)


def _close_confirming(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Ask for the shares when all survivors have confirmed; at the deadline, when enough have."""
    if attempt.num_awaited and not _is_over(attempt, context):
        return None
    if not _is_recoverable(job, attempt, "confirmation"):
        return _fail(job, _describe_answers(job, attempt, "confirmed the survivors", "confirmation"), _SLOW, context)
    return _begin_unmasking(job, attempt, context)


def _begin_unmasking(
    job: JobState, attempt: Attempt, context: Context, commands: tuple[Command, ...] = ()
) -> Transition:
    """Ask for the shares. From now on the attempt counts as a release, whether it commits or not."""
    num_survivors = min(len(find_survivors(members).survivors) for members in list_groups(attempt))
    privacy = job.spec.privacy
    if privacy is not None and privacy.trust == "none":
        job = structs.replace(job, unmasked=(*job.unmasked, num_survivors))
    after = structs.replace(attempt, num_survivors=num_survivors)
    return _begin_step(job, after, AttemptPhase.UNMASKING, context, commands)


def _close_unmasking(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Commit when all survivors have answered, or soon after enough of them have; fail at the deadline.

    The answers of the others are not needed if all shares are right. But some may be wrong: a client that answers first
    must not be able to make the attempt fail.
    """
    is_over = not attempt.num_awaited or _is_over(attempt, context)
    if _is_recoverable(job, attempt, "answer"):
        if is_over:
            return closing.begin_commit(job, structs.replace(attempt, step_ends_at=None), ())
        assert attempt.step_ends_at is not None
        took_s = context.now - (attempt.step_ends_at - require_secure(job.spec).step_s)
        ends_at = min(attempt.step_ends_at, context.now + max(took_s, _MIN_REST_S))
        if ends_at == attempt.step_ends_at:
            return None
        return Transition(structs.replace(job, attempt=structs.replace(attempt, step_ends_at=ends_at)))
    if not is_over:
        return None
    return _fail(job, _describe_answers(job, attempt, "answered with their shares", "answer"), _SLOW, context)


def _begin(job: JobState, attempt: Attempt, phase: AttemptPhase, commands: tuple[Command, ...] = ()) -> Transition:
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, phase)
    after = structs.replace(job, attempt=structs.replace(attempt, phase=phase))
    return Transition(after, (*commands, NextStep(attempt.key, phase)))


def _begin_step(
    job: JobState, attempt: Attempt, phase: AttemptPhase, context: Context, commands: tuple[Command, ...]
) -> Transition:
    """Begin a phase in which no client is busy, so that the attempt itself has the deadline."""
    begun = _begin(job, attempt, phase, commands)
    assert begun.job.attempt is not None
    ends_at, awaited = context.now + require_secure(job.spec).step_s, _count_awaited(begun.job.attempt)
    waiting = structs.replace(begun.job.attempt, step_ends_at=ends_at, num_awaited=awaited)
    return structs.replace(begun, job=structs.replace(begun.job, attempt=waiting))


# --- what a phase needs ------------------------------------------------------------------------------------

_MIN_REST_S = 0.5
"""When the server has enough answers, it waits for more at least this long, and as long again as those took."""
_SLOW = "raise secure_aggregation.step_s, or lower secure_aggregation.threshold"


def _place(assignment: Assignment) -> tuple[int, int]:
    return messages_of(assignment).group, messages_of(assignment).position


def _count(attempt: Attempt, state: AssignmentState) -> int:
    return attempt.counts.get(state, 0)


def _with_deadlines(attempt: Attempt, busy: Collection[Assignment]) -> Attempt:
    """Return the attempt with new deadlines of all busy assignments, so that it does not wake for the former ones."""
    return structs.replace(attempt, next_deadline=None).with_assignments(busy)


def _is_over(attempt: Attempt, context: Context) -> bool:
    return attempt.step_ends_at is not None and attempt.step_ends_at <= context.now


def _graph(job: JobState, members: Collection[Assignment]) -> setup.Graph:
    return setup.Graph.of(require_secure(job.spec), len(members))


def _describe_lack(job: JobState, attempt: Attempt, did: str, state: AssignmentState) -> tuple[str, str] | None:
    """Return why a group cannot go on with its clients in a state, and what to change; None if all groups can.

    It needs its minimum, and for each client with masks in the sum enough of those that hold shares of its secrets.
    """
    fewest = group_minimum(job.spec)
    for number, members in enumerate(list_groups(attempt)):
        left = [place for place, each in enumerate(members) if each.state is state]
        sent = [place for place, each in enumerate(members) if messages_of(each).shares]
        graph, where = _graph(job, members), f"{len(left)} of {len(members)} clients of group {number} {did}"
        if len(left) < fewest:
            hint = "raise selection.over_selection, or lower selection.min_fraction"
            return f"{where}, and at least {fewest} are needed", hint
        if not graph.is_recoverable(sent, left):
            text = f"{where}; to remove the masks of each, {graph.threshold} of the {graph.degree + 1} clients that "
            return text + "hold its shares are needed", "lower secure_aggregation.threshold"
    return None


def _count_awaited(attempt: Attempt) -> int:
    """Count the survivors whose message of the step is missing."""
    field = "confirmation" if attempt.phase is AttemptPhase.CONFIRMING else "answer"
    groups = list_groups(attempt)
    return sum(len(find_survivors(members).survivors) - len(_senders(members, field)) for members in groups)


def _is_recoverable(job: JobState, attempt: Attempt, field: str) -> bool:
    """Return whether for each client with masks in the sum enough holders of its shares have sent a message."""
    for members in list_groups(attempt):
        found = find_survivors(members)
        secrets = (*found.survivors, *found.dropped)
        if not _graph(job, members).is_recoverable(secrets, _senders(members, field)):
            return False
    return True


def _senders(members: Sequence[Assignment], field: str) -> list[int]:
    return [place for place, each in enumerate(members) if getattr(messages_of(each), field)]


def _describe_answers(job: JobState, attempt: Attempt, did: str, field: str) -> str:
    texts: list[str] = []
    for number, members in enumerate(list_groups(attempt)):
        graph, found = _graph(job, members), find_survivors(members)
        texts.append(
            f"{len(_senders(members, field))} of {len(found.survivors)} survivors of group {number} {did}, and "
            f"{graph.threshold} of the {graph.degree + 1} clients that hold shares of each are needed"
        )
    return influence.join_texts(texts)


def _fail(job: JobState, text: str, hint: str, context: Context) -> Transition:
    assert job.attempt is not None
    outcome, why = closing.describe_counts(job.attempt), pacing.describe_futility(job.attempt)
    return closing.fail_attempt(job, "; ".join(filter(None, (f"{text} ({outcome})", why, hint))), context)
