"""A scripted Fleet server on a real socket: it does what a test planned, and remembers what clients said."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire import auth, digests
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc, model_pb2
from support.raw_client import digest_of

PIECE = 10_000


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """Plans are lists that are used up from the front; when a plan is empty, calls succeed (or wait)."""

    def __init__(self) -> None:
        self.port = 0
        self.changed = threading.Condition()
        self.closing = False
        # What the server knows.
        self.models: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = defaultdict(bytearray)
        self.clients: dict[str, str] = {}
        self.sessions: dict[str, str] = {}
        self.num_sessions = 0
        self.tokens = {"token-of-the-ticket"}
        # What the test plans.
        self.work: list[fleet_pb2.CheckInResponse] = []
        self.jobs: list[fleet_pb2.ReviewedJob] = []
        # A status, or a status with the code that the real server would send along.
        self.failures: dict[str, list[grpc.StatusCode | tuple[grpc.StatusCode, str]]] = defaultdict(list)
        self.refusal = ""  # the text of these, unless it is empty
        self.retry = ""
        self.lost_replies: dict[str, int] = defaultdict(int)
        self.cut_downloads: list[int] = []
        self.cut_ranges: dict[int, int] = {}  # by the offset of a download: after how many bytes it breaks, once
        self.cut_uploads: list[int] = []
        self.truncate_at_report: int | None = None
        self.receipts: list[fleet_pb2.ReportResponse] = []
        self.stop: fleet_pb2.Refusal | None = None
        self.proceed = fleet_pb2.Continue(remaining_s=60.0)
        self.digest_last = True  # False: a server before 0.2
        self.max_calls = 4  # of an upload; 0: a server before 0.2
        self.refuse_additional: tuple[grpc.StatusCode, str] | None = None
        # What clients said.
        self.calls: list[str] = []
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.metadata: list[tuple[str, dict[str, str | bytes]]] = []
        self.sent_bytes: list[int] = []
        self.downloading: list[str] = []  # the connection of each download
        self.received_bytes: list[int] = []
        self.positioned: list[bool] = []  # whether each part of an upload had its position

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.address, "demo", "token-of-the-ticket")

    def add_model(self, parameters: Parameters) -> model_pb2.ModelRef:
        content = parameters.to_bytes()
        digest = hashlib.sha256(content).hexdigest()
        self.models[digest] = content
        return model_pb2.ModelRef(version=1, digest=digest, size_bytes=len(content))

    def assign(self, model: model_pb2.ModelRef, **fields: Any) -> fleet_pb2.Assignment:
        number = len(self.work) + self.calls.count("CheckIn") + 1
        defaults: dict[str, Any] = {
            "token": f"token-{number}",
            "job_id": "job-1",
            "job_name": "digits",
            "round": number,
            "attempt": 1,
            "task": fleet_pb2.TASK_TRAIN,
            "trainer": "digits",
            "training_timeout_s": 60.0,
            "upload_timeout_s": 60.0,
            "heartbeat_s": 10.0,
            "digest_last": self.digest_last,
        }
        assignment = fleet_pb2.Assignment(model=model, **(defaults | fields))
        self.plan(fleet_pb2.CheckInResponse(assignment=assignment))
        return assignment

    def refuse(self, reason: model_pb2.Reason.ValueType, window: tuple[float, float] | None) -> None:
        retry = model_pb2.RetryWindow(min_s=window[0], max_s=window[1]) if window else None
        refusal = fleet_pb2.Refusal(reason=reason, text="not now", retry=retry)
        self.plan(fleet_pb2.CheckInResponse(refusal=refusal))

    def plan(self, response: fleet_pb2.CheckInResponse) -> None:
        with self.changed:
            self.work.append(response)
            self.changed.notify_all()

    def say_stop(self, reason: model_pb2.Reason.ValueType) -> None:
        with self.changed:
            self.stop = fleet_pb2.Refusal(reason=reason, text="no longer needed")
            self.changed.notify_all()

    def wait_for(self, call: str, count: int = 1) -> None:
        """Waits until `call` came `count` times; the limit only ends a test that would hang."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.calls.count(call) >= count, timeout=60), self.calls

    def Enroll(self, request: fleet_pb2.EnrollRequest, context: Any) -> fleet_pb2.EnrollResponse:
        self._enter("Enroll", request, context, authenticated=False)
        client_id = self.clients.setdefault(request.idempotency_key, f"client-{len(self.clients) + 1}")
        self._leave("Enroll", context)
        return fleet_pb2.EnrollResponse(client_id=client_id)

    def GetChallenge(self, request: fleet_pb2.GetChallengeRequest, context: Any) -> fleet_pb2.GetChallengeResponse:
        self._fail_as_planned("GetChallenge", context)
        return fleet_pb2.GetChallengeResponse(nonce=b"nonce")

    def OpenSession(self, request: fleet_pb2.OpenSessionRequest, context: Any) -> fleet_pb2.OpenSessionResponse:
        self._fail_as_planned("OpenSession", context)
        if request.client_id not in self.clients.values():
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, "CLIENT_UNKNOWN")
        self.num_sessions += 1
        session_id = f"session-{self.num_sessions}"
        self.sessions[session_id] = request.client_id
        return fleet_pb2.OpenSessionResponse(session_id=session_id)

    def RenewCertificate(
        self, request: fleet_pb2.RenewCertificateRequest, context: Any
    ) -> fleet_pb2.RenewCertificateResponse:
        raise NotImplementedError

    def CheckIn(self, request: fleet_pb2.CheckInRequest, context: Any) -> fleet_pb2.CheckInResponse:
        self._enter("CheckIn", request, context)
        self._wait(context, request.wait_s, lambda: bool(self.work))
        if not self.work:
            refusal = fleet_pb2.Refusal(reason=model_pb2.REASON_NO_WORK, retry=model_pb2.RetryWindow())
            return fleet_pb2.CheckInResponse(refusal=refusal)
        return self.work.pop(0)

    def ReviewJobs(self, request: fleet_pb2.ReviewJobsRequest, context: Any) -> fleet_pb2.ReviewJobsResponse:
        self._enter("ReviewJobs", request, context)
        response = fleet_pb2.ReviewJobsResponse(jobs=self.jobs)
        for each in response.jobs:
            if each.digest in request.known:
                each.job_file = ""
        return response

    def Download(self, request: fleet_pb2.DownloadRequest, context: Any) -> Iterator[model_pb2.Chunk]:
        self._enter("Download", request, context)
        content = self.models[request.digest]
        self.downloading.append(context.peer())
        whole = min(request.offset + request.length, len(content)) if request.length else len(content)
        end = min(self.cut_downloads.pop(0), whole) if self.cut_downloads else whole
        end = min(end, request.offset + self.cut_ranges.pop(request.offset, whole))
        self.sent_bytes.append(max(0, end - request.offset))
        for start in range(request.offset, end, PIECE):
            yield model_pb2.Chunk(data=content[start : min(start + PIECE, end)])
        if end < whole:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    def Upload(self, request_iterator: Iterator[fleet_pb2.UploadRequest], context: Any) -> fleet_pb2.UploadResponse:
        header = next(request_iterator).header
        self._enter("Upload", header, context)
        if header.additional and self.refuse_additional is not None:
            _abort(context, *self.refuse_additional)
        data = self.uploads[self._name_of(header, context)]
        if not header.additional and header.offset != len(data):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"expected offset {len(data)}")
        limit = self.cut_uploads.pop(0) if self.cut_uploads else header.size_bytes
        for request in request_iterator:
            self._append(data, request, limit, context)
            if len(data) >= limit:
                break
        self.received_bytes.append(len(data) - header.offset)
        if limit < header.size_bytes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        self._leave("Upload", context)
        return fleet_pb2.UploadResponse(received_bytes=len(data))

    def _append(self, data: bytearray, request: fleet_pb2.UploadRequest, limit: int, context: Any) -> None:
        """Appends a part in its turn, unless the call ends before."""
        is_positioned = request.HasField("position")
        self.positioned.append(is_positioned)
        if is_positioned:
            self._wait(context, 60.0, lambda: len(data) == request.position)
        with self.changed:
            if not is_positioned or len(data) == request.position:
                data += request.data[: max(0, limit - len(data))]
            self.changed.notify_all()

    def QueryUpload(self, request: fleet_pb2.QueryUploadRequest, context: Any) -> fleet_pb2.QueryUploadResponse:
        self._enter("QueryUpload", request, context)
        num_received = len(self.uploads[self._name_of(request, context)])
        return fleet_pb2.QueryUploadResponse(received_bytes=num_received, max_calls=self.max_calls)

    def _name_of(self, request: fleet_pb2.UploadHeader | fleet_pb2.QueryUploadRequest, context: Any) -> str:
        """The name of an upload; a server before 0.2 does not know ids."""
        assert not (request.digest and request.upload_id)
        name = request.digest or (request.upload_id if self.digest_last else "")
        if not name:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        return name

    def Report(self, request: fleet_pb2.ReportRequest, context: Any) -> fleet_pb2.ReportResponse:
        self._enter("Report", request, context)
        if request.update:
            self.uploads[request.digest][:] = request.update
        file = self.uploads[request.upload_id or request.digest]
        if self.truncate_at_report is not None:
            # Without the size of an upload that has an id, the server does not know which of its bytes are right.
            del file[0 if request.upload_id else self.truncate_at_report :]
            self.truncate_at_report = None
            context.abort(grpc.StatusCode.ABORTED, "the update has not arrived completely")
        if request.upload_id:
            assert digest_of(bytes(file), digests.kind_of(request.upload_id)) == request.digest
            self.uploads[request.digest] = file
        self._leave("Report", context)
        if self.receipts:
            return self.receipts.pop(0)
        return fleet_pb2.ReportResponse(receipt=fleet_pb2.Receipt(digest=request.digest))

    def Step(self, request: fleet_pb2.StepRequest, context: Any) -> fleet_pb2.StepResponse:
        raise NotImplementedError

    def Fail(self, request: fleet_pb2.FailRequest, context: Any) -> fleet_pb2.FailResponse:
        self._enter("Fail", request, context)
        return fleet_pb2.FailResponse()

    def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Any) -> fleet_pb2.HeartbeatResponse:
        self._enter("Heartbeat", request, context)
        self._wait(context, request.wait_s, lambda: self.stop is not None)
        if self.stop is not None:
            refusal, self.stop = self.stop, None
            return fleet_pb2.HeartbeatResponse(stop=refusal)
        return fleet_pb2.HeartbeatResponse(proceed=self.proceed)

    def _enter(self, call: str, request: Any, context: Any, *, authenticated: bool = True) -> None:
        with self.changed:
            self.calls.append(call)
            self.requests[call].append(request)
            self.metadata.append((call, dict(context.invocation_metadata())))
            self.changed.notify_all()
        self._fail_as_planned(call, context)
        session_id = dict(context.invocation_metadata()).get(auth.METADATA_SESSION, "")
        if authenticated and session_id not in self.sessions:
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, "SESSION_UNKNOWN")

    def _fail_as_planned(self, call: str, context: Any) -> None:
        if self.failures[call]:
            planned = self.failures[call].pop(0)
            status, code = planned if isinstance(planned, tuple) else (planned, "")
            _abort(context, status, code, self.refusal or f"planned for {call}", self.retry)

    def _leave(self, call: str, context: Any) -> None:
        if self.lost_replies[call]:
            self.lost_replies[call] -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, f"the reply to {call} got lost")

    def _wait(self, context: Any, wait_s: float, ready: Any) -> None:
        def wake() -> None:
            with self.changed:
                self.changed.notify_all()

        if not context.add_callback(wake):
            return
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.closing or not context.is_active(), wait_s)


def _abort(context: Any, status: grpc.StatusCode, code: str, text: str = "", retry: str = "") -> None:
    trailers = ((auth.METADATA_CODE, code), (wire.METADATA_RETRY, retry))
    context.set_trailing_metadata(tuple(pair for pair in trailers if pair[1]))
    context.abort(status, text or code)


@contextmanager
def serving(fleet: FakeFleet, port: int = 0) -> Generator[FakeFleet]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    fleet.port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield fleet
    finally:
        with fleet.changed:
            fleet.closing = True
            fleet.changed.notify_all()
        server.stop(grace=None).wait()
