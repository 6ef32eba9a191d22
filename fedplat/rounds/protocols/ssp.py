"""A stale synchronous parallel job (`[mode] kind = "ssp"`).

Ho et al. 2013, NIPS, section 3: a worker at clock c continues only if the slowest is at c - s or later. Such a job is a
buffered one (`buffered`) whose buffer holds one update, with a clock set (`clock_set`) that decides who may be drawn.
So a client at clock c begins with a version that contains the first c - s updates of every member, counted from its
join, and no two clocks of members are more than s + 1 apart.

The clocks follow from the assignments (`follow`): a client joins with its first assignment, its clock grows when its
update becomes part of a version, and it leaves when its assignment ends otherwise: late, failed, rejected or revoked. A
member without work that does not wait for any is absent: it leaves after `deadlines.selection_s` (`on_roll_call`), or
at once when the attempt has waited so long for a client. Who has left rests before it joins again (`clock_set`). So no
client waits forever: of the members that are left, the slowest either works, and its assignment has a deadline, or
waits, and is never withheld.
"""

from __future__ import annotations

import dataclasses

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.modes import StaleSynchronous
from fedplat.rounds import attempts
from fedplat.rounds.changes import find_changed
from fedplat.rounds.demand import Demand
from fedplat.rounds.eligible import Gate
from fedplat.rounds.events import CandidatesDrawn, JobEvent, RollCalled
from fedplat.rounds.protocols import buffered
from fedplat.rounds.protocols.base import Membership, Roll, register
from fedplat.rounds.protocols.clock_set import NO_CLOCKS, ClockSet, clocks_from_builtins, clocks_to_builtins
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind, JobStatus, Reason
from fedplat.rounds.transition import Context, Transition

_ENDED_BY_CLIENT = frozenset({AssignmentState.LATE, AssignmentState.FAILED, AssignmentState.REJECTED})
_ENDED_BY_SERVER = frozenset({AssignmentState.DROPPED, AssignmentState.SURPLUS})


def clocks_of(job: JobState) -> ClockSet:
    """Return the clock set of a job; an empty one before it begins."""
    return job.protocol if isinstance(job.protocol, ClockSet) else NO_CLOCKS


def _mode(job: JobState) -> StaleSynchronous:
    mode = job.spec.stale_synchronous
    assert mode is not None
    return mode


def _write_state(job: JobState) -> object:
    return clocks_to_builtins(clocks_of(job))


def _read_state(stored: object, spec: JobSpec) -> ClockSet:
    return clocks_from_builtins(stored)


def _demand(job: JobState, attempt: Attempt) -> Demand | None:
    """Demand whom the clocks admit; an empty clock set begins with several clients."""
    needed = max(job.spec.selection.wait_for, 1) if not clocks_of(job).clocks else 1
    demand = buffered.demand(job, attempt, needed)
    return dataclasses.replace(demand, gate=make_gate(job)) if demand is not None else None


def _on_drawn(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    if not event.client_ids:
        return buffered.on_drawn(job, attempt, event, context)
    return attempts.assign(job, attempt, admit(job, event.client_ids), context)


def _event_of_revocation(job: JobState, client_id: str) -> JobEvent | None:
    return RollCalled(job.job_id, revoked=frozenset({client_id})) if client_id in clocks_of(job).clocks else None


def _roll(job: JobState, context: Context) -> Roll | None:
    """Call all members when the time of one of them is over, or that of all: no client came in time."""
    if not clocks_of(job).clocks or job.status is not JobStatus.RUNNING:
        return None
    attempt, moment = job.open_attempt, clocks_of(job).next_expected
    is_over = attempt is not None and attempts.selects(job) and attempt.selection_ends_at <= context.now
    is_last = is_over and attempt is not None and attempt.kind is AttemptKind.TRAIN
    is_time = is_last or (moment is not None and moment <= context.now)
    return Roll(clocks_of(job).clocks, is_last) if is_time else None


def make_gate(job: JobState) -> Gate:
    """Return who may be drawn by the clocks of a job."""
    mode, clocks = _mode(job), clocks_of(job)
    known = {**clocks.ahead, **clocks.clocks}
    withheld = {name for name, clock in known.items() if not mode.may_begin(clock, clocks.minimum)}
    withheld.update(clocks.list_resting())
    members = None
    if len(clocks.clocks) >= mode.concurrency:
        members = frozenset(clocks.clocks)
    elif clocks.is_closed:
        members = frozenset(known)
    return Gate(frozenset(withheld), members)


def admit(job: JobState, client_ids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the drawn clients that are members, and as many others as the set has places."""
    mode, members = _mode(job), clocks_of(job).clocks
    others = [name for name in client_ids if name not in members]
    refused = frozenset(others[max(mode.concurrency - len(members), 0) :])
    return tuple(name for name in client_ids if name not in refused)


def list_withheld(job: JobState) -> list[str]:
    """Return the members that wait for slower ones, in the order of their names."""
    withheld = make_gate(job).withheld
    return sorted(name for name in clocks_of(job).clocks if name in withheld)


def follow(before: JobState, after: JobState, context: Context) -> JobState:
    """Update the clocks after a transition from one state to another."""
    clocks, until = clocks_of(after), context.now + after.spec.deadlines.selection_s
    for each in find_changed(before, after):
        if each.kind is not AttemptKind.TRAIN:
            continue
        if each.is_busy:
            clocks = clocks.join(each.client_id)
        elif each.state is AssignmentState.MERGED:
            clocks = clocks.tick(each.client_id).expect([each.client_id], until)
        elif _has_left(each):
            clocks = clocks.leave([each.client_id])
        elif each.state in _ENDED_BY_SERVER:
            clocks = clocks.expect([each.client_id], until)
    after = structs.replace(after, protocol=clocks) if clocks is not clocks_of(after) else after
    begins = after.status is JobStatus.RUNNING and before.status is not JobStatus.RUNNING
    return expect_members(after, context) if begins else after


def expect_members(job: JobState, context: Context) -> JobState:
    """Give all members without work the whole time to take part again, after a pause or a restart of the server."""
    if job.status is not JobStatus.RUNNING or not clocks_of(job).clocks:
        return job
    working = {each.client_id for each in job.open_assignments}
    idle = [name for name in clocks_of(job).clocks if name not in working]
    return structs.replace(job, protocol=clocks_of(job).expect(idle, context.now + job.spec.deadlines.selection_s))


def on_roll_call(job: JobState, event: RollCalled, context: Context) -> Transition:
    """Remove the members that are absent for too long, or only the revoked ones. Those present are expected again."""
    if event.revoked:
        working = {each.client_id for each in job.open_assignments}
        return Transition(structs.replace(job, protocol=clocks_of(job).leave(event.revoked - working)))
    present = event.present | {each.client_id for each in job.open_assignments}
    expected = clocks_of(job).expected
    gone = [
        name
        for name in clocks_of(job).clocks
        if name not in present and (event.is_last or expected.get(name, context.now) <= context.now)
    ]
    staying = [name for name in expected if name in present]
    clocks = clocks_of(job).leave(gone).expect(staying, context.now + job.spec.deadlines.selection_s)
    return Transition(structs.replace(job, protocol=clocks))


def _has_left(ended: Assignment) -> bool:
    return ended.state in _ENDED_BY_CLIENT or ended.reason is Reason.REVOKED


SSP = register(
    dataclasses.replace(
        buffered.BUFFERED,
        name="ssp",
        write_state=_write_state,
        read_state=_read_state,
        handlers={RollCalled: on_roll_call},
        demand=_demand,
        on_drawn=_on_drawn,
        membership=Membership(
            awaits=lambda job, client_id: client_id in clocks_of(job).clocks,
            revoked=_event_of_revocation,
            roll=_roll,
            follow=follow,
            expect=expect_members,
            next_moment=lambda job: clocks_of(job).next_expected,
        ),
    )
)
