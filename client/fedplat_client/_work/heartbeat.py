"""What is said to the server within an assignment: heartbeats, steps, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import backoff, cancellation, errors, task
from fedplat_client._auth.authenticator import Connection
from fedplat_client.backoff import Backoff
from fedplat_client.cancellation import Stop, StopSignal, read_stop

# An interval of 0 from the server would make a busy loop.
_MIN_HEARTBEAT_S = 0.1
# A task that ends within this time sends no heartbeat: it would be a third of the task's calls.
_FIRST_HEARTBEAT_S = 0.25
_RETURN_S = 5.0
"""How long a trainer may take to return after its task has been stopped, before the log has a warning."""
_TASK_OVER = Stop(model_pb2.REASON_UNSPECIFIED, "the task is over")
_logger = logging.getLogger(__name__)


class Heartbeat:
    """Runs within a `with` block, from receiving an assignment to the end of its upload.

    Sets the task's deadline to the server's. Sets the task's stop signal when the server orders a stop, or when the
    deadline passes, even if the server is unreachable; a task that may be late continues, as do the heartbeats, by
    which the server knows that the client is there. Leaving the block cancels the call in flight and joins the thread.

    A trainer may not return for long after the task has been stopped, and nothing can end it. So the thread tells the
    server at once that the owner has stopped the client, and the log what the client waits for; and its heartbeats
    continue, so that operators see that the client is there.
    """

    def __init__(self, connection: Connection, token: str, heartbeat_s: float, control: task.Control) -> None:
        self._connection = connection
        self._token = token
        self._heartbeat_s = max(heartbeat_s, _MIN_HEARTBEAT_S)
        self._control = control
        self._ended = StopSignal()  # the task is stopped or over
        self._over = StopSignal()  # the block is left
        self._thread = threading.Thread(target=self._run, name="fedplat-heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set(_TASK_OVER)
        self._end()
        self._thread.join()

    def _end(self) -> None:
        self._ended.set(_TASK_OVER)

    def _run(self) -> None:
        self._accompany()
        stop = self._control.signal.stop
        if stop is not None and not self._over.is_set():
            self._wait_for_return(stop)

    def _wait_for_return(self, stop: Stop) -> None:
        """Wait for the end of a task that has been stopped."""
        if stop.reason == model_pb2.REASON_CLIENT_STOPPED:
            self._control.is_given_back = report_failure(self._connection, self._token, stop)
            _logger.info(
                "The task is given back to the server; the client ends when its trainer returns, and a second signal "
                "ends it at once."
            )
        if self._over.wait(min(self._heartbeat_s, _RETURN_S)):
            return
        _logger.warning(
            "The task has ended (%s), but its trainer has not returned; the client takes no other task until it does.",
            stop.text,
        )
        request = fleet_pb2.HeartbeatRequest(token=self._token, progress=self._control.fraction)
        while True:
            try:
                self._connection.heartbeat(request, self._over)
            except errors.Cancelled:
                return
            except errors.CallError as exc:
                _logger.debug("A heartbeat failed: %s", exc)
            if self._over.wait(self._heartbeat_s):
                return

    def _accompany(self) -> None:
        """Send heartbeats until the task is stopped or over."""
        backoff, answered = Backoff(self._control.options), True
        with self._control.signal.attach(self._end):
            self._ended.wait(_FIRST_HEARTBEAT_S)
            while not self._ended.is_set():
                remaining_s = self._heartbeat_s if self._control.may_be_late else self._control.remaining_s
                if remaining_s <= 0:
                    self._control.expire()
                    return
                try:
                    # After a failure the server may have restarted with another deadline: request an answer at once.
                    self._beat(min(self._heartbeat_s, remaining_s) if answered else 0.0)
                    answered = True
                    backoff.reset()
                except errors.Cancelled:
                    return
                except errors.IdentityError as exc:
                    # The next check-in gets the same error, which ends the client.
                    self._control.signal.set(Stop(model_pb2.REASON_REVOKED, str(exc), by_server=True))
                    return
                except errors.CallError as exc:
                    answered = False
                    _logger.debug("A heartbeat failed: %s", exc)
                    self._control.options.wait(self._ended, min(backoff.next_s(exc.retry), remaining_s))

    def _beat(self, wait_s: float) -> None:
        request = fleet_pb2.HeartbeatRequest(token=self._token, progress=self._control.fraction, wait_s=wait_s)
        response = self._connection.heartbeat(request, self._ended)
        if response.HasField("stop"):
            self._control.handle_stop(read_stop(response.stop))
            self._ended.wait(self._heartbeat_s)  # the server answers at once from now on
        elif response.HasField("proceed"):
            proceed = response.proceed
            self._control.adjust(proceed.remaining_s, uploading=proceed.uploading)


_FAIL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CheckInResult:
    """The outcome of a check-in or an assignment: whether to back off, and the server's retry window if it sent one.

    `next` is the assignment that a report was answered with; `left`: the task continues outside of this process.
    """

    failed: bool
    retry: model_pb2.RetryWindow | None = None
    next: fleet_pb2.Assignment | None = None
    left: bool = False

    @property
    def outcome(self) -> task.TaskOutcome:
        """The outcome of the assignment, for who runs the client."""
        if self.left:
            return task.TaskOutcome.LEFT
        return task.TaskOutcome.FAILED if self.failed else task.TaskOutcome.DONE


class AssignmentFailedError(errors.ClientError):
    """The client gives up the assignment; `reason` is reported to the server."""

    def __init__(self, reason: model_pb2.Reason.ValueType, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def report_failure(connection: Connection, token: str, stop: cancellation.Stop) -> bool:
    """Tell the server that the client gives up an assignment, so that it need not wait for the deadline.

    Return False if the server does not answer.
    """
    request = fleet_pb2.FailRequest(token=token, reason=stop.reason, text=stop.text)
    try:
        connection.fail(request, _FAIL_TIMEOUT_S)
    except errors.ServerUnavailableError as exc:
        _logger.debug("The failure could not be reported: %s", exc)
        return False
    except errors.CallError as exc:  # also of a revoked client, whose next check-in gets the same error
        _logger.warning("The server refused the report of a failure: %s", exc)
    return True


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


def read_refusal(reply: fleet_pb2.CheckInResponse) -> CheckInResult:
    """Convert a check-in without an assignment; if the server names no retry window, the client backs off."""
    refusal = reply.refusal
    _logger.debug("No assignment: %s", refusal.text, extra={"reason": cancellation.reason_name(refusal.reason)})
    if refusal.HasField("retry"):
        return CheckInResult(failed=False, retry=refusal.retry)
    return CheckInResult(failed=True)
