"""A client made of raw stubs: it sends and signs whatever a test wants."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from grpc import aio

from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire import auth, digests
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc, model_pb2

PATIENCE_S = 60.0
"""When a wait is given up; a bound, not an expectation of speed."""
Metadata = tuple[tuple[str, str | bytes], ...]
FLEET = "/fedplat.wire.v1.Fleet/"


Response = TypeVar("Response")
is_stormy: Callable[[], bool] = bool  # False
"""Whether the store of the server fails now and then: see `daemons.STORM`."""


async def again(call: Callable[[], Awaitable[Response]]) -> Response:
    """Calls until the store does not fail, and until an answer arrives."""
    unheard: aio.AioRpcError | None = None
    while True:
        try:
            return await call()
        except aio.UsageError:  # the channel was closed meanwhile: the server was gone, and no answer came
            if unheard is None:
                raise
            raise unheard from None
        except aio.AioRpcError as exc:
            said = dict(exc.trailing_metadata() or ()).get(auth.METADATA_CODE)
            unheard = exc if is_unheard(exc) else None
            if unheard is None and not (is_stormy() and said == "STORE_UNAVAILABLE"):
                raise
        await asyncio.sleep(0.01)


def is_unheard(error: aio.AioRpcError) -> bool:
    """Whether asyncio's gRPC replaced a status that had arrived by its own failure to send (grpc issue 36066).

    A server that ends a stream early does so while the client still writes. The SDK's clients do not suffer from it:
    they use the other Python API.
    """
    return error.code() is grpc.StatusCode.INTERNAL and "SendMessageOperation" in (error.debug_error_string() or "")


class Signing:
    """A private key, and the session that is signed with it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.key = key
        self.client_id = ""
        self.session_id = ""
        self.counter = itertools.count(1)

    @property
    def public_key(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def opening(self) -> fleet_pb2.OpenSessionRequest:
        return fleet_pb2.OpenSessionRequest(client_id=self.client_id, protocol_version=wire.PROTOCOL_VERSION)

    def opened(self, answer: fleet_pb2.OpenSessionResponse) -> None:
        self.session_id, self.counter = answer.session_id, itertools.count(1)

    def proven(self, method: str, request: Message, nonce: bytes) -> Metadata:
        signed = auth.proof_payload(FLEET + method, nonce, request.SerializeToString())
        return (auth.METADATA_NONCE, nonce), (auth.METADATA_SIGNATURE, self.key.sign(signed))

    def signed(self, method: str, request: Message | None) -> Metadata:
        """The metadata of the next call in the session."""
        return self.signed_bytes(method, request.SerializeToString() if request is not None else b"")

    def signed_bytes(self, method: str, data: bytes) -> Metadata:
        counter = next(self.counter)
        payload = auth.call_payload(FLEET + method, self.session_id, counter, data)
        return (
            (auth.METADATA_SESSION, self.session_id),
            (auth.METADATA_COUNTER, str(counter)),
            (auth.METADATA_SIGNATURE, self.key.sign(payload)),
        )


CHALLENGE = fleet_pb2.GetChallengeRequest(protocol_version=wire.PROTOCOL_VERSION)


class RawClient(Signing):
    """A client that makes the calls that a test asks for, and only adds its signature."""

    def __init__(self, channel: aio.Channel, key: Ed25519PrivateKey) -> None:
        super().__init__(key)
        self.stub = fleet_pb2_grpc.FleetStub(channel)

    def over(self, channel: aio.Channel) -> RawClient:
        """The same client in the same session, over another channel."""
        again = copy.copy(self)
        again.stub = fleet_pb2_grpc.FleetStub(channel)
        return again

    async def enroll(self, **fields: Any) -> None:
        given: dict[str, Any] = {"protocol_version": wire.PROTOCOL_VERSION, "public_key": self.public_key, **fields}
        request = fleet_pb2.EnrollRequest(**given)

        async def proven() -> fleet_pb2.EnrollResponse:
            return await self.stub.Enroll(request, metadata=await self.proof("Enroll", request))

        self.client_id = (await again(proven)).client_id

    async def open_session(self) -> None:
        request = self.opening()

        async def proven() -> fleet_pb2.OpenSessionResponse:
            return await self.stub.OpenSession(request, metadata=await self.proof("OpenSession", request))

        self.opened(await again(proven))

    async def proof(self, method: str, request: Message) -> Metadata:
        return self.proven(method, request, (await self.stub.GetChallenge(CHALLENGE)).nonce)

    def _begin(self, call: Callable[[], Any]) -> Any:
        """A call that a test may wait for or cancel."""
        return asyncio.ensure_future(again(call)) if is_stormy() else call()

    def check_in(  # noqa: PLR0913 -- the fields of a request
        self,
        wait_s: float = PATIENCE_S,
        labels: Mapping[str, str] | None = None,
        trainers: tuple[str, ...] = ("toy",),
        evaluators: tuple[str, ...] = (),
        codecs: tuple[str, ...] = (),
        algorithms: tuple[str, ...] = (),
        features: tuple[str, ...] = (),
        version: int = wire.PROTOCOL_VERSION,
        approvals: fleet_pb2.OwnerApprovals | None = None,
    ) -> aio.UnaryUnaryCall[Any, fleet_pb2.CheckInResponse]:
        request = fleet_pb2.CheckInRequest(
            protocol_version=version,
            labels=labels,
            trainers=trainers,
            evaluators=evaluators,
            codecs=codecs,
            algorithms=algorithms,
            features=features,
            approvals=approvals,
            wait_s=wait_s,
        )
        return self._begin(lambda: self.stub.CheckIn(request, metadata=self.signed("CheckIn", request)))

    async def review(self, known: Iterable[str] = (), page_token: str = "") -> fleet_pb2.ReviewJobsResponse:
        request = fleet_pb2.ReviewJobsRequest(known=known, page_token=page_token)
        return await again(lambda: self.stub.ReviewJobs(request, metadata=self.signed("ReviewJobs", request)))

    async def assignment(self, wait_s: float = PATIENCE_S, **options: Any) -> fleet_pb2.Assignment:
        response = await self.check_in(wait_s, **options)
        assert response.HasField("assignment"), response
        return response.assignment

    async def refusal(self, wait_s: float = 0.0, **options: Any) -> fleet_pb2.Refusal:
        response = await self.check_in(wait_s, **options)
        assert response.HasField("refusal"), response
        return response.refusal

    async def download(self, digest: str, offset: int = 0, length: int = 0) -> bytes:
        request = fleet_pb2.DownloadRequest(digest=digest, offset=offset, length=length)

        async def whole() -> bytes:
            call = self.stub.Download(request, metadata=self.signed("Download", request))
            return b"".join([chunk.data async for chunk in call])

        return await again(whole)

    def upload(
        self, token: str, content: bytes, offset: int = 0, end: int | None = None, **header: Any
    ) -> asyncio.Future[fleet_pb2.UploadResponse]:
        """Sends `content[offset:end]` in small parts, after a header that announces all of it."""
        fields: dict[str, Any] = {
            "token": token,
            "digest": digest_of(content),
            "size_bytes": len(content),
            "offset": offset,
            **header,
        }

        first = fleet_pb2.UploadRequest(header=fleet_pb2.UploadHeader(**fields))

        async def requests() -> AsyncIterator[fleet_pb2.UploadRequest]:
            yield first
            for part in in_parts(content[offset:end]):
                yield fleet_pb2.UploadRequest(data=part)

        return self.stream(requests, first)

    def stream(
        self, requests: Callable[[], Any], first: fleet_pb2.UploadRequest | None
    ) -> asyncio.Future[fleet_pb2.UploadResponse]:
        """An Upload of these messages, signed over the first of them."""
        return asyncio.ensure_future(again(lambda: self.stub.Upload(requests(), metadata=self.signed("Upload", first))))

    async def query(self, token: str, digest: str, **fields: str) -> int:
        request = fleet_pb2.QueryUploadRequest(token=token, digest=digest, **fields)
        answer = await again(lambda: self.stub.QueryUpload(request, metadata=self.signed("QueryUpload", request)))
        return answer.received_bytes

    async def report(
        self,
        token: str,
        digest: str = "",
        num_examples: float = 1.0,
        metrics: Mapping[str, float] | None = None,
        upload_id: str = "",
    ) -> fleet_pb2.ReportResponse:
        request = fleet_pb2.ReportRequest(
            token=token, digest=digest, num_examples=num_examples, metrics=metrics, upload_id=upload_id
        )
        return await again(lambda: self.stub.Report(request, metadata=self.signed("Report", request)))

    async def report_inline(
        self, token: str, content: bytes, digest: str | None = None, num_examples: float = 1.0
    ) -> fleet_pb2.ReportResponse:
        """Reports with the update in the message."""
        request = fleet_pb2.ReportRequest(
            token=token, digest=digest or digest_of(content), num_examples=num_examples, update=content
        )
        return await again(lambda: self.stub.Report(request, metadata=self.signed("Report", request)))

    async def deliver(
        self,
        token: str,
        update: Parameters | bytes,
        num_examples: float = 1.0,
        metrics: Mapping[str, float] | None = None,
    ) -> fleet_pb2.ReportResponse:
        """Uploads and reports."""
        content = update if isinstance(update, bytes) else update.to_bytes()
        await self.upload(token, content)
        return await self.report(token, digest_of(content), num_examples, metrics)

    def heartbeat(
        self, token: str, wait_s: float = PATIENCE_S, progress: float = 0.5
    ) -> aio.UnaryUnaryCall[Any, fleet_pb2.HeartbeatResponse]:
        request = fleet_pb2.HeartbeatRequest(token=token, progress=progress, wait_s=wait_s)
        return self._begin(lambda: self.stub.Heartbeat(request, metadata=self.signed("Heartbeat", request)))

    async def stop_reason(self, token: str, wait_s: float = PATIENCE_S) -> str:
        """Waits to be told to stop; returns the reason."""
        response = await self.heartbeat(token, wait_s)
        assert response.HasField("stop"), response
        return reason_name(response.stop.reason)

    async def step(self, token: str, wait_s: float = PATIENCE_S, **content: Any) -> fleet_pb2.StepResponse:
        """Takes a step with this content."""
        request = fleet_pb2.StepRequest(token=token, wait_s=wait_s, **content)
        return await again(lambda: self.stub.Step(request, metadata=self.signed("Step", request)))

    async def secure_step(self, token: str, wait_s: float = PATIENCE_S, **message: bytes) -> fleet_pb2.StepResponse:
        """Takes a step of secure aggregation with this message, if any."""
        return await self.step(token, wait_s, secure=fleet_pb2.SecureMessage(**message))  # type: ignore[arg-type]

    async def receive_file(self, token: str, sender: str, name: str, wait_s: float = PATIENCE_S) -> bytes:
        """Downloads what another silo has sent to this one."""
        request = fleet_pb2.DownloadRequest(token=token, sender=sender, name=name, wait_s=wait_s)

        async def whole() -> bytes:
            call = self.stub.Download(request, metadata=self.signed("Download", request))
            return b"".join([chunk.data async for chunk in call])

        return await again(whole)

    async def fail(self, token: str, reason: model_pb2.Reason.ValueType, text: str = "") -> None:
        request = fleet_pb2.FailRequest(token=token, reason=reason, text=text)
        await again(lambda: self.stub.Fail(request, metadata=self.signed("Fail", request)))


def private_key(seed: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed.encode()).digest())


def digest_of(content: bytes, kind: str = "") -> str:
    """A digest of a kind of `fedplat.wire.digests`."""
    digest = digests.UpdateHash(kind)
    digest.update(content)
    return digest.digest


def reason_name(reason: model_pb2.Reason.ValueType) -> str:
    return model_pb2.Reason.Name(reason).removeprefix("REASON_")


def in_parts(content: bytes) -> list[bytes]:
    size = max(50, len(content) // 50)
    return [content[start : start + size] for start in range(0, len(content), size)]
