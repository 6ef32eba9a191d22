"""The coordinator: several jobs and one waiting room; events in, changes and commands out.

It reads no clock and does no I/O. Its driver turns sockets, clocks and operators into events:

1. Call `proposal = coordinator.propose(events, context)`.
2. Store `proposal.changes` in one transaction.
3. If they were stored, call `coordinator.accept(proposal)`, then execute `proposal.commands` in order and set
   `proposal.timers`. Otherwise call `coordinator.reject(proposal)`, which undoes the proposal; the events may be
   proposed again.

Only one proposal may be pending at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec import structs

from fedplat.errors import FedplatError
from fedplat.rounds import attempts, dispatch, pacing, privacy_rules, selection
from fedplat.rounds.changes import Change, difference
from fedplat.rounds.commands import ACCEPTED, Assign, Command, Context, Refuse, Transition, Verdict
from fedplat.rounds.demand import Participation, ParticipationHistory, participations_of
from fedplat.rounds.events import (
    AssignmentFailed,
    AssignmentReclaimed,
    AssignmentRevoked,
    CandidatesDrawn,
    ClientCheckedIn,
    ClientLeft,
    ClientRevoked,
    Event,
    JobEvent,
    RollCalled,
    ServerRestarted,
    TimerFired,
)
from fedplat.rounds.protocols.base import training_of
from fedplat.rounds.records import Assignment, AttemptKey, JobState
from fedplat.rounds.selection import Reservations, WaitingRoom
from fedplat.rounds.states import DECLINES, ENDED_JOBS, HAVE_UPDATES, JobStatus, Reason


@dataclasses.dataclass
class Proposal:
    """The changes and commands that follow from a batch of events, and the verdict on each event, in order.

    `timers` has the moment of the next `TimerFired` of each job for which that moment has changed; None: never.
    `drawn` maps the clients that were given work to their attempts; the coordinator records them only on `accept`.
    `moved` maps each client that entered or left the waiting room in the batch to its entry before (None: not waiting),
    so that `reject` can restore it. `errors` are those of policies of plugins, whose attempts have failed.
    """

    jobs: dict[str, JobState] = dataclasses.field(default_factory=dict[str, JobState])
    changes: list[Change] = dataclasses.field(default_factory=list[Change])
    commands: list[Command] = dataclasses.field(default_factory=list[Command])
    timers: dict[str, float | None] = dataclasses.field(default_factory=dict[str, float | None])
    verdicts: list[Verdict] = dataclasses.field(default_factory=list[Verdict])
    drawn: dict[str, AttemptKey] = dataclasses.field(default_factory=dict[str, AttemptKey])
    moved: dict[str, ClientCheckedIn | None] = dataclasses.field(default_factory=dict[str, ClientCheckedIn | None])
    errors: list[FedplatError] = dataclasses.field(default_factory=list[FedplatError])


@dataclasses.dataclass(frozen=True)
class _PopulationSummary:
    """The running jobs of a population and their combined demand, from which refused clients get a retry window.

    `fleet` is the fleet size to assume for all of them, or 0 unless a job of the population hides its sample. Drawn
    clients do not wait, and for a while after their work their number is unknown.
    """

    running: tuple[JobState, ...]
    num_busy: int
    num_needed: int
    round_s: float
    fleet: int
    hides: bool


class Coordinator:
    """All jobs of a server (or of a simulation). At most `max_waiting` clients wait at a time."""

    def __init__(self, jobs: Iterable[JobState] = (), max_waiting: int = 100_000) -> None:
        self.jobs: dict[str, JobState] = {}
        self.room = WaitingRoom()
        self.histories: dict[str, ParticipationHistory] = {}
        self.max_waiting = max_waiting
        self._reservations = Reservations(self.room)
        self._busy: dict[str, AttemptKey] = {}
        self._num_busy = Counter[str]()
        self._timers: dict[str, float | None] = {}
        self._summaries: dict[str, _PopulationSummary] = {}
        for job in jobs:
            self.add(job)

    def add(self, job: JobState, participations: Iterable[Participation] = ()) -> None:
        """Add a job that is already stored, with the participations of its clients if the job needs them."""
        assert job.job_id not in self.jobs
        self.jobs[job.job_id] = job
        self._summaries.clear()
        history = ParticipationHistory.recall(job.spec, participations) if job.status not in ENDED_JOBS else None
        if history is not None:
            self.histories[job.job_id] = history
        for group in job.assignment_sets:
            for assignment in group.busy:
                self._set_busy(assignment.client_id, assignment.key)
        self.room.follow(job, history)

    def remove(self, job_id: str) -> None:
        """Forget a job that has ended, and that the store no longer shows."""
        job = self.jobs.pop(job_id)
        assert job.status in ENDED_JOBS
        self.histories.pop(job_id, None)
        self._timers.pop(job_id, None)
        self._summaries.clear()

    @property
    def num_busy(self) -> int:
        """The number of clients with a busy assignment."""
        return len(self._busy)

    @property
    def busy_clients(self) -> Collection[str]:
        """The clients with a busy assignment."""
        return self._busy.keys()

    def assignment_of(self, client_id: str) -> AttemptKey | None:
        """Return the attempt that a client works for now, if any."""
        return self._busy.get(client_id)

    def find(self, key: AttemptKey, client_id: str) -> Assignment | None:
        """Return a client's assignment that was made in an attempt.

        None for assignments that no current attempt depends on: only the store has those.
        """
        job = self.jobs.get(key.job_id)
        return job.find(key, client_id) if job is not None else None

    def propose(self, events: Sequence[Event], context: Context) -> Proposal:
        """Compute the effects of the events. The waiting room changes at once; jobs change on `accept`."""
        proposal = Proposal()
        for event in events:
            proposal.verdicts.append(self._handle(proposal, event, context))
        self._draw_ready(proposal, context)
        proposal.commands = self._last_answers(proposal.commands)
        proposal.timers = self._changed_timers(proposal, events)
        return proposal

    def accept(self, proposal: Proposal) -> None:
        """Apply the changes, which are stored now."""
        for job_id, job in proposal.jobs.items():
            self.jobs[job_id] = job
            self._summaries.clear()
        self._timers |= proposal.timers
        for change in proposal.changes:
            for assignment in change.assignments:
                if assignment.is_busy:
                    self._set_busy(assignment.client_id, assignment.key)
                elif self._busy.get(assignment.client_id) == assignment.key:
                    del self._busy[assignment.client_id]
                    self._num_busy[change.job.spec.population] -= 1
            self._record_participations(change)

    def reject(self, proposal: Proposal) -> None:
        """Undo a proposal that was not stored: restore the waiting room, and what jobs demand of it."""
        for job_id in proposal.jobs:
            self.room.undo(self.jobs[job_id], self.histories.get(job_id))
        for client_id, before in proposal.moved.items():
            if before is None:
                self.room.leave(client_id)
            else:
                self.room.enter(before)

    def refusal(self, client: ClientCheckedIn) -> Refuse:
        """Return the answer to a client that waited but was not selected: the reason, and when to retry."""
        summary = self._summaries.get(client.population) or self._summarize(client.population)
        reason, rest_s = Reason.NOT_ELIGIBLE if summary.running else Reason.NO_WORK, 0.0
        train = [job for job in summary.running if selection.may_train(job, client)]
        train = [job for job in train if not self.room.has_declined(job.job_id, client)]
        rests = [self._rest_s(client.client_id, job) for job in train if not self._is_at_limit(client.client_id, job)]
        rests += [0.0 for job in summary.running if selection.may_evaluate(job, client)]
        if rests:
            reason, rest_s = Reason.NOT_SELECTED, min(rests)
        elif train:
            reason = Reason.LIMIT_REACHED
        num_clients = summary.fleet or self.room.num_waiting(client.population) + summary.num_busy
        if reason in (Reason.NO_WORK, Reason.LIMIT_REACHED):
            num_clients = pacing.round_up_to_power_of_two(num_clients) if summary.hides else num_clients
            return Refuse(client.client_id, reason, pacing.idle_window(num_clients))
        if any(training_of(job).membership.awaits(job, client.client_id) for job in train):  # absent, it would leave
            return Refuse(client.client_id, reason, pacing.SOON)
        window = pacing.busy_window(num_clients, summary.num_needed, summary.round_s)
        return Refuse(client.client_id, reason, pacing.after_rest(window, rest_s))

    def _summarize(self, population: str) -> _PopulationSummary:
        """Summarize a population. Cached until a job changes, because thousands of clients are refused meanwhile."""
        jobs = [job for job in self.jobs.values() if job.spec.population == population]
        running = tuple(job for job in jobs if job.status is JobStatus.RUNNING)
        summary = self._summaries[population] = _PopulationSummary(
            running,
            num_busy=sum(job.num_busy for job in running),
            num_needed=sum(training_of(job).num_needed(job) for job in running),
            round_s=min((job.spec.deadlines.training_s for job in running), default=0.0),
            fleet=max((job.spec.selection.wait_for for job in running if _hides_cohorts(job)), default=0),
            hides=any(map(_hides_cohorts, jobs)),
        )
        return summary

    def _is_at_limit(self, client_id: str, job: JobState) -> bool:
        """Return whether the client has reached the job's participation limit."""
        history = self.histories.get(job.job_id)
        return history is not None and history.is_at_limit(client_id)

    def _rest_s(self, client_id: str, job: JobState) -> float:
        """Estimate the seconds until the job may draw the client again."""
        history = self.histories.get(job.job_id)
        num_rounds = history.rounds_to_rest(client_id, job.round + 1) if history is not None else 0
        return num_rounds * pacing.round_s(job.spec.deadlines, job.durations) if num_rounds else 0.0

    def _handle(self, proposal: Proposal, event: Event, context: Context) -> Verdict:
        if isinstance(event, ClientCheckedIn):
            return self._check_in(proposal, event, context)
        if isinstance(event, ClientLeft):
            return self._leave(proposal, event)
        if isinstance(event, ClientRevoked):
            return self._revoke(proposal, event, context)
        if isinstance(event, TimerFired):
            return self._on_timer(proposal, event, context)
        assert not isinstance(event, CandidatesDrawn | AssignmentReclaimed | RollCalled), (
            "the coordinator makes these events itself"
        )
        verdict = self._step(proposal, event, context)
        if isinstance(event, AssignmentFailed) and event.reason in DECLINES and verdict.accepted:
            self.room.decline(event.job_id, event.client_id, event.session)
        return verdict

    def _check_in(self, proposal: Proposal, event: ClientCheckedIn, context: Context) -> Verdict:
        client_id, waiting = event.client_id, self.room.clients
        key = proposal.drawn.get(client_id) or self._busy.get(client_id)
        # Its reply was lost, or it was restarted: it gets the same assignment again, if that is still open.
        if key is not None and self._step(proposal, AssignmentReclaimed(key, client_id), context).accepted:
            return ACCEPTED
        if len(waiting) >= self.max_waiting and client_id not in waiting:
            proposal.commands.append(Refuse(client_id, Reason.OVERLOADED, pacing.overload_window(len(waiting))))
            return ACCEPTED
        proposal.moved.setdefault(client_id, waiting.get(client_id))
        self.room.enter(event)
        return ACCEPTED

    def _leave(self, proposal: Proposal, event: ClientLeft) -> Verdict:
        client = self.room.leave(event.client_id)
        if client is not None:
            proposal.moved.setdefault(event.client_id, client)
            proposal.commands.append(self.refusal(client))
        return ACCEPTED

    def _revoke(self, proposal: Proposal, event: ClientRevoked, context: Context) -> Verdict:
        """Remove the client from the waiting room and end its open assignments, reported ones included."""
        self._leave(proposal, ClientLeft(event.client_id))
        for job in list((self.jobs | proposal.jobs).values()):
            for group in job.assignment_sets:
                assignment = group.assignments.get(event.client_id)
                if assignment is not None and assignment.is_open:
                    self._step(proposal, AssignmentRevoked(assignment.key, event.client_id), context)
            latest = self._latest(proposal, job.job_id)
            left = training_of(latest).membership.revoked(latest, event.client_id) if latest is not None else None
            if left is not None:
                self._step(proposal, left, context)
        return ACCEPTED

    def _on_timer(self, proposal: Proposal, event: TimerFired, context: Context) -> Verdict:
        """End late assignments; then complete a selection whose time is over with the clients that wait."""
        before = self._latest(proposal, event.job_id)
        if before is None:
            return _refuse_unknown_job(event.job_id)
        self._apply(proposal, before, training_of(before).on_deadline(before, context), context)
        self._call_roll(proposal, event.job_id, context)
        job = self._latest(proposal, event.job_id)
        attempt = job.open_attempt if job is not None and attempts.selects(job) else None
        if attempt is not None and attempt.selection_ends_at <= context.now:
            self._draw(proposal, event.job_id, context, final=True)
        return ACCEPTED

    def _call_roll(self, proposal: Proposal, job_id: str, context: Context) -> None:
        """Let members of a job that are absent leave, if the time of one of them, or of all, is over."""
        job = self._latest(proposal, job_id)
        if job is None or (roll := training_of(job).membership.roll(job, context)) is None:
            return
        waiting = {name: self.room.clients.get(name) for name in roll.members}
        present = frozenset(name for name, each in waiting.items() if each and selection.may_train(job, each))
        self._step(proposal, RollCalled(job_id, present, roll.is_last), context)

    def _changed_timers(self, proposal: Proposal, events: Sequence[Event]) -> dict[str, float | None]:
        """Return the next deadline of each job whose timer has fired or must be set to another moment."""
        # A timer that fired must be set again, even if it fired too early to change anything.
        fired = {event.job_id for event in events if isinstance(event, TimerFired)}
        restarted = {event.job_id for event in events if isinstance(event, ServerRestarted)}
        timers: dict[str, float | None] = {}
        for job_id in dict.fromkeys((*proposal.jobs, *sorted(fired | restarted))):
            job = self._latest(proposal, job_id)
            if job is None:
                continue
            next_deadline = attempts.next_deadline(job)
            if next_deadline != self._timers.get(job_id) or job_id in fired:
                timers[job_id] = next_deadline
        return timers

    def _last_answers(self, commands: Sequence[Command]) -> list[Command]:
        """Keep the last Assign or Refuse per client, and drop it if the client is waiting again.

        Otherwise a client that left and came back within one batch would receive the answer to its previous poll in the
        new one: a refusal although it waits, or a token that has been replaced.
        """
        last = {command.client_id: command for command in commands if isinstance(command, Assign | Refuse)}
        return [
            command
            for command in commands
            if not isinstance(command, Assign | Refuse)
            or (last[command.client_id] is command and command.client_id not in self.room.clients)
        ]

    def _step(self, proposal: Proposal, event: JobEvent, context: Context) -> Verdict:
        before = self._latest(proposal, event.job_id)
        if before is None:
            return _refuse_unknown_job(event.job_id)
        transition = dispatch.apply(before, event, context)
        self._apply(proposal, before, transition, context)
        return transition.verdict

    def _latest(self, proposal: Proposal, job_id: str) -> JobState | None:
        """Return a job in its state after the events of the batch that were handled so far."""
        return proposal.jobs.get(job_id) or self.jobs.get(job_id)

    def _apply(self, proposal: Proposal, before: JobState, transition: Transition, context: Context) -> None:
        """Record a transition and those that follow from it without an event (`dispatch.advance`)."""
        current: Transition | None = transition
        while current is not None:
            proposal.commands.extend(current.commands)
            if current.job is not before:
                after = training_of(before).membership.follow(before, current.job, context)
                after = structs.replace(after, revision=before.revision + 1)
                proposal.changes.append(difference(before, after))
                proposal.jobs[after.job_id] = before = after
            current = dispatch.advance(before, context)
        self.room.follow(before, self.histories.get(before.job_id))

    def _draw_ready(self, proposal: Proposal, context: Context) -> None:
        """Draw clients for each attempt with enough eligible ones; the attempt that has waited longest is first."""
        room, reservations = self.room, self._reservations
        update = functools.partial(reservations.update, functools.partial(self._latest, proposal), self._num_busy)
        update(context.now)
        progress = True
        while progress:
            progress = False
            for job_id in list(room.demands):
                if job_id in room.demands and room.is_ready(job_id) and not reservations.blocks(job_id):
                    self._draw(proposal, job_id, context, final=False)
                    update(context.now)
                    progress = True

    def _set_busy(self, client_id: str, key: AttemptKey) -> None:
        if client_id not in self._busy:
            self._num_busy[self.jobs[key.job_id].spec.population] += 1
        self._busy[client_id] = key

    def _draw(self, proposal: Proposal, job_id: str, context: Context, *, final: bool) -> None:
        demand, room = self.room.demands[job_id], self.room
        counts = room.num_resting(job_id), room.num_eligible(job_id), room.num_spent(job_id)
        num_waiting = room.num_waiting(demand.population)
        key, error = demand.key, ""
        try:
            drawn = room.draw(job_id, context.rng)
        except FedplatError as exc:  # of a plugin: only its job is affected
            proposal.errors.append(exc)
            drawn, error = list[ClientCheckedIn](), str(exc)
        client_ids = tuple(client.client_id for client in drawn)
        final = final or demand.sampling.is_trial  # trials of each client are not repeated
        is_short = final and len(drawn) < demand.target
        num_unable, unlike = (room.count_unable(job_id), room.describe_unlike(job_id)) if is_short else (0, "")
        candidates = CandidatesDrawn(
            job_id, client_ids, final, *counts, num_unable, error, num_waiting, unlike, room.num_declined(job_id)
        )
        self._step(proposal, candidates, context)
        attempt = proposal.jobs[job_id].attempt
        taken = attempt.assignments if attempt is not None and attempt.key == key else {}
        for client in drawn:
            proposal.moved.setdefault(client.client_id, client)
            if client.client_id in taken:
                proposal.drawn[client.client_id] = key
            else:
                self.room.enter(client)  # the attempt did not get enough clients: they keep waiting

    def _record_participations(self, change: Change) -> None:
        """Record the participations in a stored change."""
        job_id = change.job.job_id
        history = self.histories.get(job_id)
        if history is None:
            return
        if change.job.status in ENDED_JOBS:
            del self.histories[job_id]
            return
        trained = [each for each in change.assignments if each.kind in HAVE_UPDATES]
        for participation in participations_of(trained):
            is_new, waiting = history.record(participation), self.room.clients.get(participation.client_id)
            if is_new and waiting is not None:
                # The client was assigned, lost the assignment and checked in again within one batch. Only now is it
                # known whether it must rest.
                self.room.enter(waiting)


def _refuse_unknown_job(job_id: str) -> Verdict:
    return Verdict(Reason.STALE, f"there is no job {job_id}")


def _hides_cohorts(job: JobState) -> bool:
    return not privacy_rules.disclosure_of(job.spec).shows_cohorts
