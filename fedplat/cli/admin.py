"""`AdminClient`: the Admin service as Python sees it; deadlines and gRPC's errors are dealt with here and nowhere else.

>>> with AdminClient(profile.load(Path("admin.toml"))) as client:  # doctest: +SKIP
...     for job in client.list_jobs():
...         print(job.name, job.round, job.num_rounds)
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import grpc

from fedplat import durable, wire
from fedplat.cli import answers, paging
from fedplat.cli.paging import Page, Row
from fedplat.cli.profile import DEFAULT_SERVER, Profile
from fedplat.errors import ModelError, ServerRefusedError, ServerUnreachableError
from fedplat.identity import METADATA_CODE, is_address
from fedplat.wire import handshake
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, model_pb2

Progress = Callable[[int, int], object]
"""Is told the bytes that are done and the bytes in all."""
Response = TypeVar("Response")

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    # A watch may be silent for hours; pings find out whether the server is still there.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A person waits for the server to come back: look often. (min_reconnect_backoff_ms would also be the time that
    # a connection may take to be made, and a server far away needs its 20 seconds.)
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A server in a container comes back with another address: do not trust the old one for gRPC's 30 seconds.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)
_PAUSE_S = 0.1
_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # by the server, which is stopping: no call is cancelled here and then waited for
    }
)


class AdminClient:
    """A connection to the server of a profile, with TLS unless that says otherwise.

    Every method raises `ServerUnreachableError` when no server answers, and `ServerRefusedError` with the server's
    words when it says no. `job` is a job's id, or a name that only one job has. Nothing is connected before the
    first call. Raises `ValueError` when the profile's server is not `host:port`.
    """

    def __init__(self, profile: Profile, *, timeout_s: float = 30.0, transfer_s: float = 3600.0) -> None:
        if not is_address(profile.server):
            raise ValueError(f"server is {profile.server!r}; expected host:port, for instance {DEFAULT_SERVER}")
        self.profile = profile
        self.server = profile.server
        self._timeout_s = timeout_s
        self._transfer_s = transfer_s
        self._metadata = ((wire.METADATA_AUTHORIZATION, f"Bearer {profile.token}"),) if profile.token else ()
        self._channel = _channel(profile)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls under way are cancelled."""
        self._channel.close()

    def wait_until_ready(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Returns the server's status as soon as it answers; waits for ever, or raises `ServerUnreachableError`."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            try:
                # Not grpc.channel_ready_future: its polling thread dies with a traceback when the channel is closed.
                with self._translated(timeout_s):
                    return self._stub.GetStatus(
                        admin_pb2.GetStatusRequest(), timeout=left_s, wait_for_ready=True, metadata=self._metadata
                    )
            except ServerUnreachableError:  # a connection may also break right after it was made
                if time.monotonic() + _PAUSE_S >= end:
                    raise
            time.sleep(_PAUSE_S)
            left_s = None if timeout_s is None else end - time.monotonic()

    def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """What the server says of itself; within `timeout_s` instead of the client's usual time."""
        return self._call(self._stub.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    def upload_model(self, chunks: Iterable[bytes]) -> admin_pb2.UploadModelResponse:
        """Stores a safetensors file, given in pieces of at most `wire.MAX_MESSAGE_BYTES`; its digest is checked."""
        digest = hashlib.sha256()

        def requests() -> Iterator[admin_pb2.UploadModelRequest]:
            for chunk in chunks:
                digest.update(chunk)
                yield admin_pb2.UploadModelRequest(data=chunk)

        with self._translated(self._transfer_s):
            response = self._stub.UploadModel(requests(), timeout=self._transfer_s, metadata=self._metadata)
        if response.digest != digest.hexdigest():
            raise ServerRefusedError(
                f"the server stored a model with the digest {response.digest or '(none)'}, but "
                f"{digest.hexdigest()} was sent; try again"
            )
        return response

    def create_job(self, job_file: str, initial_digest: str, idempotency_key: str) -> admin_pb2.Job:
        """Makes a job, status DRAFT, from the text of a job file; a known key returns the job that has it."""
        request = admin_pb2.CreateJobRequest(
            job_file=job_file, initial_digest=initial_digest, idempotency_key=idempotency_key
        )
        return self._call(self._stub.CreateJob, request)

    def list_jobs(self) -> Sequence[admin_pb2.Job]:
        """All jobs, without their job files, which `show_job` has."""
        return list(self.iter_jobs())

    def iter_jobs(self, limit: int | None = None) -> Iterator[admin_pb2.Job]:
        """Yield jobs in the order of their creation, at most `limit` of them, a page in memory at a time."""
        return self._rows(self._stub.ListJobs, admin_pb2.ListJobsRequest(), lambda page: page.jobs, limit)

    def show_job(self, job: str) -> admin_pb2.Job:
        """One job."""
        return self._call(self._stub.ShowJob, admin_pb2.JobRequest(job=job))

    def start(self, job: str) -> admin_pb2.Job:
        """DRAFT becomes RUNNING."""
        return self._call(self._stub.StartJob, admin_pb2.JobRequest(job=job))

    def pause(self, job: str) -> admin_pb2.Job:
        """RUNNING becomes PAUSED."""
        return self._call(self._stub.PauseJob, admin_pb2.JobRequest(job=job))

    def resume(self, job: str) -> admin_pb2.Job:
        """PAUSED becomes RUNNING."""
        return self._call(self._stub.ResumeJob, admin_pb2.JobRequest(job=job))

    def cancel(self, job: str) -> admin_pb2.Job:
        """Ends the job for good: CANCELLED."""
        return self._call(self._stub.CancelJob, admin_pb2.JobRequest(job=job))

    def rollback(self, job: str, version: int) -> admin_pb2.RollbackJobResponse:
        """Lets a job go on from an older version."""
        return self._call(self._stub.RollbackJob, admin_pb2.RollbackJobRequest(job=job, version=version))

    def watch_job(self, job: str, after_sequence: int = 0) -> Generator[admin_pb2.JobEvent]:
        """The events of a job after a sequence number, past ones first; ends when the job has ended.

        Close the generator to leave earlier.
        It also ends, or raises `ServerUnreachableError`, when the server stops: `fedplat.cli.watch.follow` goes on.
        """
        call = self._stub.WatchJob(
            admin_pb2.WatchJobRequest(job=job, after_sequence=after_sequence), metadata=self._metadata
        )
        try:
            with self._translated(None):
                yield from call
        finally:
            call.cancel()

    def list_rounds(self, job: str, *, all_attempts: bool = False) -> Sequence[admin_pb2.Round]:
        """The attempts of a job that are committed or open; with `all_attempts` the abandoned ones too."""
        return list(self.iter_rounds(job, all_attempts=all_attempts))

    def iter_rounds(
        self, job: str, limit: int | None = None, *, all_attempts: bool = False
    ) -> Iterator[admin_pb2.Round]:
        """Yield what `list_rounds` has, at most `limit` attempts, a page in memory at a time."""
        request = admin_pb2.ListRoundsRequest(job=job, all_attempts=all_attempts)
        return self._rows(self._stub.ListRounds, request, lambda page: page.rounds, limit)

    def list_clients(self, population: str = "") -> Sequence[admin_pb2.Client]:
        """The enrolled clients, of one population or of all."""
        return list(self.iter_clients(population))

    def iter_clients(self, population: str = "", limit: int | None = None) -> Iterator[admin_pb2.Client]:
        """Yield what `list_clients` has, at most `limit` clients, a page in memory at a time."""
        request = admin_pb2.ListClientsRequest(population=population)
        return self._rows(self._stub.ListClients, request, lambda page: page.clients, limit)

    def revoke_client(self, client_id: str) -> admin_pb2.Client:
        """Ends a client's membership for good."""
        return self._call(self._stub.RevokeClient, admin_pb2.RevokeClientRequest(client_id=client_id))

    def create_enrolment(
        self, population: str, num_uses: int, expires_s: float, address: str
    ) -> admin_pb2.CreateEnrolmentResponse:
        """Makes a token by which clients enrol, and the ticket that carries it; `address` is what they connect to."""
        request = admin_pb2.CreateEnrolmentRequest(
            population=population, num_uses=num_uses, expires_s=expires_s, address=address
        )
        return self._call(self._stub.CreateEnrolment, request)

    def list_enrolments(self) -> Sequence[admin_pb2.Enrolment]:
        """The enrolment tokens, good or not; none of them shows its secret."""
        return list(self.iter_enrolments())

    def iter_enrolments(self, limit: int | None = None) -> Iterator[admin_pb2.Enrolment]:
        """Yield what `list_enrolments` has, at most `limit` tokens, a page in memory at a time."""
        request = admin_pb2.ListEnrolmentsRequest()
        return self._rows(self._stub.ListEnrolments, request, lambda page: page.enrolments, limit)

    def revoke_enrolment(self, enrolment_id: str, *, with_clients: bool = False) -> admin_pb2.Enrolment:
        """Let no client enrol by a token any more; `with_clients` also revokes those that have enrolled by it."""
        request = admin_pb2.RevokeEnrolmentRequest(enrolment_id=enrolment_id, with_clients=with_clients)
        num_revoked = 0
        while True:
            answer = self._call(self._stub.RevokeEnrolment, request)
            num_revoked += answer.num_revoked_clients
            request.page_token = answer.next_page_token
            if not request.page_token:
                answer.num_revoked_clients = num_revoked
                return answer

    def list_versions(self, job: str) -> Sequence[admin_pb2.ModelVersion]:
        """The model versions of a job."""
        return list(self.iter_versions(job))

    def iter_versions(self, job: str, limit: int | None = None) -> Iterator[admin_pb2.ModelVersion]:
        """Yield what `list_versions` has, at most `limit` versions, a page in memory at a time."""
        request = admin_pb2.ListModelVersionsRequest(job=job)
        return self._rows(self._stub.ListModelVersions, request, lambda page: page.versions, limit)

    def export_model(
        self, job: str, version: int | None, path: str | os.PathLike[str], progress: Progress | None = None
    ) -> model_pb2.ModelRef:
        """Write a version (None: the latest) to a safetensors file of its owner, whole and checked or not at all.

        Raises `ModelError` when the bytes that arrive are not those of the version, and `OSError` when they cannot
        be written.
        """
        request = admin_pb2.ExportModelRequest(job=job)
        if version is not None:
            request.version = version
        # A model may reveal its data: only its owner may read it, whatever the umask.
        with durable.atomic_write(Path(path), 0o600) as file:
            return self._receive_model(request, file, progress)

    def add_operator(self, name: str, role: str, expires_in_s: float = 0.0) -> admin_pb2.AddOperatorResponse:
        """Makes an operator; the answer has its token, which nobody can read again. 0 s: it does not expire."""
        request = admin_pb2.AddOperatorRequest(name=name, role=role, expires_in_s=expires_in_s)
        return self._call(self._stub.AddOperator, request)

    def list_operators(self) -> Sequence[admin_pb2.Operator]:
        """All operators."""
        request = admin_pb2.ListOperatorsRequest()
        return list(self._rows(self._stub.ListOperators, request, lambda page: page.operators))

    def remove_operator(self, name: str) -> None:
        """Removes an operator: its next call is refused."""
        self._call(self._stub.RemoveOperator, admin_pb2.RemoveOperatorRequest(name=name))

    def iter_audit(self, after_sequence: int = 0, limit: int | None = None) -> Iterator[admin_pb2.AuditEvent]:
        """Yield rows of the audit log after a sequence number, at most `limit`, a page in memory at a time."""
        request = admin_pb2.ListAuditRequest(after_sequence=after_sequence)
        return self._rows(self._stub.ListAudit, request, lambda page: page.events, limit)

    def show_privacy(self, job: str = "") -> admin_pb2.ShowPrivacyResponse:
        """What a job has released and may release, and what that costs; without a name all that are private."""
        found = admin_pb2.ShowPrivacyResponse()
        request = admin_pb2.ShowPrivacyRequest(job=job)
        for page in paging.pages(lambda one: self._call(self._stub.ShowPrivacy, one), request):
            found.MergeFrom(page)
        found.ClearField("next_page_token")
        return found

    def set_privacy_budget(self, population: str, epsilon: float, delta: float) -> admin_pb2.PopulationPrivacy:
        """Bounds what all private jobs of a population may cost together."""
        request = admin_pb2.SetPrivacyBudgetRequest(population=population, epsilon=epsilon, delta=delta)
        return self._call(self._stub.SetPrivacyBudget, request)

    def remove_privacy_budget(self, population: str) -> None:
        """Takes a population's budget away."""
        self._call(self._stub.RemovePrivacyBudget, admin_pb2.RemovePrivacyBudgetRequest(population=population))

    def _receive_model(
        self, request: admin_pb2.ExportModelRequest, file: BinaryIO, progress: Progress | None
    ) -> model_pb2.ModelRef:
        model: model_pb2.ModelRef | None = None
        digest = hashlib.sha256()
        size = 0
        call = self._stub.ExportModel(request, timeout=self._transfer_s, metadata=self._metadata)
        try:
            with self._translated(self._transfer_s):
                for message in call:
                    if model is None:
                        model = message.model
                    digest.update(message.data)
                    size += file.write(message.data)
                    if size > model.size_bytes:
                        break
                    if progress is not None:
                        progress(size, model.size_bytes)
        finally:
            call.cancel()
        if model is None or size != model.size_bytes or digest.hexdigest() != model.digest:
            promised = f"{model.size_bytes} bytes with the digest {model.digest}" if model is not None else "a model"
            raise ModelError(
                f"the model that arrived is damaged: the server promised {promised}; {size} bytes "
                f"with the digest {digest.hexdigest()} came; try again"
            )
        return model

    def _rows(
        self, method: Callable[..., Page], request: Any, rows: Callable[[Page], Iterable[Row]], limit: int | None = None
    ) -> Iterator[Row]:
        return paging.rows(lambda page: self._call(method, page), request, rows, limit)

    def _call(self, method: Callable[..., Response], request: object, timeout_s: float | None = None) -> Response:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._translated(limit_s):
            return method(request, timeout=limit_s, metadata=self._metadata)

    @contextlib.contextmanager
    def _translated(self, timeout_s: float | None) -> Generator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            code, details = exc.code(), exc.details() or exc.code().name
            if any(entry.key == METADATA_CODE for entry in exc.trailing_metadata() or ()):  # fedplat's own words
                if code is grpc.StatusCode.UNAVAILABLE:
                    text = f"the fedplat server at {self.server} does not serve now: {details}"
                    raise ServerUnreachableError(text, reason=details) from exc
                raise ServerRefusedError(details + answers.retry_window(exc)) from exc
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                raise self._unreachable(f"no answer within {timeout_s:g} s") from exc
            if code in _GONE:
                raise self._unreachable(answers.reason(details)) from exc
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise ServerRefusedError(
                    f"what answers at {self.server} does not know this request ({details}); "
                    "is it a fedplat server of this version?"
                ) from exc
            if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
                details = f"the server at {self.server} failed ({details}); its log says more"
            raise ServerRefusedError(details) from exc

    def _unreachable(self, reason: str) -> ServerUnreachableError:
        if problem := handshake.problem(self.server, ca=self.profile.ca, insecure=self.profile.insecure):
            return ServerUnreachableError(
                f"cannot talk to the server at {self.server}: {problem}", reason=problem, is_lasting=True
            )
        return ServerUnreachableError(
            f"no fedplat server answers at {self.server} ({reason}); is it running? start one with: fedplat-server run",
            reason=reason,
        )


def _channel(profile: Profile) -> grpc.Channel:
    if profile.insecure:
        return grpc.insecure_channel(
            profile.server, options=_CHANNEL_OPTIONS, compression=grpc.Compression.NoCompression
        )
    return grpc.secure_channel(
        profile.server,
        grpc.ssl_channel_credentials(profile.ca.encode() or None),
        options=_CHANNEL_OPTIONS,
        compression=grpc.Compression.NoCompression,
    )
