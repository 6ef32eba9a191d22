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

import numpy as np

from fedplat.job import JobSpec
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
    OperatorCommand,
    TimerFired,
    UpdateRejected,
    UpdateReported,
)
from fedplat.rounds.states import AssignmentState, AttemptKind, JobStatus
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Always
from fedplat.simulation.clients.device import DeviceAssignment, Load, Planner
from fedplat.simulation.federated.interface import TrainingModel
from fedplat.simulation.protocols.base import COORDINATOR, PLANS, ClientWork, make_rng
from fedplat.simulation.protocols.registry import make_behaviours
from fedplat.simulation.recording.result import describe_end
from fedplat.simulation.recording.statistics import RunStatistics

Trace = Callable[[Sequence[Event], float, Proposal], None]
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
        self.coordinator = Coordinator([JobState(spec.name, spec, training.first_version())])
        self._spec, self._training, self._statistics, self._trace = spec, training, statistics, trace
        self._rng, self._tokens = coordinator_rng(seed), Tokens()
        self._deadline_at = np.inf
        self._work = ClientWork(self.coordinator, fleet, training, statistics, seed)
        self._behaviours = make_behaviours(self._work)
        self._planner = Planner(fleet, Load.from_config(spec.config), int(make_rng(seed, PLANS).integers(2**63)))
        self._failing_since = 0.0
        is_always = isinstance(fleet.availability, Always)
        self._patience_s = 2 * fleet.options.away_s + (0.0 if is_always else LONGEST_PERIOD_S)
        self._settled: AttemptKey | None = None

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._work.now

    @property
    def job(self) -> JobState:
        """The current state of the job."""
        return self._work.job

    def run(self, until_s: float) -> str:
        """Run until the job has ended or paused itself, or cannot progress, or until `until_s`.

        Return why it is still running then; empty if it is not.
        """
        self._process([OperatorCommand(self._spec.name, JobAction.START)])
        stopped = ""
        while self.job.status is JobStatus.RUNNING and not stopped:
            moment = min(self._deadline_at, self._work.next_action(), self._work.idle.next_batch())
            if moment > until_s:
                stopped = describe_end(until_s)
            elif moment == np.inf:
                stopped = f"no client ever checks in again; {self.job.reason or 'round 1 waits for clients'}"
            else:
                self._work.now = max(self.now, moment)
                self._step()
                stopped = self._describe_standstill()
        idle = self._work.idle
        self._statistics.check_ins, self._statistics.refused = idle.num_check_ins, idle.num_refused
        return stopped

    def _describe_standstill(self) -> str:
        """Return why no round can be expected any more; empty if one can.

        Clients that are offline may be back later, so the job waits for them.
        """
        failures = self._behaviours[AttemptKind.TRAIN].count_failures(self.job)
        if not failures:
            self._failing_since = self.now
        if failures < MAX_FAILURES or self.now - self._failing_since < self._patience_s:
            return ""
        last = self.job.attempt
        assert last is not None
        place = f"round {last.key.round} attempt {last.key.number}"
        reason = last.reason or self.job.reason
        return f"no progress after {failures} failed attempts in a row; the last one: {place}: {reason}"

    def _step(self) -> None:
        """Process everything due now: first check-ins and departures, then clients at work, then the deadline."""
        events = self._work.idle.events(self.now)
        for event in self._work.act():
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

    def _record(self, event: Event) -> Event:
        return event

    def _deliver_verdicts(self, events: Sequence[Event], verdicts: Sequence[Verdict]) -> None:
        """Answer messages, reports and failures. A client is idle again after its last one, or if it was refused."""
        of_training = self._behaviours[AttemptKind.TRAIN]
        for event, verdict in zip(events, verdicts, strict=True):
            if isinstance(event, UpdateReported | UpdateRejected | AssignmentFailed):
                task = self._work.tasks[int(event.client_id)]
                accepted, behaviour = (
                    isinstance(event, UpdateReported) and verdict.accepted,
                    self._behaviours[task.kind],
                )
                if not accepted:
                    behaviour.on_lost(task)
                if not accepted or behaviour.on_reported(task):
                    behaviour.finish(task, failed=not accepted)
            elif isinstance(event, of_training.answers):
                of_training.on_answered(event, verdict)

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
            self._behaviours[attempt.kind].on_attempt_ended(change.job, attempt)
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
            self._work.idle.on_refused(refusals, self.now)
        if assigns:
            self._assign(assigns)

    def _carry_out(self, command: Abort | Fold | NextStep | Restart | Commit | RunWarmStart | Abandon) -> None:
        match command:
            case Abort():
                task = self._work.tasks.get(int(command.client_id))
                if task is not None and task.key == command.key:  # else the client is offline
                    self._behaviours[task.kind].stop(task, command)
            case Fold():
                if (failed := self._training.fold(command)) is not None:
                    self._work.schedule(self.now, self._record, failed)
            case NextStep():
                self._behaviours[AttemptKind.TRAIN].on_next_step(command)
            case Restart():
                self._training.restart(command)
            case Commit():
                outcome = self._training.commit(command, self.job)
                self._work.schedule(self.now, self._record, outcome)
            case RunWarmStart():
                self._work.schedule(self.now, self._record, self._training.warm_start(command))
            case Abandon():
                pass  # `settle` has discarded the updates of the attempt

    def _assign(self, assigns: Sequence[Assign]) -> None:
        until = self._work.idle.on_assigned(np.array([int(command.client_id) for command in assigns]))
        sizes = self._behaviours[AttemptKind.TRAIN].first_sizes(assigns[0].key.round)
        tasks, bytes_down = self._planner.plan(assigns, self.now, until, sizes)
        for task, size in zip(tasks, bytes_down.tolist(), strict=True):
            self._statistics.on_assigned(task.key, self.now, size)
            self._work.tasks[task.client] = task
        for kind, group in itertools.groupby(tasks, key=lambda task: task.kind):
            self._behaviours[kind].begin([*group])
        self._training.expect(self._select_useful(tasks))

    def _select_useful(self, tasks: Sequence[DeviceAssignment]) -> list[DeviceAssignment]:
        """Return the tasks whose reports should arrive in time and before the goal is reached, as predicted now."""
        attempt = self.job.attempt
        assert attempt is not None
        in_time = sorted((task for task in tasks if task.in_time), key=lambda task: task.report_at)
        return in_time[: attempt.goal] if self._behaviours[AttemptKind.TRAIN].has_surplus else in_time


def coordinator_rng(seed: int) -> np.random.Generator:
    """Return the generator of the coordinator's randomness."""
    return make_rng(seed, COORDINATOR)
