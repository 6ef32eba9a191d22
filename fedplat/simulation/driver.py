"""The driver: it runs the production coordinator in virtual time, with a simulated fleet and optional real training.

The loop in `Driver.run` finds the next moment at which something happens, creates the events of that moment, lets the
coordinator propose and accept, and carries out its commands. The daemon's runner does the same with a real clock.
All randomness follows from the simulation's seed, and all events of one moment are ordered, so equal simulations have
equal results, bit for bit, with any engine.

Clients behave like the SDK: they check in, wait for at most `wait_s`, return within the window of a refusal, work on
their assignment, stop at an abort, and check in again at once, or after a back-off if they failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedplat.job import JobSpec
from fedplat.rounds import AttemptKey, Change, Context, Coordinator, JobState, Proposal, Verdict
from fedplat.rounds.commands import Abandon, Abort, Assign, Command, Commit, Fold, Refuse, Restart, RunWarmStart
from fedplat.rounds.events import (
    AssignmentFailed,
    Event,
    JobAction,
    OperatorCommand,
    TimerFired,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import AssignmentState, JobStatus, Reason
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.device import DeviceAssignment, Load, Planner
from fedplat.simulation.clients.event_queue import EventQueue
from fedplat.simulation.clients.idle import IdleClients
from fedplat.simulation.federated.interface import TrainingModel
from fedplat.simulation.recording.statistics import RunStatistics

Trace = Callable[[Sequence[Event], float, Proposal], None]
_PLANS, _COORDINATOR, _CLIENTS = range(1, 4)


class Tokens:
    """Counted tokens. No one steals them in a simulation, so their bytes stand for their hashes."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self) -> tuple[str, bytes]:
        """Return a new token and its hash."""
        token = str(next(self._numbers))
        return token, token.encode()


class Driver:
    """One job, its fleet and the clock. `trace` is called with each batch of events, its time and its proposal."""

    def __init__(
        self,
        spec: JobSpec,
        fleet: Fleet,
        training: TrainingModel,
        statistics: RunStatistics,
        seed: int,
        trace: Trace | None = None,
    ) -> None:
        self.now = 0.0
        self.coordinator = Coordinator([JobState(spec.name, spec, training.first_version())])
        self._spec, self._training, self._statistics, self._trace = spec, training, statistics, trace
        self._rng, self._tokens = coordinator_rng(seed), Tokens()
        self._deadline_at = np.inf
        self._idle = IdleClients(fleet, spec, _rng(seed, _CLIENTS))
        load = Load(float(spec.config.get("epochs", 1)), spec.config.get("partial_work") is True)
        self._planner = Planner(fleet, load, int(_rng(seed, _PLANS).integers(2**63)))
        self._queue: EventQueue[tuple[Callable[[Any], Event | None], Any]] = EventQueue()
        self._tasks: dict[int, DeviceAssignment] = {}
        self._settled: AttemptKey | None = None

    @property
    def job(self) -> JobState:
        """The current state of the job."""
        return self.coordinator.jobs[self._spec.name]

    def run(self, until_s: float) -> None:
        """Run until the job has ended or paused itself, `until_s` is reached, or no event is left."""
        self._process([OperatorCommand(self._spec.name, JobAction.START)])
        while self.job.status is JobStatus.RUNNING:
            moment = min(self._deadline_at, self._queue.first(), self._idle.next_batch())
            if moment > until_s or moment == np.inf:
                break
            self.now = max(self.now, moment)
            self._step()
        self._statistics.check_ins, self._statistics.refused = self._idle.num_check_ins, self._idle.num_refused

    def _step(self) -> None:
        """Process everything due now: first check-ins and departures, then clients at work, then the deadline."""
        events = self._idle.events(self.now)
        for make_event, subject in self._queue.due(self.now):
            event = make_event(subject)
            if event is not None:
                events.append(event)
                if self._training.one_at_a_time:
                    self._process(events)
                    events = []
        if self._deadline_at <= self.now:
            self._deadline_at = np.inf
            events.append(TimerFired(self._spec.name))
        if events:
            self._process(events)

    def _process(self, events: list[Event]) -> None:
        proposal = self.coordinator.propose(events, Context(self.now, self._rng, self._tokens))
        if proposal.errors:  # a server tries again; here the same would happen
            raise proposal.errors[0]
        self.coordinator.accept(proposal)
        self._statistics.events += len(events)
        self._statistics.batches += 1
        if self._trace is not None:
            self._trace(events, self.now, proposal)
        self._deliver_verdicts(events, proposal.verdicts)
        self._apply_changes(proposal.changes)
        for deadline_at in proposal.timers.values():  # a simulation has one job
            self._deadline_at = np.inf if deadline_at is None else deadline_at
        self._apply_commands(proposal.commands)

    def _upload(self, task: DeviceAssignment) -> Event | None:
        if task.is_over:
            return None
        self._queue.put(task.report_at, (self._report, task))
        return UploadStarted(task.key, task.client_id)

    def _report(self, task: DeviceAssignment) -> Event | None:
        return None if task.is_over else self._training.report(task)

    def _fail(self, task: DeviceAssignment) -> Event | None:
        if task.is_over:
            return None
        return AssignmentFailed(task.key, task.client_id, Reason.TRAINER_ERROR, "a simulated failure")

    def _go_offline(self, task: DeviceAssignment) -> None:
        """Take a client offline without a report; when it is back, it reclaims its assignment if that is still open."""
        if not task.is_over:
            self._statistics.lost += 1
            self._end(task)
            self._idle.schedule_check_ins(np.array([task.client]), np.array([task.returns_at]))

    def _record(self, event: Event) -> Event:
        return event

    def _deliver_verdicts(self, events: Sequence[Event], verdicts: Sequence[Verdict]) -> None:
        """Answer reports and failures; their clients are idle again."""
        for event, verdict in zip(events, verdicts, strict=True):
            if isinstance(event, UpdateReported | UpdateRejected | AssignmentFailed):
                task = self._tasks.pop(int(event.client_id))
                accepted = isinstance(event, UpdateReported) and verdict.accepted
                task.is_over = True
                if not accepted:
                    self._training.drop(task)
                self._idle.on_finished(task.client, self.now, failed=not accepted)

    def _apply_changes(self, changes: Sequence[Change]) -> None:
        """Count stored changes; a committed version becomes the one to train on."""
        for change in changes:
            self._statistics.on_changed(change)
            for assignment in change.assignments:
                if assignment.state in (AssignmentState.DROPPED, AssignmentState.REJECTED):
                    self._training.forget(assignment.key, assignment.client_id)
            attempt = change.attempt
            if attempt is None or attempt.is_open or attempt.key == self._settled:
                continue
            self._settled = attempt.key
            version = change.job.latest.version if change.version is not None else None
            self._statistics.on_attempt_ended(change.job, attempt, self._training.settle(attempt.key, version))

    def _apply_commands(self, commands: Sequence[Command]) -> None:
        assigns: list[Assign] = []
        refusals: list[Refuse] = []
        for command in commands:
            match command:
                case Assign():
                    assigns.append(command)
                case Refuse():
                    refusals.append(command)
                case _:
                    self._carry_out(command)
        if refusals:
            self._idle.on_refused(refusals, self.now)
        if assigns:
            self._assign(assigns)

    def _carry_out(self, command: Abort | Fold | Restart | Commit | RunWarmStart | Abandon) -> None:
        match command:
            case Abort():
                task = self._tasks.get(int(command.client_id))
                if task is not None and task.key == command.key:  # else the client is offline
                    self._end(task)
                    self._idle.on_finished(task.client, self.now, failed=False)
            case Fold():
                if (failed := self._training.fold(command)) is not None:
                    self._queue.put(self.now, (self._record, failed))
            case Restart():
                self._training.restart(command)
            case Commit():
                outcome = self._training.commit(command, self.job)
                self._queue.put(self.now, (self._record, outcome))
            case RunWarmStart():
                self._queue.put(self.now, (self._record, self._training.warm_start(command)))
            case Abandon():
                pass  # `settle` has discarded the updates of the attempt

    def _end(self, task: DeviceAssignment) -> None:
        task.is_over = True
        del self._tasks[task.client]
        self._training.drop(task)

    def _assign(self, assigns: Sequence[Assign]) -> None:
        until = self._idle.on_assigned(np.array([int(command.client_id) for command in assigns]))
        tasks, bytes_down = self._planner.plan(assigns, self.now, until, self._training.sizes)
        for task, size in zip(tasks, bytes_down.tolist(), strict=True):
            self._statistics.on_assigned(task.key, self.now, size)
            self._tasks[task.client] = task
            if task.fails_at < min(task.gone_at, task.report_at):
                self._queue.put(task.fails_at, (self._fail, task))
                continue
            if task.gone_at < np.inf:
                self._queue.put(task.gone_at, (self._go_offline, task))
            if task.begins_upload_at < np.inf:
                self._queue.put(task.begins_upload_at, (self._upload, task))
            else:
                self._queue.put(task.report_at, (self._report, task))
        self._training.expect(self._select_useful(tasks))

    def _select_useful(self, tasks: Sequence[DeviceAssignment]) -> list[DeviceAssignment]:
        """Return the tasks whose reports should arrive in time and before the goal is reached, as predicted now.

        A buffered job has no surplus: a report that arrives when the buffer is full counts for the next buffer.
        """
        attempt = self.job.attempt
        assert attempt is not None
        in_time = sorted((task for task in tasks if task.in_time), key=lambda task: task.report_at)
        return in_time if self._spec.buffered is not None else in_time[: attempt.goal]


def coordinator_rng(seed: int) -> np.random.Generator:
    """Return the generator of the coordinator's randomness."""
    return _rng(seed, _COORDINATOR)


def _rng(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, purpose]))
