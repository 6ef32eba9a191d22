"""Clients at work in virtual time, and what they do one after the other: a behaviour for each kind of job.

`ClientBehaviour` itself is that of averaging: a client trains, uploads if its update is large, and reports. As in the
SDK, a client checks in again at once when its work is over, or after a back-off if it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedplat.rounds import Attempt, Coordinator, JobState, Verdict, commands, states
from fedplat.rounds.events import AssignmentFailed, Event, UploadStarted
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.clients.idle import EventQueue, IdleClients
from fedplat.simulation.federated.interface import TrainingModel
from fedplat.simulation.recording.statistics import RunStatistics

PLANS, COORDINATOR, CLIENTS, DROP_OUTS = range(1, 5)
"""The purposes of random numbers."""
Action = Callable[[Any], Event | None]


def make_rng(seed: int, purpose: int) -> np.random.Generator:
    """Return the generator of a simulation for a purpose."""
    return np.random.default_rng(np.random.SeedSequence([seed, purpose]))


class ClientWork:
    """The clients of a job that are at work, by their numbers, and the actions that they have planned."""

    def __init__(
        self, coordinator: Coordinator, fleet: Fleet, training: TrainingModel, statistics: RunStatistics, seed: int
    ) -> None:
        self.now = 0.0
        (self._job_id,) = coordinator.jobs
        self.spec, self._coordinator = coordinator.jobs[self._job_id].spec, coordinator
        self.fleet, self.training, self.statistics, self.seed = fleet, training, statistics, seed
        self.idle = IdleClients(fleet, self.spec, make_rng(seed, CLIENTS))
        self.tasks: dict[int, DeviceAssignment] = {}
        self._queue: EventQueue[tuple[Action, Any]] = EventQueue()

    @property
    def job(self) -> JobState:
        """The current state of the job."""
        return self._coordinator.jobs[self._job_id]

    def schedule(self, at: float, action: Action, subject: object) -> None:
        """Plan an action: a function of `subject` that returns its event, if it still has one."""
        self._queue.put(at, (action, subject))

    def next_action(self) -> float:
        """Return the moment of the next action; infinite without one."""
        return self._queue.first()

    def act(self) -> Iterator[Event]:
        """Carry out the actions up to now; yields their events."""
        for action, subject in self._queue.due(self.now):
            if (event := action(subject)) is not None:
                yield event

    def forget(self, task: DeviceAssignment) -> None:
        """Remove an assignment: its client does not work on it any more."""
        task.is_over = True
        del self.tasks[task.client]


class ClientBehaviour:
    """What clients do over time; `answers` are the events whose verdicts `on_answered` gets."""

    answers: tuple[type[Any], ...] = ()
    has_surplus = True
    """True if a report that arrives after the goal is reached does not count."""

    def __init__(self, work: ClientWork) -> None:
        self.work = work

    def first_sizes(self, round: int) -> Sizes:
        """Return the sizes of the transfers up to a client's first message after its training."""
        training = self.work.training
        return training.sizes._replace(update=training.update_bytes(round))

    def begin(self, tasks: Sequence[DeviceAssignment]) -> None:
        """Begin new assignments, which clients have got now."""
        for task in tasks:
            if task.fails_at < min(task.gone_at, task.report_at):
                self.work.schedule(task.fails_at, self._fail, task)
                continue
            if task.gone_at < np.inf:
                self.work.schedule(task.gone_at, self.go_offline, task)
            self.plan_first(task)

    def plan_first(self, task: DeviceAssignment) -> None:
        """Plan the first message of a client after its training: its report, or the upload before."""
        self.plan_report(task, task.begins_upload_at)

    def plan_report(self, task: DeviceAssignment, uploads_at: float) -> None:
        """Plan a report, and before it the upload if it begins at a finite moment."""
        if uploads_at < np.inf:
            self.work.schedule(uploads_at, self._upload, task)
        else:
            self.work.schedule(task.report_at, self._report, task)

    def on_next_step(self, command: commands.NextStep) -> None:
        """Plan what clients do in the phase that their attempt has begun."""
        raise AssertionError(command)

    def on_reported(self, task: DeviceAssignment) -> bool:
        """Process an accepted report; returns whether the client's work is over."""
        return True

    def on_answered(self, event: Any, verdict: Verdict) -> None:
        """Process the verdict on one of the events in `answers`."""
        raise AssertionError(event)

    def on_lost(self, task: DeviceAssignment) -> None:
        """Process the end of work without a report: the client failed, was refused, went offline or was late."""
        self.work.training.drop(task)

    def on_attempt_ended(self, job: JobState, attempt: Attempt) -> None:
        """Release clients that an attempt had after their reports; its statistics are recorded next."""

    def count_failures(self, job: JobState) -> int:
        """Return how many attempts, or phases of one, have failed in a row."""
        return job.failures

    def stop(self, task: DeviceAssignment, command: commands.Abort) -> None:
        """Stop a client whose assignment has ended."""
        self.work.forget(task)
        self.work.training.drop(task)
        self.work.idle.on_finished(task.client, self.work.now, failed=False)

    def go_offline(self, task: DeviceAssignment) -> None:
        """Take a client offline without a report; when it is back, it reclaims its assignment if that is still open."""
        if not task.is_over:
            self.work.statistics.lost += 1
            self.work.forget(task)
            self.on_lost(task)
            self.work.idle.schedule_check_ins(np.array([task.client]), np.array([task.returns_at]))

    def finish(self, task: DeviceAssignment, *, failed: bool) -> None:
        """Make a client idle again, whose work is over."""
        self.work.forget(task)
        self.work.idle.on_finished(task.client, self.work.now, failed=failed)

    def _upload(self, task: DeviceAssignment) -> Event | None:
        if task.is_over:
            return None
        self.work.schedule(task.report_at, self._report, task)
        return UploadStarted(task.key, task.client_id)

    def _report(self, task: DeviceAssignment) -> Event | None:
        return None if task.is_over else self.work.training.report(task)

    def _fail(self, task: DeviceAssignment) -> Event | None:
        if task.is_over:
            return None
        return AssignmentFailed(task.key, task.client_id, states.Reason.TRAINER_ERROR, "a simulated failure")
