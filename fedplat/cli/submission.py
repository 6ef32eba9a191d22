"""Submission: from a job file to a job on the server."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

from fedplat import initial, submission_checks
from fedplat.admin import AdminClient, ProgressCallback
from fedplat.admin.transfer import chunks
from fedplat.cli.patience import Patience
from fedplat.errors import FedplatError, JobFileError, ModelError, ServerUnreachableError
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.simulation.scenario import file as simulation_file
from fedplat.wire.v1 import admin_pb2


@dataclasses.dataclass(frozen=True)
class Submission:
    """A valid job file, and the model that it starts from."""

    text: str
    spec: JobSpec
    parameters: Parameters


def load(path: Path, server_plugins: frozenset[tuple[str, str]] = frozenset()) -> Submission:
    """Read a job file, or the job of a simulation file, and build its initial model.

    Raises `JobFileError`, also for what every server refuses (`fedplat.submission_checks`).

    `server_plugins` are kinds and names that only the server knows, and whose options only the server checks. The table
    `[simulation]` is checked and then removed: it is not sent to the server.
    """
    text, folder = simulation_file.read_text(path), path.absolute().parent
    spec, sent = simulation_file.parse(text, folder, absent=server_plugins).job, simulation_file.job_text(text)
    submission_checks.check_size(sent)
    submission_checks.check_job(spec)
    parameters = initial.of_job(spec, folder)
    try:
        submission_checks.check_initial_model(parameters, spec)
        if (size_bytes := parameters.schema.file_size_bytes) > submission_checks.MAX_MODEL_BYTES:
            raise ModelError(f"it has {size_bytes} bytes; a server accepts {submission_checks.MAX_MODEL_BYTES}")
    except ModelError as exc:
        raise JobFileError(f"model.initial = {spec.model.initial!r}: {exc}") from exc
    return Submission(sent, spec, parameters)


def submit(
    client: AdminClient,
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


def _start_draft(client: AdminClient, job_id: str) -> admin_pb2.Job:
    """Start a draft. It may have been started already, if the answer to an earlier try was lost."""
    job = client.show_job(job_id)
    return client.start(job_id) if job.status == admin_pb2.JOB_STATUS_DRAFT else job
