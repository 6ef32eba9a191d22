"""A stale synchronous parallel job (`[mode] kind = "ssp"`), and the clocks of its clients.

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

The clock of a client is the number of its updates that versions contain, counted from the clock at which it joined
(Ho et al. 2013, NIPS, section 3). The members of the set are the clients that train or are expected to; all others have
left it, and no one waits for them.

A client that joins gets the minimum clock of the set. With less, all others would wait until it has caught up, although
its updates are no part of what they wait for; the bound would not hold either. With more, it would be allowed to train
while the others are ahead of it for nothing. A client that has left ahead of the minimum gets its own clock back, for
otherwise leaving would be a way around the bound.

A client that leaves has made the others wait. So it rests before it may join again: for 1 clock of the minimum after
the first time, 2 after the second, then 4, 8 and so on. Otherwise one client that joins, does nothing and joins again
would hold all others back for a deadline in each clock. Each `CLEAN_CLOCKS` clocks after a rest forgive one time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import msgspec
from msgspec import Struct, field, structs

from fedplat.config.decoding import prepare_type, require_known
from fedplat.job import JobSpec
from fedplat.modes import StaleSynchronous
from fedplat.rounds import attempts, changes, events
from fedplat.rounds.commands import Context, Transition
from fedplat.rounds.demand import Demand, Gate
from fedplat.rounds.protocols import buffered
from fedplat.rounds.protocols.base import Membership, Roll, register
from fedplat.rounds.records import Attempt, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind, JobStatus, Reason

CLEAN_CLOCKS = 16
"""The clocks of the minimum after a client's rest that forgive it one of the times that it has left."""
MAX_LEFT = 10_000
"""The number of clients that a clock set remembers: beyond it the oldest lapses are forgotten, and no one new joins."""
_MAX_TIMES = 6
"""The longest rest is 32 clocks: a client that has been repaired is not kept away forever."""


class Lapse(NamedTuple):
    """How often a client has left, as far as that is not forgiven, and the minimum when it did so last."""

    times: int
    at: int

    @property
    def rests_until(self) -> int:
        """The minimum at which the client may join again."""
        return self.at + (1 << (self.times - 1))

    def count_at(self, minimum: int) -> int:
        """Return how often the client has left, without what is forgiven at a minimum."""
        return max(self.times - max(minimum - self.rests_until, 0) // CLEAN_CLOCKS, 0)


class ClockSet(Struct, frozen=True):
    """The clocks of the members, and of the clients that have left ahead of the minimum (`ahead`).

    `minimum` is the smallest clock of the members; it never decreases, and an empty set keeps its last one. Members
    without work are expected to take part again until the moments in `expected`, which are not stored. `lapses` has the
    clients that have left, the latest last.

    >>> clocks = ClockSet().join("a").join("b").tick("a").tick("a").tick("b")
    >>> clocks.minimum, clocks.maximum, dict(clocks.leave(["a"]).join("c").join("a").clocks)
    (1, 2, {'b': 1, 'c': 1, 'a': 2})
    >>> ClockSet().join("a").join("b").tick("a").leave(["b"]).list_resting()
    ['b']
    """

    clocks: dict[str, int] = field(default_factory=dict[str, int])
    ahead: dict[str, int] = field(default_factory=dict[str, int])
    minimum: int = 0
    expected: dict[str, float] = field(default_factory=dict[str, float])
    lapses: dict[str, Lapse] = field(default_factory=dict[str, Lapse])

    @property
    def maximum(self) -> int:
        """The largest clock of the members; the minimum of an empty set."""
        return max(self.clocks.values(), default=self.minimum)

    @property
    def next_expected(self) -> float | None:
        """The first moment at which a member without work may have to leave."""
        return min(self.expected.values(), default=None)

    @property
    def is_closed(self) -> bool:
        """True if only clients that left ahead of the minimum may join: the set remembers no more of them."""
        return len(self.ahead) >= MAX_LEFT

    def list_resting(self) -> list[str]:
        """Return the clients that have left and may not join yet."""
        return [
            name for name, lapse in self.lapses.items() if self.minimum < lapse.rests_until and name not in self.clocks
        ]

    def join(self, client_id: str) -> Self:
        """Add a client that is given work, at the minimum or at its own clock; a member is no longer expected."""
        expected = {name: moment for name, moment in self.expected.items() if name != client_id}
        if client_id in self.clocks:
            return structs.replace(self, expected=expected) if client_id in self.expected else self
        clock = max(self.ahead.get(client_id, 0), self.minimum)
        return self._settle({**self.clocks, client_id: clock}, expected)

    def tick(self, client_id: str) -> Self:
        """Count an update of a member that has become part of a version."""
        return self._settle({**self.clocks, client_id: self.clocks[client_id] + 1}, self.expected)

    def leave(self, client_ids: Iterable[str]) -> Self:
        """Remove clients that are members. When the last one leaves, no clock is left to be ahead of."""
        gone = {name: self.clocks[name] for name in client_ids if name in self.clocks}
        if not gone:
            return self
        staying = {name: clock for name, clock in self.clocks.items() if name not in gone}
        expected = {name: moment for name, moment in self.expected.items() if name not in gone}
        left = structs.replace(self, ahead={**self.ahead, **gone})._settle(staying, expected)
        return left._remember(gone) if staying else left

    def expect(self, client_ids: Iterable[str], until: float) -> Self:
        """Expect members without work to take part again until a moment."""
        expected = {name: until for name in client_ids if name in self.clocks}
        return structs.replace(self, expected={**self.expected, **expected}) if expected else self

    def _remember(self, gone: Iterable[str]) -> Self:
        """Return the set with one more lapse of each client that has left."""
        lapses = dict(self.lapses)
        for name in gone:
            last = lapses.pop(name, None)
            times = 1 + (last.count_at(self.minimum) if last is not None else 0)
            lapses[name] = Lapse(min(times, _MAX_TIMES), self.minimum)
        latest = itertools.islice(lapses.items(), max(len(lapses) - MAX_LEFT, 0), None)
        return structs.replace(self, lapses=dict(latest))

    def _settle(self, clocks: dict[str, int], expected: dict[str, float]) -> Self:
        """Return the set with other clocks: update its minimum, and forget who left and is no longer ahead of it.

        An empty set forgets all: no one is left who could be held back.
        """
        minimum = min(clocks.values(), default=self.minimum)
        ahead = {name: c for name, c in self.ahead.items() if clocks and c > minimum and name not in clocks}
        lapses = self.lapses
        if not clocks or minimum > self.minimum:
            lapses = {name: lapse for name, lapse in lapses.items() if clocks and lapse.count_at(minimum)}
        return structs.replace(self, clocks=clocks, ahead=ahead, minimum=minimum, expected=expected, lapses=lapses)


def clocks_to_builtins(clocks: ClockSet) -> dict[str, Any] | None:
    """Return what is stored of a clock set, in a form for JSON; None for a set that has never had a member."""
    stored = {
        "clocks": dict(clocks.clocks),
        "ahead": dict(clocks.ahead),
        "minimum": clocks.minimum,
        "lapses": {name: list(lapse) for name, lapse in clocks.lapses.items()},
    }
    return stored if any(stored.values()) else None


def clocks_from_builtins(stored: object) -> ClockSet:
    """Return a clock set from its stored form. Raises `msgspec.ValidationError` if it has none."""
    if stored is None:
        return NO_CLOCKS
    require_known(stored, ClockSet)
    return msgspec.convert(stored, prepare_type(ClockSet))


NO_CLOCKS = ClockSet()
"""The clock set of a job before its first attempt, and of a job with another mode."""


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


def _on_drawn(job: JobState, attempt: Attempt, event: events.CandidatesDrawn, context: Context) -> Transition:
    if not event.client_ids:
        return buffered.on_drawn(job, attempt, event, context)
    return attempts.assign(job, attempt, admit(job, event.client_ids), context)


def _event_of_revocation(job: JobState, client_id: str) -> events.JobEvent | None:
    return events.RollCalled(job.job_id, revoked=frozenset({client_id})) if client_id in clocks_of(job).clocks else None


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
    for each in changes.find_changed(before, after):
        if each.kind is not AttemptKind.TRAIN:
            continue
        if each.is_busy:
            clocks = clocks.join(each.client_id)
        elif each.state is AssignmentState.MERGED:
            clocks = clocks.tick(each.client_id).expect([each.client_id], until)
        elif each.state in _ENDED_BY_CLIENT or each.reason is Reason.REVOKED:
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


def on_roll_call(job: JobState, event: events.RollCalled, context: Context) -> Transition:
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


SSP = register(
    dataclasses.replace(
        buffered.BUFFERED,
        name="ssp",
        write_state=_write_state,
        read_state=_read_state,
        handlers={events.RollCalled: on_roll_call},
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
