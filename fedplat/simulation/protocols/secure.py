"""The clients of a secure aggregation: after the training they send keys, shares, a masked update and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from typing_extensions import override

from fedplat.job.secure import num_groups
from fedplat.rounds import Attempt, AttemptKey, JobState, Verdict
from fedplat.rounds.commands import Abort, NextStep
from fedplat.rounds.events import Event, KeysAdvertised, MasksAnswered, SharesSent, SurvivorsConfirmed
from fedplat.rounds.states import AttemptPhase, Reason
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.protocols.base import DROP_OUTS, ClientBehaviour, ClientWork, make_rng
from fedplat.simulation.secure import groups, sums

_EVENTS: Mapping[AttemptPhase, Callable[[AttemptKey, str, bytes], Event]] = {
    AttemptPhase.ADVERTISING: KeysAdvertised,
    AttemptPhase.SHARING: SharesSent,
    AttemptPhase.CONFIRMING: SurvivorsConfirmed,
    AttemptPhase.UNMASKING: MasksAnswered,
}
_Message = KeysAdvertised | SharesSent | SurvivorsConfirmed | MasksAnswered
_AFTER_REPORT = (AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING)
_TIMEOUTS = (Reason.TRAIN_TIMEOUT, Reason.STEP_TIMEOUT, Reason.UPLOAD_TIMEOUT)


class SecureBehaviour(ClientBehaviour):
    """Clients that take a step in each phase of their attempt; `_under_way` has the step of each client."""

    answers = (KeysAdvertised, SharesSent, SurvivorsConfirmed, MasksAnswered)

    def __init__(self, work: ClientWork) -> None:
        super().__init__(work)
        drop_outs = int(make_rng(work.seed, DROP_OUTS).integers(2**63))
        self._steps = sums.StepPlanner(work.spec, work.fleet, work.training.num_entries, drop_outs)
        self._under_way: dict[int, sums.SecureStep] = {}

    @override
    def first_sizes(self, round: int) -> Sizes:
        return self.work.training.sizes._replace(update=float(groups.KEYS_BYTES))  # the first message has the keys

    @override
    def plan_first(self, task: DeviceAssignment) -> None:
        step = self._under_way[task.client] = self._steps.plan_first(task)
        self.work.schedule(step.at, self._take_step, step)

    @override
    def on_next_step(self, command: NextStep) -> None:
        attempt = self.work.job.attempt
        assert attempt is not None
        if (attempt.key, attempt.phase) != (command.key, command.phase):
            return  # another event of the batch has ended the attempt
        self.work.training.begin_step(attempt)
        if attempt.phase is AttemptPhase.UNMASKING:
            self.work.statistics.on_unmasking(num_groups(self.work.spec), self._steps.server_s(attempt))
        for step in self._steps.plan(attempt, self.work.tasks, self.work.now):
            self._plan(step)

    def _plan(self, step: sums.SecureStep) -> None:
        task = step.task
        task.phase, self._under_way[task.client] = step.phase, step
        if step.gone_at < np.inf:
            task.returns_at = min(task.returns_at, step.gone_at + self.work.fleet.options.away_s)
            self.work.schedule(step.gone_at, self.go_offline, task)
        if step.phase is AttemptPhase.COLLECTING:
            task.report_at = step.at
            self.plan_report(task, step.uploads_at)
        else:
            self.work.schedule(step.at, self._take_step, step)

    def _take_step(self, step: sums.SecureStep) -> Event | None:
        task = step.task
        if task.is_over or self._under_way.get(task.client) is not step:  # a later phase has begun meanwhile
            return None
        return _EVENTS[step.phase](task.key, task.client_id, self.work.training.take_step(task))

    @override
    def on_reported(self, task: DeviceAssignment) -> bool:
        task.client_task = None  # the update is with the server, while the client still has to answer
        self._complete(self._under_way[task.client])
        return False

    @override
    def on_answered(self, event: _Message, verdict: Verdict) -> None:
        step = self._under_way[int(event.client_id)]
        if verdict.accepted:
            self._complete(step)
        elif step.phase is not AttemptPhase.CONFIRMING:  # else it still has to answer
            self.work.training.drop(step.task)
            self.finish(step.task, failed=False)

    def _complete(self, step: sums.SecureStep) -> None:
        self.work.statistics.on_step(step)
        del self._under_way[step.task.client]
        if step.phase is AttemptPhase.UNMASKING:
            self.finish(step.task, failed=False)
        else:
            step.task.phase = self._steps.phase_after(step.phase)

    @override
    def on_lost(self, task: DeviceAssignment) -> None:
        self.work.statistics.on_dropped(task)
        super().on_lost(task)

    @override
    def stop(self, task: DeviceAssignment, command: Abort) -> None:
        if command.reason in _TIMEOUTS:
            self.work.statistics.on_dropped(task)
        super().stop(task, command)

    @override
    def on_attempt_ended(self, job: JobState, attempt: Attempt) -> None:
        """Release the clients that still wait to be asked for their shares, or whose answer was not needed."""
        waiting = [each for each in self.work.tasks.values() if each.key == attempt.key and each.phase in _AFTER_REPORT]
        for task in waiting:
            self.work.training.drop(task)
            self.finish(task, failed=False)
