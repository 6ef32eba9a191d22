"""The steps of an assignment as calls to the server: each sends a message, or none, and waits for its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import backoff, cancellation, errors, task
from fedplat_client._auth.calls import Connection
from fedplat_client._work.failures import AssignmentFailedError

# A server that answers long polls at once would make a busy loop.
_MIN_POLL_S = 0.1


@dataclass(frozen=True)
class StepCalls:
    """Takes the steps of one assignment."""

    connection: Connection
    token: str
    control: task.Control

    def take(
        self,
        request: fleet_pb2.StepRequest,
        is_new: Callable[[fleet_pb2.StepResponse], bool] = lambda response: True,
        signal: cancellation.StopSignal | None = None,
    ) -> fleet_pb2.StepResponse:
        """Take a step until the server answers it; the same request again changes nothing.

        A response that is not new comes after a pause, so that it can be asked for again. Raises `Cancelled` if the
        assignment has ended or `signal` is set, and `AssignmentFailedError` if the server refuses the call.
        """
        control, signal = self.control, signal or self.control.signal
        request.token = self.token
        began = control.options.clock()
        try:
            response = backoff.retry(
                lambda: self.connection.step(request, signal),
                control.options,
                signal,
                recover=lambda exc: self._require_time(signal),
            )
        except errors.ServerUnavailableError:
            signal.check()  # without a limit of attempts, only the signal ends the retries
            raise
        except errors.CallRefusedError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the server refuses a step of the assignment: {exc}"
            ) from exc
        if response.HasField("refusal"):
            control.signal.set(cancellation.read_stop(response.refusal))
            control.signal.check()
        if not is_new(response) and (early_s := began + _MIN_POLL_S - control.options.clock()) > 0:
            control.options.wait(signal, early_s)
            signal.check()
        return response

    def _require_time(self, signal: cancellation.StopSignal) -> None:
        if self.control.remaining_s <= 0 and not self.control.may_be_late:
            self.control.expire()
        signal.check()
