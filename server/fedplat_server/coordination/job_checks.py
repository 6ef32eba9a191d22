"""Checks of a new job: its file is valid, this server can run it, and its initial model fits.

All raise `RefusedError`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedplat import errors, model, submission_checks
from fedplat.config import toml
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.config.toml_text import change_text
from fedplat.job import JobSpec, parse_job
from fedplat_server.errors import Code, RefusedError
from fedplat_server.storage import spool_file


def parse(job_file: str, max_bytes: int, plugins: Plugins = BUILTIN) -> JobSpec:
    """Parse a job file of at most `max_bytes` bytes in UTF-8, which may use the names of `plugins`."""
    try:
        submission_checks.check_size(job_file, max_bytes)
        spec = parse_job(job_file, plugins)
        submission_checks.check_job(spec)
    except (errors.JobFileError, errors.PluginError, errors.UserCodeError) as exc:
        raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc
    return spec


CHANGEABLE = ("retention", "retry")
"""The tables of a job file that an operator may change while the job runs."""


def change(job_file: str, changes: Sequence[str], max_bytes: int, plugins: Plugins = BUILTIN) -> tuple[str, JobSpec]:
    """Return a job file with other values of keys in `CHANGEABLE`, and its job. Raises `RefusedError`."""
    values: dict[str, object] = {}
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        table, dot, name = key.partition(".")
        if not equals or table not in CHANGEABLE or not re.fullmatch(r"[a-z_]+", name if dot else ""):
            raise RefusedError(
                Code.INVALID_REQUEST,
                f"{text[:100]!r}: expected KEY=VALUE with a key of [retention] or [retry], such as "
                "retention.versions=5",
            )
        try:
            values[key] = toml.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as exc:
            raise RefusedError(Code.INVALID_REQUEST, f"{text[:100]!r}: the value is not valid TOML: {exc}") from exc
    if not values:
        raise RefusedError(Code.INVALID_REQUEST, "there are no changes; expected KEY=VALUE")
    changed = change_text(job_file, values)
    return changed, parse(changed, max_bytes, plugins)


def check_is_runnable(spec: JobSpec, evaluators: Sequence[str], trainers: Sequence[str]) -> None:
    """Check that the server has the job's evaluator and trainers, and supports its `durability`.

    What only one kind of job needs is checked by its half (`ServerHalf.check_job`).
    """
    evaluator = spec.evaluation.server
    if evaluator is not None and evaluator not in evaluators:
        raise RefusedError(
            Code.NO_SUCH_EVALUATOR,
            f"{evaluator!r}; {list_names(evaluators)}. Start it with --evaluator {evaluator}=module:function, "
            "or leave evaluation.server out of the job file",
        )
    for table, learning in (("warm_start", spec.warm_start), ("server_step", spec.server_step)):
        if learning is not None and learning.trainer not in trainers:
            raise RefusedError(
                Code.NO_SUCH_TRAINER,
                f"{table}.trainer = {learning.trainer!r}; {list_names(trainers)}. Start it with --trainer "
                f"{learning.trainer}=module:object, or leave [{table}] out of the job file",
            )
    if spec.durability == "memory" and not spool_file.CAN_KEEP_IN_MEMORY:
        raise RefusedError(
            Code.INVALID_JOB_FILE,
            'durability = "memory": the server\'s platform has no files in memory (memfd, Linux); use "spool"',
        )


def list_names(names: Sequence[str]) -> str:
    """Return what the server has, for a message."""
    return f"it has {', '.join(names)}" if names else "it has none"


def check_initial_model(path: Path, spec: JobSpec) -> int:
    """Check that a job can start from the model in a file; return the size of the file in bytes."""
    try:
        submission_checks.check_initial_model(model.Parameters.open(path), spec)
    except FileNotFoundError as exc:
        raise RefusedError(Code.INVALID_MODEL, "upload it first (UploadModel)") from exc
    except errors.ModelError as exc:
        raise RefusedError(Code.INVALID_MODEL, str(exc)) from exc
    except errors.JobFileError as exc:
        raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc
    return path.stat().st_size
