"""A scripted server of a decentralised job: its instructions, phase after phase, for one silo."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import TypeAlias

from fedplat.gossip import steps
from fedplat.gossip.steps import Contact, Instruction, SiloMessage, SiloReport
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, gossip_pb2
from fedplat_client.cancellation import StopSignal

Until: TypeAlias = Callable[["Script"], bool]


def mixed(round_number: int) -> Until:
    return lambda script: script.requests[-1].done.mixed_round >= round_number


def adopted(round_number: int) -> Until:
    return lambda script: script.requests[-1].done.adopted_round >= round_number


def after(number: int) -> Until:
    return lambda script: script.num_reports >= number


_AFTER_A_MESSAGE = after(1)


@dataclasses.dataclass
class Phase:
    """An instruction, and when the next phase begins: by default after one more message."""

    instruction: Instruction
    until: Until = _AFTER_A_MESSAGE
    model_receivers: tuple[Contact, ...] = ()
    mean_receivers: tuple[Contact, ...] = ()


class Script:
    """The server's answers, phase after phase; `reports` are those of the silo."""

    def __init__(self, *phases: Phase | Instruction, phase_s: float = 60.0) -> None:
        self.phases = [each if isinstance(each, Phase) else Phase(each) for each in phases]
        self.requests: list[SiloMessage] = []
        self.reports: list[SiloReport] = []
        self.num_reports = 0
        self._phase_s = phase_s
        self._position = 0
        self.changed = threading.Condition()

    def step(self, request: fleet_pb2.StepRequest, signal: StopSignal) -> fleet_pb2.StepResponse:
        message = messages.to_record(request.gossip, SiloMessage, steps.MAX_MESSAGE_BYTES)
        with self.changed, signal.attach(self._notify):
            self.requests.append(message)
            if message.report is not None:
                self.reports.append(message.report)
                self.num_reports += 1
            self._advance()
            while message.known == self._known and request.wait_s and not signal.is_set():
                self.changed.wait()
                self._advance()
            signal.check()
            phase = self.phases[self._position]
            step = steps.SiloStep(
                instruction=phase.instruction,
                known=self._known,
                round=1,
                remaining_s=self._phase_s,
                model_receivers=phase.model_receivers,
                mean_receivers=phase.mean_receivers,
            )
        return fleet_pb2.StepResponse(gossip=messages.to_message(gossip_pb2.SiloStep, step))

    @property
    def progress(self) -> tuple[int, int]:
        """What the silo said last that it has mixed and adopted."""
        return self.requests[-1].done.mixed_round, self.requests[-1].done.adopted_round

    @property
    def _known(self) -> str:
        return f"phase-{self._position}"

    def _advance(self) -> None:
        if self._position + 1 < len(self.phases) and self.phases[self._position].until(self):
            self._position, self.num_reports = self._position + 1, 0
            self.changed.notify_all()

    def _notify(self) -> None:
        threading.Thread(target=self._wake, daemon=True).start()  # the caller may be in a call of this script

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
