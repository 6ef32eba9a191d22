"""The loop for one assignment, and the tools that the halves of all kinds of jobs use.

The half of its kind of job (`fedplat_client._protocols`) gets the model, runs the trainer and reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from msgspec import structs

from fedplat import texts
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import cancellation, errors, spans, task
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state import data_dir, released, two_phase
from fedplat_client._state.released import PLAIN, Protection, ReleasedItem
from fedplat_client._state.two_phase import ClientStateStore, Residuals, SentReport, WasMerged
from fedplat_client._work import heartbeat, training, transfer
from fedplat_client._work.consent import Consent
from fedplat_client._work.content import Outgoing
from fedplat_client._work.heartbeat import AssignmentFailedError, CheckInResult, Heartbeat
from fedplat_client._work.training import LocalTrainers, stage_client_state
from fedplat_client.backoff import Backoff, retry
from fedplat_client.errors import CallRefusedError, ServerUnavailableError, TransferError
from fedplat_client.options import ClientOptions

# The answer to a report when a crash of the server has lost the end of the upload.
_BYTES_MISSING = "ABORTED"
_Result = TypeVar("_Result", task.TrainResult, task.EvaluateResult)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClientParts:
    """The parts of a client that assignments use; `stop` is the client's own signal."""

    connection: Connection
    downloader: transfer.Downloader
    residuals: Residuals
    client_states: ClientStateStore
    served: two_phase.ServedAttempts
    record: released.ReleaseRecord
    trainers: LocalTrainers
    consent: Consent
    options: ClientOptions
    stop: cancellation.StopSignal
    key: data_dir.SigningKey


@dataclass(frozen=True)
class Trained(Generic[_Result]):
    """The result of a trainer or an evaluator, and the model that it began with."""

    result: _Result
    base: Parameters
    client_state: ClientState
    merged: WasMerged


def record_release(parts: ClientParts, assignment: fleet_pb2.Assignment, item: ReleasedItem) -> None:
    """Note in the record what is sent next.

    Raises `AssignmentFailedError` if the record cannot be written, or if the owner has not approved the job, or not any
    more: then it must not be sent.
    """
    marks = parts.consent.check_release(assignment, item)
    release = released.ReleasedLine(
        **structs.asdict(item),
        **marks._asdict(),
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        job_id=assignment.job_id,
        job=assignment.job_name,
        round=assignment.round,
        attempt=assignment.attempt,
        trainer=assignment.trainer,
    )
    try:
        parts.record.add(release)
    except OSError as exc:
        raise AssignmentFailedError(
            model_pb2.REASON_TRANSFER_FAILED,
            f"the client's record of what leaves it cannot be written: {exc.strerror or exc}; nothing was sent",
        ) from exc


@dataclass(frozen=True, kw_only=True)
class AssignedWork:
    """One assignment, with what its half may do for it. Methods raise `AssignmentFailedError` and `Cancelled`."""

    parts: ClientParts
    assignment: fleet_pb2.Assignment
    control: task.Control
    span: spans.Start
    fields: dict[str, object]
    """Fields of the log."""
    check_in: fleet_pb2.CheckInRequest | None = None
    """The next check-in, for the report; None if the client may take no other assignment then."""

    @property
    def options(self) -> ClientOptions:
        """The options of the client."""
        return self.parts.options

    def stoppable(self) -> contextlib.AbstractContextManager[None]:
        """Stop the task if the client is stopped within the block."""
        return self.parts.stop.attach(lambda: self.control.signal.set(cancellation.client_stopped()))

    @contextlib.contextmanager
    def heartbeat(self) -> Generator[None]:
        """Send heartbeats within the block, in which the task can be stopped."""
        assignment = self.assignment
        heartbeat = Heartbeat(self.parts.connection, assignment.token, assignment.heartbeat_s, self.control)
        with self.stoppable(), heartbeat:
            yield

    def run(
        self,
        function: Callable[[task.Task], _Result],
        name: str,
        check_model: Callable[[Parameters], None] = lambda model: None,
    ) -> Trained[_Result]:
        """Get the model and run a trainer or an evaluator, in a span with this name."""
        parts, assignment, control = self.parts, self.assignment, self.control
        training.read_codec(assignment, parts.trainers.plugins)  # fail before the training if the codec is unknown
        with self.span("download"):
            base, working = parts.downloader.load(assignment, control)
        check_model(base)
        merged = make_merge_check(parts.connection, parts.options, control)
        client_state = self._open_client_state(merged)
        with self.span(name):
            result = function(parts.trainers.make_task(assignment, working, client_state, control))
        return Trained(result, base, client_state, merged)

    def send(
        self,
        request: fleet_pb2.ReportRequest,
        content: Outgoing,
        client_state: ClientState,
        protection: Protection = PLAIN,
    ) -> None:
        """Upload the update of a training, or put a small one into its report; note it in the record before.

        The client state is stored afterwards, with the digest, which may not be known before; and before the report.
        """
        self.control.trained = True
        is_streamed = bool(content.upload_id)  # its digest is computed while it is sent
        digest, size_bytes = "" if is_streamed else content.digest, content.size_bytes
        self.record(
            ReleasedItem(
                content="update",
                size_bytes=size_bytes,
                digest=digest,
                num_examples=request.num_examples,
                metrics=dict(request.metrics),
                protection=protection,
            )
        )
        with self.span("upload"):
            if size_bytes > self.options.inline_limit_bytes:
                self._upload(content)
            else:
                request.update = content.to_bytes()
        if is_streamed:
            self.record(ReleasedItem(content="digest", digest=content.digest))
        request.digest, request.upload_id = content.digest, content.upload_id
        report = SentReport(self.assignment.token, content.digest)
        stage_client_state(self.parts.client_states, self.assignment.job_id, report, client_state, self.control)

    def record(self, item: ReleasedItem) -> None:
        """Note in the record what is sent next: see `record_release`."""
        record_release(self.parts, self.assignment, item)

    def report(self, request: fleet_pb2.ReportRequest, content: Outgoing | None = None) -> CheckInResult:
        """Report until the server answers; repeating a report is harmless. `content` is the update, if it has one."""
        if content is None:
            found = dict(request.metrics)
            self.record(ReleasedItem(content="metrics", num_examples=request.num_examples, metrics=found))
        with self.span("report"):
            return self._report(request, content)

    def _report(self, request: fleet_pb2.ReportRequest, content: Outgoing | None) -> CheckInResult:
        parts, fields = self.parts, self.fields
        if self.check_in is not None and self.assignment.check_in_with_report:
            request.check_in.CopyFrom(self.check_in)
            if (approvals := parts.consent.announce()) is not None:  # they may have changed since
                request.check_in.approvals.CopyFrom(approvals)

        def recover(exc: ServerUnavailableError) -> None:
            if self.control.remaining_s <= 0:
                raise exc
            request.ClearField("check_in")  # the answer must come at once
            if exc.code == _BYTES_MISSING and content is not None:
                with self.stoppable():
                    self._upload(content)

        try:
            response = retry(lambda: self._send_report(request), parts.options, parts.stop, recover=recover)
        except ServerUnavailableError as exc:
            _logger.warning("The task could not be reported: %s", exc, extra=fields)
            return CheckInResult(failed=True)
        except CallRefusedError as exc:
            _logger.warning("The server refused the report: %s", exc, extra=fields)
            return CheckInResult(failed=True)
        if not response.HasField("refusal"):
            name = texts.printable(f"round {fields['round']} of the job {fields['job_name']}")
            _logger.info("The task is done and reported: %s.", name, extra=fields)
            return CheckInResult(failed=False, next=response.next if response.HasField("next") else None)
        refusal = response.refusal
        reason = {"reason": cancellation.reason_name(refusal.reason)}
        _logger.warning("The server rejected the report: %s", refusal.text, extra={**fields, **reason})
        return CheckInResult(failed=True, retry=refusal.retry if refusal.HasField("retry") else None)

    def _send_report(self, request: fleet_pb2.ReportRequest) -> fleet_pb2.ReportResponse:
        """Report, and wait for the next assignment if the request has a check-in, unless the client is stopped."""
        connection = self.parts.connection
        if request.HasField("check_in"):
            try:
                return connection.report(request, self.parts.stop)
            except errors.Cancelled:
                request.ClearField("check_in")
        return connection.report(request, cancellation.StopSignal())

    def _open_client_state(self, merged: WasMerged) -> ClientState:
        """Return the client state of a job; its files are unchanged until the server reports which is valid."""
        training = self.assignment.task != fleet_pb2.TASK_EVALUATE
        try:
            return self.parts.client_states.open(self.assignment.job_id, merged, training=training)
        except ServerUnavailableError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED,
                f"the server did not report whether it has merged the last update, and so which client state is valid: "
                f"{exc}",
            ) from exc

    def _upload(self, content: Outgoing) -> None:
        try:
            transfer.upload(self.parts.connection, self.assignment.token, content, self.control)
        except TransferError as exc:
            self.control.signal.check()
            raise AssignmentFailedError(model_pb2.REASON_TRANSFER_FAILED, str(exc)) from exc


class ClientHalf(NamedTuple):
    """What a client does with assignments of one kind. `may_be_late`: a training continues after its deadline."""

    run: Callable[[AssignedWork], CheckInResult]
    may_be_late: bool = False


_MERGE_CHECK_ATTEMPTS = 3


def make_merge_check(connection: Connection, options: ClientOptions, control: task.Control) -> WasMerged:
    """Return a function that queries the server, once per report, whether it was merged.

    It raises `Cancelled`, and `ServerUnavailableError` if the server does not answer.
    """

    @functools.cache
    def was_merged(sent: SentReport) -> bool:
        """Report again: after the end of an attempt, only merged updates get a receipt."""
        request = fleet_pb2.ReportRequest(token=sent.token, digest=sent.digest)
        try:
            answer = retry(
                lambda: connection.report(request, cancellation.StopSignal()),
                options,
                control.signal,
                attempts=_MERGE_CHECK_ATTEMPTS,
            )
        except ServerUnavailableError:
            control.signal.check()
            raise
        except CallRefusedError:
            control.signal.check()
            return False
        return answer.HasField("receipt")

    return was_merged


_TEXT_LIMIT = 500
_FAIL_ATTEMPTS = 3
_DEADLINES = frozenset({model_pb2.REASON_TRAIN_TIMEOUT, model_pb2.REASON_UPLOAD_TIMEOUT})


@dataclass(frozen=True)
class AssignmentWorker:
    """Runs one assignment after the other, each by its half."""

    parts: ClientParts
    find_half: Callable[[fleet_pb2.Assignment], ClientHalf]

    def run(
        self, assignment: fleet_pb2.Assignment, check_in: fleet_pb2.CheckInRequest | None = None
    ) -> heartbeat.CheckInResult:
        """Run an assignment until it ends, in success or failure. Raises `IdentityError` only.

        `check_in` may be sent with its report.
        """
        parts, half = self.parts, self.find_half(assignment)
        control = task.Control(
            assignment.training_timeout_s, assignment.upload_timeout_s, parts.options, may_be_late=half.may_be_late
        )
        fields = _fields(assignment)
        span = functools.partial(spans.start, assignment.traceparent)
        work = AssignedWork(
            parts=parts, assignment=assignment, control=control, span=span, fields=fields, check_in=check_in
        )
        kind = "evaluation" if assignment.task == fleet_pb2.TASK_EVALUATE else "training"
        text = f"{kind} with {assignment.trainer} in round {assignment.round} of the job {assignment.job_name}"
        name = texts.printable(text)  # the server chooses the names
        _logger.info("The task started: %s.", name, extra=fields)
        try:
            with training.guard(control, "the client could not finish the task"):
                parts.consent.check(assignment)
                return half.run(work)
        except errors.Cancelled:
            stop = control.signal.stop
        except heartbeat.AssignmentFailedError as exc:
            stop = control.signal.stop or cancellation.Stop(exc.reason, str(exc)[:_TEXT_LIMIT])
        except errors.TaskLeftError as exc:
            _logger.info("The client does not wait for the task: %s.", exc, extra=fields)
            return heartbeat.CheckInResult(failed=False, left=True)
        except KeyboardInterrupt:
            parts.stop.set(cancellation.client_stopped())
            self._fail(assignment, cancellation.client_stopped(), control)
            raise
        assert stop is not None  # only a signal that is set raises Cancelled
        fields["reason"] = cancellation.reason_name(stop.reason)
        if stop.by_server:
            _logger.info("The server stopped the task (%s): %s", name, stop.text, extra=fields)
            return heartbeat.CheckInResult(failed=stop.reason == model_pb2.REASON_REJECTED_MESSAGE, retry=stop.retry)
        _logger.warning("The task failed (%s): %s", name, stop.text, extra=fields)
        if stop.reason not in _DEADLINES:  # the server's deadline has passed already
            self._fail(assignment, stop, control)
        return heartbeat.CheckInResult(failed=True)

    def give_back(self, assignment: fleet_pb2.Assignment | None) -> None:
        """Tell the server that the client has been stopped before it began an assignment, if any; best effort."""
        if assignment is not None:
            heartbeat.report_failure(self.parts.connection, assignment.token, cancellation.client_stopped())

    def _fail(self, assignment: fleet_pb2.Assignment, stop: cancellation.Stop, control: task.Control) -> None:
        """Report a failure, unless the server knows it; best effort. Its text may have something of the data."""
        if control.is_given_back:
            return
        parts, text = self.parts, stop.text.encode()
        try:
            digest = hashlib.sha256(text).hexdigest()
            record_release(parts, assignment, ReleasedItem(content="failure", size_bytes=len(text), digest=digest))
        except heartbeat.AssignmentFailedError as exc:
            stop = dataclasses.replace(stop, text=str(exc))
        backoff = Backoff(parts.options)
        for _ in range(_FAIL_ATTEMPTS):
            if control.is_given_back or heartbeat.report_failure(parts.connection, assignment.token, stop):
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
