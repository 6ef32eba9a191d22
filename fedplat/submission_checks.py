"""The checks of a new job that need no state of a server: `fedplat job check` and the server refuse the same jobs."""

from __future__ import annotations

from fedplat import job, model
from fedplat.codecs.container import Format
from fedplat.config import plugins, user_code
from fedplat.config.toml import format_value
from fedplat.errors import FedplatError, JobFileError, ModelError, PluginError, UserCodeError
from fedplat.job.checks import check_halves
from fedplat.rounds.protocols.base import find_training

MAX_JOB_FILE_BYTES = 1 << 18
MAX_MODEL_BYTES = 64 << 30


def check_size(job_file: str, max_bytes: int = MAX_JOB_FILE_BYTES) -> None:
    """Raise `JobFileError` if a job file has more bytes in UTF-8 than a server accepts."""
    if len(job_file.encode()) > max_bytes:
        raise JobFileError(f"it has more than {max_bytes} bytes")


def check_job(spec: job.JobSpec) -> None:
    """Raise `JobFileError` for a valid job that no server can run, although a simulation may."""
    algorithm = spec.config.get("algorithm")
    if isinstance(algorithm, str) and ":" in algorithm:
        raise JobFileError(
            f"config.algorithm = {format_value(algorithm)}: a job cannot name code of a client; expected the name of "
            "an algorithm, which clients add with --plugin algorithms.NAME"
        )
    check_halves(spec)
    if problem := find_training(spec).refuse_server(spec):
        raise JobFileError(problem)


def check_initial_model(parameters: model.Parameters, spec: job.JobSpec) -> None:
    """Check that a job can start from a model. The rule and codecs of an absent plugin are not asked.

    Raises `ModelError` for the model, or `JobFileError` if the code of a plugin fails.
    """
    if (first := find_training(spec).first_model(spec)) is None:
        _check_trained_model(parameters, spec)
    elif parameters.to_bytes() != first.to_bytes():
        raise ModelError("it is not the one that the job file defines; expected what fedplat job submit sends")


def _check_trained_model(parameters: model.Parameters, spec: job.JobSpec) -> None:
    if parameters.schema.num_floating == 0:
        raise ModelError("it has no floating-point tensor to train")
    if not parameters.is_finite():
        raise ModelError("it holds NaN or infinite values")
    if plugins.has_absent(spec):
        return
    try:
        with user_code.wrap_errors(f'aggregation.rule = "{plugins.name_of(spec.aggregation)}": misfit()'):
            misfit = job.build_rule(spec).requirements.explain_misfit(parameters.schema)
    except (PluginError, UserCodeError) as exc:
        raise JobFileError(str(exc)) from exc
    if misfit:
        raise ModelError(misfit)
    for key in ("uplink", "downlink"):
        if (codec := getattr(spec.compression, key)) is not None:
            try:
                with user_code.wrap_errors(f"compression.{key}"):
                    _ = Format(codec, parameters.schema).max_bytes  # of a plugin: any update needs it
            except FedplatError as exc:
                raise JobFileError(str(exc)) from exc
