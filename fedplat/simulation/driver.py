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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedplat.job import JobSpec
from fedplat.job.secure import num_groups
from fedplat.rounds import AttemptKey, Change, Context, Coordinator, JobState, Proposal, Verdict
from fedplat.rounds.commands import (
    Abandon,
    Abort,
    Assign,
    Command,
    Commit,
    Fold,
    NextStep,
    Refuse,
    Restart,
    RunWarmStart,
)
from fedplat.rounds.events import (
    AssignmentFailed,
    Event,
    JobAction,
    KeysAdvertised,
    MasksAnswered,
    OperatorCommand,
    SharesSent,
    SurvivorsConfirmed,
    TimerFired,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Always
from fedplat.simulation.clients.device import DeviceAssignment, Load, Planner
from fedplat.simulation.clients.event_queue import EventQueue
from fedplat.simulation.clients.idle import IdleClients
from fedplat.simulation.federated.interface import TrainingModel
from fedplat.simulation.recording.result import describe_end
from fedplat.simulation.recording.statistics import RunStatistics
from fedplat.simulation.secure.costs import KEYS_BYTES
from fedplat.simulation.secure.steps import SecureStep, StepPlanner

Trace = Callable[[Sequence[Event], float, Proposal], None]
_PLANS, _COORDINATOR, _CLIENTS, _DROP_OUTS = range(1, 5)
_STEP_EVENTS: Mapping[AttemptPhase, Callable[[AttemptKey, str, bytes], Event]] = {
    AttemptPhase.ADVERTISING: KeysAdvertised,
    AttemptPhase.SHARING: SharesSent,
    AttemptPhase.CONFIRMING: SurvivorsConfirmed,
    AttemptPhase.UNMASKING: MasksAnswered,
}
_AFTER_REPORT = (AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING)
_TIMEOUTS = (Reason.TRAIN_TIMEOUT, Reason.STEP_TIMEOUT, Reason.UPLOAD_TIMEOUT)

MAX_FAILURES = 20
"""Failed attempts in a row that end a simulation, if all clients were back meanwhile."""
LONGEST_PERIOD_S = 8 * 86_400.0
"""Virtual seconds after which a client that is not always online is taken to have been online: more than a week."""


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
        self._planner = Planner(fleet, Load.from_config(spec.config), int(_rng(seed, _PLANS).integers(2**63)))
        self._steps: StepPlanner | None = None
        if spec.secure_aggregation is not None:
            drop_outs = int(_rng(seed, _DROP_OUTS).integers(2**63))
            self._steps = StepPlanner(spec, fleet, training.num_entries, drop_outs)
        self._under_way: dict[int, SecureStep] = {}
        self._away_s, self._failing_since = fleet.options.away_s, 0.0
        self._patience_s = 2 * self._away_s + (0.0 if isinstance(fleet.availability, Always) else LONGEST_PERIOD_S)
        self._queue: EventQueue[tuple[Callable[[Any], Event | None], Any]] = EventQueue()
        self._tasks: dict[int, DeviceAssignment] = {}
        self._settled: AttemptKey | None = None

    @property
    def job(self) -> JobState:
        """The current state of the job."""
        return self.coordinator.jobs[self._spec.name]

    def run(self, until_s: float) -> str:
        """Run until the job has ended or paused itself, or cannot progress, or until `until_s`.

        Return why it is still running then; empty if it is not.
        """
        self._process([OperatorCommand(self._spec.name, JobAction.START)])
        stopped = ""
        while self.job.status is JobStatus.RUNNING and not stopped:
            moment = min(self._deadline_at, self._queue.first(), self._idle.next_batch())
            if moment > until_s:
                stopped = describe_end(until_s)
            elif moment == np.inf:
                stopped = f"no client ever checks in again; {self.job.reason or 'round 1 waits for clients'}"
            else:
                self.now = max(self.now, moment)
                self._step()
                stopped = self._describe_standstill()
        self._statistics.check_ins, self._statistics.refused = self._idle.num_check_ins, self._idle.num_refused
        return stopped

    def _describe_standstill(self) -> str:
        """Return why no round can be expected any more; empty if one can.

        Clients that are offline may be back later, so the job waits for them.
        """
        if not self.job.failures:
            self._failing_since = self.now
        if self.job.failures < MAX_FAILURES or self.now - self._failing_since < self._patience_s:
            return ""
        last = self.job.attempt
        assert last is not None
        place = f"round {last.key.round} attempt {last.key.number}"
        return f"no progress after {self.job.failures} failed attempts in a row; the last one: {place}: {last.reason}"

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
            self._count_dropped(task)
            self._end(task)
            self._idle.schedule_check_ins(np.array([task.client]), np.array([task.returns_at]))

    def _record(self, event: Event) -> Event:
        return event

    def _take_step(self, step: SecureStep) -> Event | None:
        task = step.task
        if task.is_over or self._under_way.get(task.client) is not step:  # a later phase has begun meanwhile
            return None
        return _STEP_EVENTS[step.phase](task.key, task.client_id, self._training.take_step(task))

    def _begin_step(self, command: NextStep) -> None:
        """Plan the steps of clients in the phase of a secure aggregation that has begun."""
        attempt, steps = self.job.attempt, self._steps
        assert attempt is not None
        assert steps is not None
        if (attempt.key, attempt.phase) != (command.key, command.phase):
            return  # another event of the batch has ended the attempt
        self._training.begin_step(attempt)
        if attempt.phase is AttemptPhase.UNMASKING:
            self._statistics.on_unmasking(num_groups(self._spec), steps.server_s(attempt))
        for step in steps.plan(attempt, self._tasks, self.now):
            task = step.task
            task.phase, self._under_way[task.client] = step.phase, step
            if step.gone_at < np.inf:
                task.returns_at = min(task.returns_at, step.gone_at + self._away_s)
                self._queue.put(step.gone_at, (self._go_offline, task))
            if step.phase is not AttemptPhase.COLLECTING:
                self._queue.put(step.at, (self._take_step, step))
                continue
            task.report_at = step.at
            uploads = step.uploads_at < np.inf
            self._queue.put(min(step.uploads_at, step.at), (self._upload if uploads else self._report, task))

    def _count_dropped(self, task: DeviceAssignment) -> None:
        if self._steps is not None and task.kind is AttemptKind.TRAIN:
            self._statistics.on_dropped(task)

    def _deliver_verdicts(self, events: Sequence[Event], verdicts: Sequence[Verdict]) -> None:
        """Answer messages, reports and failures. A client is idle again after its last one, or if it was refused."""
        for event, verdict in zip(events, verdicts, strict=True):
            if isinstance(event, UpdateReported | UpdateRejected | AssignmentFailed):
                task = self._tasks[int(event.client_id)]
                accepted = isinstance(event, UpdateReported) and verdict.accepted
                if accepted and (step := self._under_way.get(task.client)) is not None:
                    task.client_task = None  # the update is with the server, while the client still has to answer
                    self._complete_step(step)
                    continue
                if not accepted:
                    self._count_dropped(task)
                    self._training.drop(task)
                self._finish(task, failed=not accepted)
            elif isinstance(event, KeysAdvertised | SharesSent | SurvivorsConfirmed | MasksAnswered):
                step = self._under_way[int(event.client_id)]
                if verdict.accepted:
                    self._complete_step(step)
                elif step.phase is not AttemptPhase.CONFIRMING:  # else it still has to answer
                    self._training.drop(step.task)
                    self._finish(step.task, failed=False)

    def _complete_step(self, step: SecureStep) -> None:
        assert self._steps is not None
        self._statistics.on_step(step)
        del self._under_way[step.task.client]
        if step.phase is AttemptPhase.UNMASKING:
            self._finish(step.task, failed=False)
        else:
            step.task.phase = self._steps.phase_after(step.phase)

    def _finish(self, task: DeviceAssignment, *, failed: bool) -> None:
        self._forget(task)
        self._idle.on_finished(task.client, self.now, failed=failed)

    def _forget(self, task: DeviceAssignment) -> None:
        task.is_over = True
        del self._tasks[task.client]
        self._under_way.pop(task.client, None)

    def _apply_changes(self, changes: Sequence[Change]) -> None:
        """Count stored changes; a committed version becomes the one to train on."""
        for change in changes:
            self._statistics.on_changed(change)
            for assignment in change.assignments:
                self._training.track(assignment)
                if assignment.state in (AssignmentState.DROPPED, AssignmentState.REJECTED):
                    self._training.forget(assignment.key, assignment.client_id)
            attempt = change.attempt
            if attempt is None or attempt.is_open or attempt.key == self._settled:
                continue
            self._settled = attempt.key
            self._release_survivors(attempt.key)
            version = change.job.latest.version if change.version is not None else None
            self._statistics.on_attempt_ended(change.job, attempt, self._training.settle(attempt.key, version))

    def _release_survivors(self, key: AttemptKey) -> None:
        """Release the clients that still wait to be asked for their shares, or whose answer was not needed."""
        if self._steps is not None:
            for task in [task for task in self._tasks.values() if task.key == key and task.phase in _AFTER_REPORT]:
                self._training.drop(task)
                self._finish(task, failed=False)

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

    def _carry_out(self, command: Abort | Fold | NextStep | Restart | Commit | RunWarmStart | Abandon) -> None:
        match command:
            case Abort():
                self._abort(command)
            case Fold():
                if (failed := self._training.fold(command)) is not None:
                    self._queue.put(self.now, (self._record, failed))
            case NextStep():
                self._begin_step(command)
            case Restart():
                self._training.restart(command)
            case Commit():
                outcome = self._training.commit(command, self.job)
                self._queue.put(self.now, (self._record, outcome))
            case RunWarmStart():
                self._queue.put(self.now, (self._record, self._training.warm_start(command)))
            case Abandon():
                pass  # `settle` has discarded the updates of the attempt

    def _abort(self, command: Abort) -> None:
        task = self._tasks.get(int(command.client_id))
        if task is None or task.key != command.key:
            return  # the client is offline
        if command.reason in _TIMEOUTS:
            self._count_dropped(task)
        self._end(task)
        self._idle.on_finished(task.client, self.now, failed=False)

    def _end(self, task: DeviceAssignment) -> None:
        self._forget(task)
        self._training.drop(task)

    def _assign(self, assigns: Sequence[Assign]) -> None:
        until = self._idle.on_assigned(np.array([int(command.client_id) for command in assigns]))
        sizes = self._training.sizes
        if self._steps is not None:  # the first message of a client has its keys
            sizes = sizes._replace(update=float(KEYS_BYTES))
        tasks, bytes_down = self._planner.plan(assigns, self.now, until, sizes)
        for task, size in zip(tasks, bytes_down.tolist(), strict=True):
            self._statistics.on_assigned(task.key, self.now, size)
            self._tasks[task.client] = task
            if task.fails_at < min(task.gone_at, task.report_at):
                self._queue.put(task.fails_at, (self._fail, task))
                continue
            if task.gone_at < np.inf:
                self._queue.put(task.gone_at, (self._go_offline, task))
            if self._steps is not None and task.kind is AttemptKind.TRAIN:
                step = self._under_way[task.client] = self._steps.plan_first(task)
                self._queue.put(step.at, (self._take_step, step))
            elif task.begins_upload_at < np.inf:
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
