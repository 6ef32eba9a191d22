"""The task folder, version 1: what the client writes for a program, and what the program returns.

docs/task-folder.md describes it for authors of programs. What a program returns is untrusted: each file is opened
without following links, bounded, read whole and checked, and every error names the file.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta

from fedplat import claims, durable, system, texts
from fedplat.config.decoding import prepare_type
from fedplat.errors import ModelError
from fedplat.model import SERVER, Parameters, Schema
from fedplat_client.errors import ExternalTaskError
from fedplat_client.task import EvaluateResult, Scalar, Task, TrainResult
from fedplat_client.trainers.learner import seed_of

VERSION = 1
STATE_ENTRY = "program"
"""The entry of the client state that a program has to itself."""
MAX_RESULT_BYTES = 64 * 2**10
MAX_LOG_BYTES = 64 * 2**20
KEPT_LOG_BYTES = 64 * 2**10
"""How much of the end of a log is kept after a failure."""
MAX_HEADER_EXCESS_BYTES = 2**20
"""How much longer than the model's file an update may be, since its header may be formatted in another way."""
_MAX_ERROR_BYTES = 500
_MAX_PROGRESS_BYTES = 64
_MAX_KIND_BYTES = 64
_TASK, _MODEL, _STATE = "task.json", "model.safetensors", "state.safetensors"
_RESULT, _UPDATE, _TRAINED, _NEW_STATE = (
    "result.json",
    "update.safetensors",
    "model-out.safetensors",
    "state-out.safetensors",
)
_STOP, _PROGRESS, _LOG, _KIND = "stop", "progress", "log", ".kind"


class TaskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a program: the content of `task.json`."""

    version: Literal[1]
    job_id: str
    job_name: str
    round: int
    attempt: int
    num_rounds: int
    task: Literal["train", "evaluate"]
    trainer: str
    config: dict[str, Scalar]
    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    deadline_s: float | None
    client_state: bool


class ProgramResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of a program: the content of `result.json`."""

    num_examples: float | None = None
    metrics: dict[str, float] = {}
    error: Annotated[str, Meta(max_length=_MAX_ERROR_BYTES)] = ""


@dataclass(frozen=True)
class TaskFolder:
    """The folder of one task."""

    path: Path

    @classmethod
    def create(cls, path: Path, task: Task, *, evaluates: bool, kind: str) -> TaskFolder:
        """Write the folder of a task, which appears under its name when it is complete.

        `kind` is the kind of what will work on it. Raises `ExternalTaskError`.
        """
        state = task.client_state.get(STATE_ENTRY)
        described = _describe(task, has_state=state is not None, evaluates=evaluates)
        temporary = path.with_name(f".{path.name}.new")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            _write(temporary / _MODEL, *task.parameters.pieces)
            if state is not None:
                _write(temporary / _STATE, *state.pieces)
            _write(temporary / _TASK, msgspec.json.format(msgspec.json.encode(described)) + b"\n")
            _write(temporary / _KIND, kind.encode())
            temporary.rename(path)
        except OSError as exc:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ExternalTaskError(
                f"the task folder {path} cannot be written: {exc}; free space, or name another place with --task-root"
            ) from exc
        return cls(path)

    @property
    def name(self) -> str:
        """Name of the folder, which no other task has; jobs of Slurm and containers have it, too."""
        return self.path.name

    @property
    def kind(self) -> str:
        """The kind of what works on the folder; empty if the folder is not readable."""
        with contextlib.suppress(OSError, ExternalTaskError, UnicodeDecodeError):
            return self.read(_KIND, _MAX_KIND_BYTES).decode("ascii")
        return ""

    @property
    def has_result(self) -> bool:
        """True if the program has written `result.json`, which is the last file that it writes."""
        return os.path.lexists(self.path / _RESULT)

    def open_log(self) -> BinaryIO:
        """Open the log, to which the program's output is appended. Raises `ExternalTaskError`."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | system.O_NOFOLLOW | system.O_BINARY
            return open(os.open(self.path / _LOG, flags, 0o600), "ab")
        except OSError as exc:
            raise ExternalTaskError(f"{self.path / _LOG} cannot be written: {exc}") from exc

    def write(self, name: str, text: str) -> None:
        """Write a small file, which appears when it is complete; best effort."""
        temporary = self.path / f".{name}.new"
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            _write(temporary, text.encode())
            temporary.replace(self.path / name)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a file that a program has written. Raises `FileNotFoundError`, or `ExternalTaskError`."""
        with self._open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise ExternalTaskError(f"{name} has {size:,} bytes; at most {max_bytes:,} are accepted")
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ExternalTaskError(f"{name} grows while it is read; write it before the program ends")
        return content

    def request_stop(self, reason: str) -> None:
        """Tell the program that its task must end."""
        self.write(_STOP, f"{reason}\n")

    def read_progress(self) -> float | None:
        """Return the fraction that the program has written; None without one. Raises `ValueError` for another text."""
        try:
            text = self.read(_PROGRESS, _MAX_PROGRESS_BYTES).decode("ascii").strip()
        except FileNotFoundError:
            return None
        except (ExternalTaskError, UnicodeDecodeError) as exc:
            raise ValueError(str(exc)) from exc
        if not text:  # a program that does not rename has just opened it
            return None
        fraction = float(text)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"it is {text}")
        return fraction

    def read_log(self, start: int, max_bytes: int) -> tuple[bytes, int]:
        """Return at most `max_bytes` of the log from `start` on, or of its end, and the position after them.

        Raises `ExternalTaskError` for a log that is too long.
        """
        try:
            with self._open(_LOG) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_LOG_BYTES:
                    raise ExternalTaskError(f"the log has {size:,} bytes; at most {MAX_LOG_BYTES:,} are accepted")
                start = max(start, size - max_bytes)
                file.seek(start)
                content = file.read(max_bytes)
                return content, start + len(content)
        except FileNotFoundError:
            return b"", start

    def read_training(self, task: Task) -> TrainResult:
        """Return the result of a training, and put its client state into the task. Raises `ExternalTaskError`."""
        result = self._read_result()
        present = [name for name in (_UPDATE, _TRAINED) if os.path.lexists(self.path / name)]
        if len(present) != 1:
            raise ExternalTaskError(
                f"the program has written {' and '.join(present) or 'neither'}; expected exactly one of "
                f"{_UPDATE} (trained minus base) and {_TRAINED}"
            )
        values = self._read_model(present[0], task.parameters.schema.uploaded)
        state = self._read_state(task.control.options.cache_limit_bytes)
        with _naming(_RESULT):
            assert result.num_examples is not None
            trained = TrainResult(
                parameters=values if present[0] == _TRAINED else None,
                delta=values if present[0] == _UPDATE else None,
                num_examples=result.num_examples,
                metrics=result.metrics,
            )
        if state is not None:
            task.client_state.put(STATE_ENTRY, state)
        return trained

    def read_evaluation(self) -> EvaluateResult:
        """Return the result of an evaluation. Raises `ExternalTaskError`."""
        result = self._read_result()
        with _naming(_RESULT):
            assert result.num_examples is not None
            return EvaluateResult(num_examples=result.num_examples, metrics=result.metrics)

    def read_error(self) -> str:
        """Return the error that the program states in `result.json`; empty without one."""
        try:
            return texts.shorten(self._decode_result().error, _MAX_ERROR_BYTES)
        except ExternalTaskError:
            return ""

    def remove(self) -> None:
        """Delete the folder; best effort."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _read_result(self) -> ProgramResult:
        result = self._decode_result()
        if result.error:
            raise ExternalTaskError(f"the program says: {texts.shorten(result.error, _MAX_ERROR_BYTES)}")
        if result.num_examples is None:
            raise ExternalTaskError(f"{_RESULT} has no num_examples; expected the number of examples, such as 10")
        with _naming(_RESULT):
            if problem := claims.check_examples(result.num_examples) or claims.check_metrics(result.metrics):
                raise ValueError(problem)
        return result

    def _decode_result(self) -> ProgramResult:
        try:
            content = self.read(_RESULT, MAX_RESULT_BYTES)
        except FileNotFoundError as exc:
            raise ExternalTaskError(
                f"the program did not write {_RESULT}; expected it with num_examples and metrics"
            ) from exc
        try:
            return msgspec.json.decode(content, type=prepare_type(ProgramResult))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ExternalTaskError(
                f"{_RESULT} cannot be read: {texts.shorten(str(exc), 200)}; expected JSON such as "
                '{"num_examples": 10, "metrics": {"loss": 0.5}}'
            ) from exc

    def _read_model(self, name: str, expected: Schema) -> Parameters:
        """Return values with the tensors of a schema; those that the server owns are left out."""
        values = self._read_tensors(name, expected.file_size_bytes + MAX_HEADER_EXCESS_BYTES)
        if values.schema != expected:
            own = {each: array for each, array in values.items() if not each.startswith(SERVER)}
            values = Parameters.zeros(expected)
            with _naming(name):
                values.assign(own)
        _require_finite(name, values)
        return values

    def _read_state(self, max_bytes: int) -> Parameters | None:
        if not os.path.lexists(self.path / _NEW_STATE):
            return None
        return self._read_tensors(_NEW_STATE, max_bytes)

    def _read_tensors(self, name: str, max_bytes: int) -> Parameters:
        content = self.read(name, max_bytes)
        with _naming(name):
            return Parameters.from_bytes(content)

    def _open(self, name: str) -> BinaryIO:
        """Open a regular file for reading. Raises `FileNotFoundError`, or `ExternalTaskError`."""
        path = self.path / name
        try:
            # A FIFO without a writer would block, and a link could name any file of this user.
            descriptor = os.open(path, os.O_RDONLY | system.O_NOFOLLOW | system.O_NONBLOCK | system.O_BINARY)
        except FileNotFoundError:
            raise
        except OSError as exc:
            what = "is a symbolic link" if exc.errno == errno.ELOOP else f"cannot be read: {exc.strerror}"
            raise ExternalTaskError(f"{name} {what}; expected a regular file") from exc
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ExternalTaskError(f"{name} is not a regular file; expected one")
        return open(descriptor, "rb")


class _naming(contextlib.AbstractContextManager[None]):
    """A block whose errors name a file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, ValueError | ModelError):
            raise ExternalTaskError(f"{self._name} cannot be used: {exc}") from exc


def _describe(task: Task, *, has_state: bool, evaluates: bool) -> TaskDescription:
    for name, value in task.config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ExternalTaskError(f"the config {name!r} is {value}, which JSON cannot hold; expected a finite number")
    return TaskDescription(
        version=VERSION,
        job_id=task.job_id,
        job_name=task.job_name,
        round=task.round,
        attempt=task.attempt,
        num_rounds=task.num_rounds,
        task="evaluate" if evaluates else "train",
        trainer=task.name,
        config=dict(task.config),
        seed=seed_of(task, 0),
        deadline_s=round(task.remaining_s, 3) if math.isfinite(task.remaining_s) else None,
        client_state=has_state,
    )


def _require_finite(name: str, values: Parameters) -> None:
    if values.is_finite():
        return
    bad = next(each for each, array in values.items() if not Parameters.from_arrays({each: array}).is_finite())
    raise ExternalTaskError(
        f"tensor {texts.quote(bad)} in {name} has NaN, infinity, or a number beyond float32; expected finite numbers"
    )


def _write(path: Path, *pieces: durable.Bytes) -> None:
    """Write a new file, which only its owner may read. A crash needs no sync: the folder is written again."""
    with open(durable.create(path, 0o400), "wb", buffering=0) as file:
        for piece in pieces:
            durable.write_all(file.fileno(), piece)
