"""Submission: from a job and its initial model to a job on the server."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Protocol

from fedplat.admin.patience import Patience, Reachable
from fedplat.admin.transfer import ProgressCallback, chunks
from fedplat.errors import FedplatError, ServerUnreachableError
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2


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

    def start(self, job: str) -> admin_pb2.Job:
        """Start a job."""
        ...


@dataclasses.dataclass(frozen=True)
class Submission:
    """A valid job file, and the model that it starts from, with the tensors that its rule adds."""

    text: str
    spec: JobSpec
    parameters: Parameters


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
    key = idempotency_key or uuid.uuid4().hex
    waiting = patience or Patience(0.0, lambda text: None)

    def create() -> admin_pb2.Job:
        # The model is uploaded again, too: a restarted server has removed models without a job.
        uploaded = client.upload_model(chunks(submission.parameters, progress))
        return client.create_job(submission.text, uploaded.digest, key)

    try:
        job = waiting.run(client, create)
    except ServerUnreachableError as exc:
        exc.add_note(f"if the job was created nevertheless, submit again with --idempotency-key {key} to get it")
        raise
    if not start or job.status != admin_pb2.JOB_STATUS_DRAFT:
        return job
    try:
        return waiting.run(client, lambda: _start_draft(client, job.job_id))
    except FedplatError as exc:
        exc.add_note(f"the job exists and is a draft; start it with: fedplat job start {job.job_id}")
        raise


def _start_draft(client: JobClient, job_id: str) -> admin_pb2.Job:
    """Start a draft. It may have been started already, if the answer to an earlier try was lost."""
    job = client.show_job(job_id)
    return client.start(job_id) if job.status == admin_pb2.JOB_STATUS_DRAFT else job
