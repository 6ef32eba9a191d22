"""Run one assignment: get the model, run the trainer, send the update, report."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedplat import texts
from fedplat.client_state import ClientState
from fedplat.codecs.container import Format
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import spans
from fedplat_client._auth.calls import Connection
from fedplat_client._state.client_state import ClientStateStore
from fedplat_client._state.keys import SigningKey
from fedplat_client._state.residuals import Residuals
from fedplat_client._state.served_attempts import ServedAttempts
from fedplat_client._state.two_phase import SentReport, WasMerged
from fedplat_client._work import encoding, transfer
from fedplat_client._work.failures import AssignmentFailedError, CheckInResult, report_failure
from fedplat_client._work.heartbeat import Heartbeat
from fedplat_client._work.merge_check import make_merge_check
from fedplat_client._work.model_download import Downloader
from fedplat_client._work.training import LocalTrainers, fit_model, guard, read_config, stage_client_state
from fedplat_client._work.transfer import Content
from fedplat_client.backoff import Backoff, retry
from fedplat_client.cancellation import Stop, StopSignal, client_stopped, reason_name
from fedplat_client.errors import (
    CallRefusedError,
    Cancelled,
    ServerUnavailableError,
    TransferError,
)
from fedplat_client.options import ClientOptions
from fedplat_client.task import Control, EvaluateResult, Scalar, Task, TrainResult

if TYPE_CHECKING:  # loaded for the first job that needs them
    from fedplat_client._work.secure import SecureExchange
    from fedplat_client._work.silos.worker import SiloWorker

_TEXT_LIMIT = 500
_FAIL_ATTEMPTS = 3
_DEADLINES = frozenset({model_pb2.REASON_TRAIN_TIMEOUT, model_pb2.REASON_UPLOAD_TIMEOUT})
# The answer to a report when a crash of the server has lost the end of the upload.
_BYTES_MISSING = "ABORTED"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AssignmentWorker:
    """Runs one assignment after the other; `stop` is the client's own signal."""

    connection: Connection
    downloader: Downloader
    residuals: Residuals
    client_states: ClientStateStore
    served: ServedAttempts
    trainers: LocalTrainers
    open_silos: Callable[[], SiloWorker]
    options: ClientOptions
    stop: StopSignal
    key: SigningKey

    def run(self, assignment: fleet_pb2.Assignment) -> CheckInResult:
        """Run an assignment until it ends, in success or failure. Raises `IdentityError` only."""
        is_silo = bool(assignment.exchange_setup)
        control = Control(assignment.training_timeout_s, assignment.upload_timeout_s, self.options, may_be_late=is_silo)
        fields = _fields(assignment)
        span = functools.partial(spans.start, assignment.traceparent)
        name = _describe(assignment)
        _logger.info("The task started: %s.", name, extra=fields)
        try:
            with guard(control, "the client could not finish the task"):
                if is_silo:
                    with self._stoppable(control):
                        return self.open_silos().run(assignment, control, span, fields)
                return self._run_alone(assignment, control, span, fields)
        except Cancelled:
            stop = control.signal.stop
        except AssignmentFailedError as exc:
            stop = control.signal.stop or Stop(exc.reason, str(exc)[:_TEXT_LIMIT])
        except KeyboardInterrupt:
            self.stop.set(client_stopped())
            self._fail(assignment.token, client_stopped(), control)
            raise
        assert stop is not None  # only a signal that is set raises Cancelled
        fields["reason"] = reason_name(stop.reason)
        if stop.by_server:
            _logger.info("The server stopped the task (%s): %s", name, stop.text, extra=fields)
            return CheckInResult(failed=stop.reason == model_pb2.REASON_REJECTED_MESSAGE, retry=stop.retry)
        _logger.warning("The task failed (%s): %s", name, stop.text, extra=fields)
        if stop.reason not in _DEADLINES:  # the server's deadline has passed already
            self._fail(assignment.token, stop, control)
        return CheckInResult(failed=True)

    def _run_alone(
        self, assignment: fleet_pb2.Assignment, control: Control, span: spans.Start, fields: Mapping[str, object]
    ) -> CheckInResult:
        """Run an assignment of a job with a server, rather than a decentralised one."""
        config = read_config(assignment)
        exchange = self._open_exchange(assignment, config, control)
        request, content = self._produce(assignment, exchange, control, span)
        with span("report"):
            outcome = self._report(request, content, control, fields)
        if exchange is not None and not outcome.failed:
            del request, content  # the update is at the server; the other clients may take long
            with span("unmask"), self._stoppable(control):
                exchange.unmask()
        return outcome

    def _open_exchange(
        self, assignment: fleet_pb2.Assignment, config: Mapping[str, Scalar], control: Control
    ) -> SecureExchange | None:
        """Return the client's part in the secure aggregation of a training; None if the assignment has none.

        Raises `AssignmentFailedError` if the client's owner does not allow the assignment.
        """
        if assignment.task == fleet_pb2.TASK_EVALUATE:
            return None
        if assignment.secure_setup:
            from fedplat_client._work import secure

            return secure.open_exchange(assignment, config, self.key, self.served, self.connection, control)
        if self.options.require_secure_aggregation or self.options.requires_noise:
            raise AssignmentFailedError(
                model_pb2.REASON_UNSAFE_AGGREGATION,
                "the owner of this client allows training only with secure aggregation; the job has none",
            )
        return None

    def _produce(
        self, assignment: fleet_pb2.Assignment, exchange: SecureExchange | None, control: Control, span: spans.Start
    ) -> tuple[fleet_pb2.ReportRequest, Content | None]:
        """Do everything up to the report, with heartbeats."""
        heartbeat = Heartbeat(self.connection, assignment.token, assignment.heartbeat_s, control)
        with self._stoppable(control), heartbeat:
            request, content, client_state = self._compute(assignment, exchange, control, span)
            if exchange is not None:
                control.trained = True
                with span("share"):
                    content = exchange.mask()
            if content is not None:
                control.trained = True
                report = SentReport(assignment.token, content.digest)
                stage_client_state(self.client_states, assignment.job_id, report, client_state, control)
                with span("upload"):
                    self._attach_update(request, content, control)
        control.signal.check()
        return request, content

    def _compute(
        self, assignment: fleet_pb2.Assignment, exchange: SecureExchange | None, control: Control, span: spans.Start
    ) -> tuple[fleet_pb2.ReportRequest, Content | None, ClientState]:
        """Run the trainer or the evaluator.

        With an `exchange`, it has the update afterwards, and the copies of the model are freed when this returns.
        """
        run = self._function(assignment)
        encoding.read_codec(assignment, self.trainers.plugins)  # fail before the training if the codec is unknown
        with span("download"):
            base, working = self.downloader.load(assignment, control)
        if exchange is not None:
            exchange.check_model(base)
        merged = make_merge_check(self.connection, self.options, control)
        training = assignment.task != fleet_pb2.TASK_EVALUATE
        client_state = self._open_client_state(assignment.job_id, merged, training=training)
        with span("train" if training else "evaluate"):
            result = run(self.trainers.make_task(assignment, working, client_state, control))
        request = fleet_pb2.ReportRequest(
            token=assignment.token, num_examples=result.num_examples, metrics=result.metrics
        )
        if not isinstance(result, TrainResult):
            return request, None, client_state
        if exchange is None:
            return request, self._content(assignment, result, base, merged, control), client_state
        exchange.encode(fit_model(control, lambda: result.to_update(base)), result)
        # The number of examples and the metrics are part of the masked vector.
        return fleet_pb2.ReportRequest(token=assignment.token, num_examples=1), None, client_state

    def _stoppable(self, control: Control) -> contextlib.AbstractContextManager[None]:
        """Stop the task if the client is stopped within the block."""
        return self.stop.attach(lambda: control.signal.set(client_stopped()))

    def _function(self, assignment: fleet_pb2.Assignment) -> Callable[[Task], TrainResult | EvaluateResult]:
        if assignment.task == fleet_pb2.TASK_EVALUATE:
            return self.trainers.find_evaluator(assignment.trainer)
        return self.trainers.find_trainer(assignment.trainer)

    def _content(
        self,
        assignment: fleet_pb2.Assignment,
        result: TrainResult,
        base: Parameters,
        merged: WasMerged,
        control: Control,
    ) -> Content:
        """Return the bytes to send: the update, encoded if the job has a codec."""
        codec = encoding.read_codec(assignment, self.trainers.plugins)
        if codec is None:
            return Content(fit_model(control, lambda: result.to_pieces(base)))
        update = fit_model(control, lambda: result.to_update(base))
        seed = self.options.rng.getrandbits(128)
        with guard(control, "the trainer's result cannot be encoded"):
            return encoding.encode(assignment, update, Format(codec, base.schema), seed, self.residuals, merged)

    def _open_client_state(self, job_id: str, merged: WasMerged, *, training: bool) -> ClientState:
        """Return the client state of a job; its files are unchanged until the server reports which is valid."""
        try:
            return self.client_states.open(job_id, merged, training=training)
        except ServerUnavailableError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED,
                f"the server did not report whether it has merged the last update, and so which client state is valid: "
                f"{exc}",
            ) from exc

    def _attach_update(self, request: fleet_pb2.ReportRequest, content: Content, control: Control) -> None:
        """Upload the update, or put a small one into the report."""
        request.digest = content.digest
        if content.size_bytes > self.options.inline_limit_bytes:
            self._upload(request.token, content, control)
        else:
            request.update = content.to_bytes()

    def _upload(self, token: str, content: Content, control: Control) -> None:
        try:
            transfer.upload(self.connection, token, content, control)
        except TransferError as exc:
            control.signal.check()
            raise AssignmentFailedError(model_pb2.REASON_TRANSFER_FAILED, str(exc)) from exc

    def _report(
        self,
        request: fleet_pb2.ReportRequest,
        content: Content | None,
        control: Control,
        fields: Mapping[str, object],
    ) -> CheckInResult:
        """Report the update until the server answers; repeating a report is harmless."""

        def recover(exc: ServerUnavailableError) -> None:
            if control.remaining_s <= 0:
                raise exc
            if exc.code == _BYTES_MISSING and content is not None:
                with self._stoppable(control):
                    self._upload(request.token, content, control)

        try:
            response = retry(lambda: self.connection.report(request), self.options, self.stop, recover=recover)
        except ServerUnavailableError as exc:
            _logger.warning("The task could not be reported: %s", exc, extra=fields)
            return CheckInResult(failed=True)
        except CallRefusedError as exc:
            _logger.warning("The server refused the report: %s", exc, extra=fields)
            return CheckInResult(failed=True)
        if not response.HasField("refusal"):
            name = texts.printable(f"round {fields['round']} of the job {fields['job_name']}")
            _logger.info("The task is done and reported: %s.", name, extra=fields)
            return CheckInResult(failed=False)
        refusal = response.refusal
        reason = {"reason": reason_name(refusal.reason)}
        _logger.warning("The server rejected the report: %s", refusal.text, extra={**fields, **reason})
        return CheckInResult(failed=True, retry=refusal.retry if refusal.HasField("retry") else None)

    def _fail(self, token: str, stop: Stop, control: Control) -> None:
        """Report a failure, unless the server knows it; best effort."""
        backoff = Backoff(self.options)
        for _ in range(_FAIL_ATTEMPTS):
            if control.is_given_back or report_failure(self.connection, token, stop):
                return
            if self.options.wait(self.stop, backoff.next_s()):
                return


def _describe(assignment: fleet_pb2.Assignment) -> str:
    """Return what an assignment is, for a log that has no fields."""
    kind = "evaluation" if assignment.task == fleet_pb2.TASK_EVALUATE else "training"
    text = f"{kind} with {assignment.trainer} in round {assignment.round} of the job {assignment.job_name}"
    return texts.printable(text)  # the server chooses the names


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
