"""The steps of a silo, and the watch that ends the work of a phase when the phase is over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator

from fedplat.gossip import steps
from fedplat.gossip.steps import Progress, SiloMessage, SiloReport, SiloStep
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, gossip_pb2, model_pb2
from fedplat_client import cancellation, errors, task
from fedplat_client._work.heartbeat import AssignmentFailedError, StepCalls

_PATIENCE = 0.8
"""The part of a phase's time after which a silo gives up, so that the server gets its report before the phase ends."""
_MIN_PHASE_S = 1.0
_LONG_S = 3600.0
_OVER = cancellation.Stop(model_pb2.REASON_UNSPECIFIED, "the phase is over")


class SiloCalls:
    """Takes the steps of a silo in one assignment. `done` returns what the silo has done."""

    def __init__(self, calls: StepCalls, done: Callable[[], Progress]) -> None:
        self._calls = calls
        self._done = done
        self.control = calls.control

    def take(
        self,
        report: SiloReport | None = None,
        *,
        wait_s: float = 0.0,
        known: str = "",
        signal: cancellation.StopSignal | None = None,
    ) -> SiloStep:
        """Report what the silo has done, if anything, and return what to do: at once, or once there is something.

        Waits at most `wait_s`: until there is something to do, or while the phase is the `known` one. Raises as
        `StepCalls.take` does, and `AssignmentFailedError` for another answer.
        """
        message = SiloMessage(done=self._done(), known=known, report=report)
        request = fleet_pb2.StepRequest(wait_s=wait_s, gossip=messages.to_message(gossip_pb2.SiloMessage, message))
        response = self._calls.take(request, lambda response: response.gossip.known != known, signal)
        try:
            return messages.to_record(response.gossip, SiloStep, steps.MAX_STEP_BYTES)
        except ValueError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the server's step is not usable: {exc}"
            ) from exc

    def wait(self, step: SiloStep, signal: cancellation.StopSignal | None = None) -> SiloStep:
        """Wait until the phase of a step is over, at most for the time of a long poll; return what to do then."""
        return self.take(wait_s=self.control.options.check_in_wait_s, known=step.known, signal=signal)


@contextlib.contextmanager
def limit_time(control: task.Control, seconds: float) -> Generator[task.Control]:
    """Yield a control for a part of the work of another one, which stops with it."""
    part = task.Control(seconds, 0.0, control.options)
    with control.signal.attach(lambda: part.signal.set(control.signal.stop or _OVER)):
        yield part


class PhaseWatch:
    """Asks the server in a thread whether the phase of a step is over, within a `with` block.

    `phase` has the time for the work in the block, and its signal is set when the phase is over, or the assignment.
    Afterwards `following` is what to do then, if the server has said so.
    """

    def __init__(self, calls: SiloCalls, step: SiloStep) -> None:
        options = calls.control.options
        self.phase = task.Control(max(_PATIENCE * step.remaining_s, _MIN_PHASE_S), 0.0, options)
        self.following: SiloStep | None = None
        self._calls = calls
        self._step = step
        self._ended = cancellation.StopSignal()
        self._stack = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, name="fedplat-phase", daemon=True)

    def __enter__(self) -> PhaseWatch:
        self._stack.enter_context(self._calls.control.signal.attach(self._end))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._thread.join()
        self._stack.close()

    def wait(self) -> None:
        """Wait until the phase is over."""
        while not self.phase.signal.wait(_LONG_S):
            pass

    def _end(self) -> None:
        self._ended.set(_OVER)
        self.phase.signal.set(_OVER)

    def _run(self) -> None:
        try:
            following = self._step
            while following.known == self._step.known:
                following = self._calls.wait(self._step, self._ended)
            self.following = following
        except errors.ClientError:
            pass  # the next call gets the same answer
        finally:
            self.phase.signal.set(_OVER)
