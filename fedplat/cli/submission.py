"""From a job file to a job on the server."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from fedplat import initial, wire
from fedplat.cli.admin import AdminClient, Progress
from fedplat.errors import FedplatError, JobFileError
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.simulation import file as simulation_file
from fedplat.wire.v1 import admin_pb2


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job file that was found good, and the model that it starts from."""

    text: str
    spec: JobSpec
    parameters: Parameters


def load(path: Path) -> Submission:
    """Reads a job file, or the job of a simulation file, and makes its initial model. Raises `JobFileError`.

    The table `[simulation]` is checked, and left out: no server ever sees it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise JobFileError(f"the file cannot be read: {reason}") from exc
    folder = path.absolute().parent
    spec = simulation_file.parse(text, folder).job
    return Submission(simulation_file.job_text(text), spec, initial.of_job(spec, folder))


def submit(
    client: AdminClient,
    submission: Submission,
    *,
    start: bool = True,
    idempotency_key: str = "",
    progress: Progress | None = None,
) -> admin_pb2.Job:
    """Uploads the model, creates the job and starts it; the same key again returns the same job."""
    uploaded = client.upload_model(chunks(submission.parameters, progress))
    job = client.create_job(submission.text, uploaded.digest, idempotency_key or uuid.uuid4().hex)
    if not start or job.status != admin_pb2.JOB_STATUS_DRAFT:
        return job
    try:
        return client.start(job.job_id)
    except FedplatError as exc:
        exc.add_note(f"the job exists and is a draft; start it with: fedplat job start {job.job_id}")
        raise


def chunks(parameters: Parameters, progress: Callable[[int, int], object] | None = None) -> Iterator[bytes]:
    """The safetensors file in pieces for the wire; `progress` is told the bytes taken and the bytes in all."""
    done, total = 0, parameters.schema.file_size_bytes
    for part in (memoryview(parameters.schema.header), parameters.buffer.data):
        for start in range(0, len(part), wire.UPLOAD_CHUNK_BYTES):
            chunk = bytes(part[start : start + wire.UPLOAD_CHUNK_BYTES])
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)
