"""Submission: from a job and its initial model to a job on the server, and the transfer of models in chunks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from fedplat import errors, wire
from fedplat.admin.patience import Patience, Reachable
from fedplat.job import JobSpec, digest_job
from fedplat.model import Parameters
from fedplat.procedures import ProcedureResult
from fedplat.procedures.versions import read_result
from fedplat.wire.v1 import admin_pb2, model_pb2


class JobClient(Reachable, Protocol):
    """The calls that a submission makes (`AdminClient`)."""

    def upload_model(self, chunks: Iterable[bytes]) -> admin_pb2.UploadModelResponse:
        """Upload a model file."""
        ...

    def create_job(self, job_file: str, initial_digest: str, idempotency_key: str) -> admin_pb2.Job:
        """Create a job; for a known key, return the job that has it."""
        ...

    def show_job(self, job: str) -> admin_pb2.Job:
        """Return a job."""
        ...

    def export_model(
        self, job: str, version: int | None, path: Path, progress: ProgressCallback | None = None
    ) -> model_pb2.ModelRef:
        """Write a version of a job's model to a file."""
        ...

    def start(self, job: str) -> admin_pb2.Job:
        """Start a job."""
        ...


@dataclasses.dataclass(frozen=True)
class Submission:
    """A valid job file, and the model that it starts from, with the tensors that its rule adds."""

    text: str
    spec: JobSpec
    parameters: Parameters

    @property
    def digest(self) -> str:
        """The digest of the job (`fedplat.job.digest_job`)."""
        sha256 = hashlib.sha256()
        for piece in self.parameters.pieces:
            sha256.update(piece)
        return digest_job(self.spec, sha256.hexdigest())


def submit(
    client: JobClient,
    submission: Submission,
    *,
    start: bool = True,
    idempotency_key: str = "",
    progress: ProgressCallback | None = None,
    patience: Patience | None = None,
) -> admin_pb2.Job:
    """Upload the model, create the job and start it. Repeating a key returns the same job.

    While the server cannot be reached, `patience` retries with the same key, so that only one job is created.
    """
    waiting = patience or Patience(0.0, lambda text: None)
    chunks = functools.partial(model_chunks, submission.parameters, progress)
    return _submit(client, submission.text, chunks, waiting, idempotency_key, start=start)


def clone(
    client: JobClient,
    job: str,
    *,
    start: bool = True,
    idempotency_key: str = "",
    progress: ProgressCallback | None = None,
    patience: Patience | None = None,
) -> admin_pb2.Job:
    """Submit a job once more, with its job file and its version 0 as the initial model. See `submit`.

    The server may have removed that version, and then refuses.
    """
    waiting = patience or Patience(0.0, lambda text: None)
    found = waiting.run(client, lambda: client.show_job(job))
    with tempfile.TemporaryDirectory(prefix="fedplat-") as folder:
        path = Path(folder) / "initial.safetensors"
        client.export_model(found.job_id, 0, path, progress)
        return _submit(client, found.job_file, lambda: _file_chunks(path), waiting, idempotency_key, start=start)


def download_result(client: JobClient, job: str) -> ProcedureResult:
    """Return the result of a job with a procedure: its latest version. Raises `ProcedureError` and `ModelError`."""
    with tempfile.TemporaryDirectory(prefix="fedplat-") as folder:
        path = Path(folder) / "version.safetensors"
        client.export_model(job, None, path)
        found = read_result(Parameters.from_bytes(path.read_bytes()))
    if found is None:
        raise errors.ProcedureError(
            f"the job {job} has no result: its latest version is a message or a model; expected a job with [procedure] "
            "that is COMPLETED"
        )
    return found


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(wire.UPLOAD_CHUNK_BYTES):
            yield chunk


def _submit(
    client: JobClient,
    text: str,
    chunks: Callable[[], Iterable[bytes]],
    waiting: Patience,
    idempotency_key: str,
    *,
    start: bool,
) -> admin_pb2.Job:
    key = idempotency_key or uuid.uuid4().hex

    def create() -> admin_pb2.Job:
        # The model is uploaded again, too: a restarted server has removed models without a job.
        return client.create_job(text, client.upload_model(chunks()).digest, key)

    try:
        job = waiting.run(client, create)
    except errors.ServerUnreachableError as exc:
        exc.add_note(f"if the job was created nevertheless, submit again with --idempotency-key {key} to get it")
        raise
    if not start or job.status != admin_pb2.JOB_STATUS_DRAFT:
        return job
    try:
        return waiting.run(client, lambda: _start_draft(client, job.job_id))
    except errors.FedplatError as exc:
        exc.add_note(f"the job exists and is a draft; start it with: fedplat job start {job.job_id}")
        raise


def _start_draft(client: JobClient, job_id: str) -> admin_pb2.Job:
    """Start a draft. It may have been started already, if the answer to an earlier try was lost."""
    job = client.show_job(job_id)
    return client.start(job_id) if job.status == admin_pb2.JOB_STATUS_DRAFT else job


ProgressCallback = Callable[[int, int], object]
"""Called with the number of bytes transferred so far, and the total."""


def model_chunks(parameters: Parameters, progress: ProgressCallback | None = None) -> Iterator[bytes]:
    """Yield the safetensors file in chunks; `progress` is called with the bytes taken so far and the total."""
    done, total = 0, parameters.schema.file_size_bytes
    for part in (memoryview(parameters.schema.header), parameters.buffer.data):
        for start in range(0, len(part), wire.UPLOAD_CHUNK_BYTES):
            chunk = bytes(part[start : start + wire.UPLOAD_CHUNK_BYTES])
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)


class OutgoingModel:
    """A model that is being uploaded, in chunks of at most `wire.UPLOAD_CHUNK_BYTES`."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self._digest = hashlib.sha256()

    def requests(self) -> Iterator[admin_pb2.UploadModelRequest]:
        """Yield the messages of the upload."""
        for chunk in self._chunks:
            self._digest.update(chunk)
            yield admin_pb2.UploadModelRequest(data=chunk)

    def check(self, response: admin_pb2.UploadModelResponse) -> None:
        """Raise `ServerRefusedError` if the server stored other bytes than were sent."""
        sent = self._digest.hexdigest()
        if response.digest != sent:
            raise errors.ServerRefusedError(
                f"the server stored a model with the digest {response.digest or '(none)'}, but {sent} was sent; "
                "try again"
            )


def receive_model(
    messages: Iterable[admin_pb2.ExportModelResponse], file: BinaryIO, progress: ProgressCallback | None
) -> model_pb2.ModelRef:
    """Write a model that arrives to a file. Raises `ModelError` if it has another size or digest than announced."""
    model: model_pb2.ModelRef | None = None
    digest = hashlib.sha256()
    size = 0
    for message in messages:
        if model is None:
            model = message.model
        digest.update(message.data)
        size += file.write(message.data)
        if size > model.size_bytes:
            break
        if progress is not None:
            progress(size, model.size_bytes)
    if model is None or size != model.size_bytes or digest.hexdigest() != model.digest:
        expected = f"{model.size_bytes} bytes with the digest {model.digest}" if model is not None else "a model"
        raise errors.ModelError(
            f"the received model is damaged: expected {expected}, received {size} bytes with the digest "
            f"{digest.hexdigest()}; try again"
        )
    return model
