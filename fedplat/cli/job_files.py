"""The job files that commands submit and check."""

from __future__ import annotations

from pathlib import Path

from fedplat import errors, initial, submission_checks
from fedplat.admin.submission import Submission
from fedplat.simulation.scenario import file as simulation_file


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
            raise errors.ModelError(f"it has {size_bytes} bytes; a server accepts {submission_checks.MAX_MODEL_BYTES}")
    except errors.ModelError as exc:
        raise errors.JobFileError(f"model.initial = {spec.model.initial!r}: {exc}") from exc
    return Submission(sent, spec, parameters)
