"""The loop for one assignment: starts its half, and reports a failure.

The half of its kind of job (`fedplat_client._protocols`) gets the model, runs the trainer and reports.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fedplat import texts
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import cancellation, errors, spans, task
from fedplat_client._work import failures, training
from fedplat_client._work.work import AssignedWork, ClientHalf, ClientParts
from fedplat_client.backoff import Backoff

_TEXT_LIMIT = 500
_FAIL_ATTEMPTS = 3
_DEADLINES = frozenset({model_pb2.REASON_TRAIN_TIMEOUT, model_pb2.REASON_UPLOAD_TIMEOUT})
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssignmentWorker:
    """Runs one assignment after the other, each by its half."""

    parts: ClientParts
    find_half: Callable[[fleet_pb2.Assignment], ClientHalf]

    def run(self, assignment: fleet_pb2.Assignment) -> failures.CheckInResult:
        """Run an assignment until it ends, in success or failure. Raises `IdentityError` only."""
        parts, half = self.parts, self.find_half(assignment)
        control = task.Control(
            assignment.training_timeout_s, assignment.upload_timeout_s, parts.options, may_be_late=half.may_be_late
        )
        fields = _fields(assignment)
        span = functools.partial(spans.start, assignment.traceparent)
        work = AssignedWork(parts=parts, assignment=assignment, control=control, span=span, fields=fields)
        kind = "evaluation" if assignment.task == fleet_pb2.TASK_EVALUATE else "training"
        text = f"{kind} with {assignment.trainer} in round {assignment.round} of the job {assignment.job_name}"
        name = texts.printable(text)  # the server chooses the names
        _logger.info("The task started: %s.", name, extra=fields)
        try:
            with training.guard(control, "the client could not finish the task"):
                return half.run(work)
        except errors.Cancelled:
            stop = control.signal.stop
        except failures.AssignmentFailedError as exc:
            stop = control.signal.stop or cancellation.Stop(exc.reason, str(exc)[:_TEXT_LIMIT])
        except KeyboardInterrupt:
            parts.stop.set(cancellation.client_stopped())
            self._fail(assignment.token, cancellation.client_stopped(), control)
            raise
        assert stop is not None  # only a signal that is set raises Cancelled
        fields["reason"] = cancellation.reason_name(stop.reason)
        if stop.by_server:
            _logger.info("The server stopped the task (%s): %s", name, stop.text, extra=fields)
            return failures.CheckInResult(failed=stop.reason == model_pb2.REASON_REJECTED_MESSAGE, retry=stop.retry)
        _logger.warning("The task failed (%s): %s", name, stop.text, extra=fields)
        if stop.reason not in _DEADLINES:  # the server's deadline has passed already
            self._fail(assignment.token, stop, control)
        return failures.CheckInResult(failed=True)

    def _fail(self, token: str, stop: cancellation.Stop, control: task.Control) -> None:
        """Report a failure, unless the server knows it; best effort."""
        parts = self.parts
        backoff = Backoff(parts.options)
        for _ in range(_FAIL_ATTEMPTS):
            if control.is_given_back or failures.report_failure(parts.connection, token, stop):
                return
            if parts.options.wait(parts.stop, backoff.next_s()):
                return


def _fields(assignment: fleet_pb2.Assignment) -> dict[str, object]:
    fields: dict[str, object] = {
        "job": assignment.job_id,
        "round": assignment.round,
        "attempt": assignment.attempt,
        "job_name": assignment.job_name,
        "task": "evaluate" if assignment.task == fleet_pb2.TASK_EVALUATE else "train",
        "trainer": assignment.trainer,
    }
    trace_id = spans.read_trace_id(assignment.traceparent)
    return fields | {"trace_id": trace_id} if trace_id else fields
