"""The coordinator: several jobs and one waiting room; events in, changes and commands out.

It reads no clock and touches nothing outside. Its driver turns the world into events and does this:

1. `proposal = coordinator.propose(events, context)`
2. store `proposal.changes` in one transaction;
3. stored: `coordinator.accept(proposal)`, then carry out `proposal.commands` in order and set `proposal.timers`;
   not stored: `coordinator.reject(proposal)`: nothing has happened, the events may be proposed again.

Only one proposal may be under way at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from msgspec import structs

from fedplat.rounds import closing, pacing, privacy_rules, selection, sync
from fedplat.rounds.changes import Change, difference
from fedplat.rounds.commands import Assign, Command, Refuse
from fedplat.rounds.events import (
    AssignmentReclaimed,
    AssignmentRevoked,
    CandidatesDrawn,
    ClientCheckedIn,
    ClientLeft,
    ClientRevoked,
    Event,
    JobEvent,
    ServerRestarted,
    TimerFired,
)
from fedplat.rounds.participation import Participation, ParticipationHistory, participations_of
from fedplat.rounds.records import Assignment, AttemptKey, JobState
from fedplat.rounds.selection import WaitingRoom
from fedplat.rounds.states import ENDED_JOBS, AttemptKind, JobStatus, Reason
from fedplat.rounds.transition import ACCEPTED, Context, Transition, Verdict


@dataclasses.dataclass
class Proposal:
    """What a batch of events would change, what it wants done, and the answer to each event, in order.

    `timers` has the moment of the next `TimerFired` of each job for which that moment has changed; None: never.
    `drawn` holds who was given work, which the coordinator itself knows on `accept` only. `moved` holds what the
    waiting room said, before the batch, of each client that the batch moved: `reject` puts it back.
    """

    jobs: dict[str, JobState] = dataclasses.field(default_factory=dict[str, JobState])
    changes: list[Change] = dataclasses.field(default_factory=list[Change])
    commands: list[Command] = dataclasses.field(default_factory=list[Command])
    timers: dict[str, float | None] = dataclasses.field(default_factory=dict[str, float | None])
    verdicts: list[Verdict] = dataclasses.field(default_factory=list[Verdict])
    drawn: dict[str, AttemptKey] = dataclasses.field(default_factory=dict[str, AttemptKey])
    moved: dict[str, ClientCheckedIn | None] = dataclasses.field(default_factory=dict[str, ClientCheckedIn | None])


@dataclasses.dataclass(frozen=True)
class _PopulationSummary:
    """What refused clients of a population may expect: the jobs that run, and what these have and need together.

    `fleet` is how many clients there are, for all that is said to any of them: 0 unless a job of the population hides
    its sample. Whoever was drawn does not wait, and for a while after its work nobody knows where it is.
    """

    running: tuple[JobState, ...]
    num_busy: int
    num_needed: int
    round_s: float
    fleet: int
    hides: bool


class Coordinator:
    """All jobs of a server (or of a simulation). `max_waiting` bounds the waiting room."""

    def __init__(self, jobs: Iterable[JobState] = (), max_waiting: int = 100_000) -> None:
        self.jobs: dict[str, JobState] = {}
        self.room = WaitingRoom()
        self.histories: dict[str, ParticipationHistory] = {}
        self.max_waiting = max_waiting
        self._busy: dict[str, AttemptKey] = {}
        self._timers: dict[str, float | None] = {}
        self._outlooks: dict[str, _PopulationSummary] = {}
        for job in jobs:
            self.add(job)

    def add(self, job: JobState, participations: Iterable[Participation] = ()) -> None:
        """Takes over a job that the store holds already, with what its clients did, if that is to be remembered."""
        assert job.job_id not in self.jobs
        self.jobs[job.job_id] = job
        self._outlooks.clear()
        memory = ParticipationHistory.recall(job.spec, participations) if job.status not in ENDED_JOBS else None
        if memory is not None:
            self.histories[job.job_id] = memory
        for crew in job.assignment_sets:
            self._busy |= {assignment.client_id: assignment.key for assignment in crew.busy}
        self.room.follow(job, memory)

    @property
    def num_busy(self) -> int:
        """Number of clients with an open assignment."""
        return len(self._busy)

    def assignment_of(self, client_id: str) -> AttemptKey | None:
        """The attempt that a client works for now."""
        return self._busy.get(client_id)

    def find(self, key: AttemptKey, client_id: str) -> Assignment | None:
        """Return a client's assignment that was made in an attempt.

        None for those that no attempt of today depends on: only the store knows them.
        """
        job = self.jobs.get(key.job_id)
        return job.find(key, client_id) if job is not None else None

    def propose(self, events: Sequence[Event], context: Context) -> Proposal:
        """Works out what the events do. The waiting room moves at once; jobs move on `accept`."""
        proposal = Proposal()
        for event in events:
            proposal.verdicts.append(self._handle(proposal, event, context))
        self._fill(proposal, context)
        proposal.commands = self._last_answers(proposal.commands)
        proposal.timers = self._changed_timers(proposal, events)
        return proposal

    def accept(self, proposal: Proposal) -> None:
        """The changes are stored: they are the truth now."""
        for job_id, job in proposal.jobs.items():
            self.jobs[job_id] = job
            self._outlooks.clear()
        self._timers |= proposal.timers
        for change in proposal.changes:
            for assignment in change.assignments:
                if assignment.is_busy:
                    self._busy[assignment.client_id] = assignment.key
                elif self._busy.get(assignment.client_id) == assignment.key:
                    del self._busy[assignment.client_id]
            self._remember(change)

    def reject(self, proposal: Proposal) -> None:
        """The changes were not stored: the waiting room is as before, and jobs want what they wanted before."""
        for job_id in proposal.jobs:
            self.room.undo(self.jobs[job_id], self.histories.get(job_id))
        for client_id, before in proposal.moved.items():
            if before is None:
                self.room.leave(client_id)
            else:
                self.room.enter(before)

    def refusal(self, client: ClientCheckedIn) -> Refuse:
        """What to tell a client that waited for nothing: the reason, and when to come back."""
        outlook = self._outlooks.get(client.population) or self._summarize(client.population)
        reason, rest_s = Reason.NOT_ELIGIBLE if outlook.running else Reason.NO_WORK, 0.0
        train = [job for job in outlook.running if selection.may_train(job, client)]
        rests = [self._rest_s(client.client_id, job) for job in train if not self._is_spent(client.client_id, job)]
        rests += [0.0 for job in outlook.running if selection.may_evaluate(job, client)]
        if rests:
            reason, rest_s = Reason.NOT_SELECTED, min(rests)
        elif train:
            reason = Reason.LIMIT_REACHED
        num_clients = outlook.fleet or self.room.num_waiting(client.population) + outlook.num_busy
        if reason in (Reason.NO_WORK, Reason.LIMIT_REACHED):
            num_clients = pacing.round_up_to_power_of_two(num_clients) if outlook.hides else num_clients
            return Refuse(client.client_id, reason, pacing.idle_window(num_clients))
        window = pacing.busy_window(num_clients, outlook.num_needed, outlook.round_s)
        return Refuse(client.client_id, reason, pacing.after_rest(window, rest_s))

    def _summarize(self, population: str) -> _PopulationSummary:
        """Looked up once between two changes of jobs: thousands of clients are refused meanwhile."""
        jobs = [job for job in self.jobs.values() if job.spec.population == population]
        running = tuple(job for job in jobs if job.status is JobStatus.RUNNING)
        outlook = self._outlooks[population] = _PopulationSummary(
            running,
            num_busy=sum(job.num_busy for job in running),
            # Whoever waits for a pool needs all of it there at once, however few it draws.
            num_needed=sum(max(job.spec.num_wanted, job.spec.selection.wait_for) for job in running),
            round_s=min((job.spec.deadlines.training_s for job in running), default=0.0),
            fleet=max((job.spec.selection.wait_for for job in running if privacy_rules.hides_sample(job)), default=0),
            hides=any(privacy_rules.hides_sample(job) for job in jobs),
        )
        return outlook

    def _is_spent(self, client_id: str, job: JobState) -> bool:
        """Whether the client took part in as many rounds of a job as it may."""
        memory = self.histories.get(job.job_id)
        return memory is not None and memory.is_at_limit(client_id)

    def _rest_s(self, client_id: str, job: JobState) -> float:
        """About how long it takes until the job may draw the client again."""
        memory = self.histories.get(job.job_id)
        num_rounds = memory.rounds_to_rest(client_id, job.round + 1) if memory is not None else 0
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
        assert not isinstance(event, CandidatesDrawn | AssignmentReclaimed), "these follow from other events"
        return self._step(proposal, event, context)

    def _check_in(self, proposal: Proposal, event: ClientCheckedIn, context: Context) -> Verdict:
        client_id, waiting = event.client_id, self.room.clients
        key = proposal.drawn.get(client_id) or self._busy.get(client_id)
        # Its reply was lost, or it was restarted: it gets the same work again, if that is still open.
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
        """The client waits no longer. Its work, and what it has reported to open attempts, comes to nothing."""
        self._leave(proposal, ClientLeft(event.client_id))
        for job in list((self.jobs | proposal.jobs).values()):
            for crew in job.assignment_sets:
                found = crew.assignments.get(event.client_id)
                if found is not None and found.is_open:
                    self._step(proposal, AssignmentRevoked(found.key, event.client_id), context)
        return ACCEPTED

    def _on_timer(self, proposal: Proposal, event: TimerFired, context: Context) -> Verdict:
        """End the assignments that are late; then a selection whose time is over, with the clients that wait."""
        before = self._latest(proposal, event.job_id)
        if before is None:
            return _no_such_job(event.job_id)
        self._take(proposal, before, closing.drop_late(before, context), context)
        job = self._latest(proposal, event.job_id)
        attempt = job.open_attempt if job is not None else None
        if attempt is not None and attempt.awaits_clients and attempt.selection_ends_at <= context.now:
            self._draw(proposal, event.job_id, context, final=True)
        return ACCEPTED

    def _changed_timers(self, proposal: Proposal, events: Sequence[Event]) -> dict[str, float | None]:
        """Return the next deadlines of the jobs whose timer is set to another moment, or has fired."""
        # A timer that fired is gone, also if it fired too early to change anything.
        fired = {event.job_id for event in events if isinstance(event, TimerFired)}
        restarted = {event.job_id for event in events if isinstance(event, ServerRestarted)}
        timers: dict[str, float | None] = {}
        for job_id in dict.fromkeys((*proposal.jobs, *sorted(fired | restarted))):
            job = self._latest(proposal, job_id)
            if job is not None and (job.next_deadline != self._timers.get(job_id) or job_id in fired):
                timers[job_id] = job.next_deadline
        return timers

    def _last_answers(self, commands: Sequence[Command]) -> list[Command]:
        """Leaves one answer for each client, the last; whoever waits again has none yet.

        Else a client that left and came back within one batch would hear, where it waits now, what was meant for
        where it waited before: a refusal while it is in the room, or a token that is fenced already.
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
            return _no_such_job(event.job_id)
        transition = sync.step(before, event, context)
        self._take(proposal, before, transition, context)
        return transition.verdict

    def _latest(self, proposal: Proposal, job_id: str) -> JobState | None:
        """Return a job as the events of the batch have left it until now."""
        return proposal.jobs.get(job_id) or self.jobs.get(job_id)

    def _take(self, proposal: Proposal, before: JobState, transition: Transition, context: Context) -> None:
        """Notes a transition and those that follow from it by themselves."""
        current: Transition | None = transition
        while current is not None:
            proposal.commands.extend(current.commands)
            if current.job is not before:
                after = structs.replace(current.job, revision=before.revision + 1)
                proposal.changes.append(difference(before, after))
                proposal.jobs[after.job_id] = before = after
            current = sync.advance(before, context)
        self.room.follow(before, self.histories.get(before.job_id))

    def _fill(self, proposal: Proposal, context: Context) -> None:
        """Gives clients to every attempt that enough of them wait for; who has wanted longest comes first."""
        progress = True
        while progress:
            progress = False
            for job_id in list(self.room.demands):
                if job_id in self.room.demands and self.room.is_ready(job_id):
                    self._draw(proposal, job_id, context, final=False)
                    progress = True

    def _draw(self, proposal: Proposal, job_id: str, context: Context, *, final: bool) -> None:
        demand, room = self.room.demands[job_id], self.room
        counts = room.num_resting(job_id), room.num_eligible(job_id), room.num_spent(job_id)
        key, drawn = demand.key, self.room.draw(job_id, context.rng)
        client_ids = tuple(client.client_id for client in drawn)
        final = final or demand.sampling.is_trial  # nobody has a second trial
        self._step(proposal, CandidatesDrawn(job_id, client_ids, final, *counts), context)
        attempt = proposal.jobs[job_id].attempt
        taken = attempt.assignments if attempt is not None and attempt.key == key else {}
        for client in drawn:
            proposal.moved.setdefault(client.client_id, client)
            if client.client_id in taken:
                proposal.drawn[client.client_id] = key
            else:
                self.room.enter(client)  # too few to begin with: they go on waiting

    def _remember(self, change: Change) -> None:
        """Notes what a stored change tells of clients."""
        job_id = change.job.job_id
        memory = self.histories.get(job_id)
        if memory is None:
            return
        if change.job.status in ENDED_JOBS:
            del self.histories[job_id]
            return
        trained = [each for each in change.assignments if each.kind is AttemptKind.TRAIN]
        for participation in participations_of(trained):
            is_new, waiting = memory.record(participation), self.room.clients.get(participation.client_id)
            if is_new and waiting is not None:
                # It was given work, lost it and came back, all in one batch: now it is known whether it has to rest.
                self.room.enter(waiting)


def _no_such_job(job_id: str) -> Verdict:
    return Verdict(Reason.STALE, f"there is no job {job_id}")
