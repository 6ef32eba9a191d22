"""From what a stopped run resumes: its checkpoints, and a log of training, which is replayed and not computed again.

`checkpoint-N` has `checkpoint.json`, `model-V.safetensors` for each version in use, `state.bin` of the rule,
`residuals.safetensors` with a vector for each client, and `memories.safetensors` with the client states as tensors
`CLIENT/NAME/TENSOR`.

Everything that the driver does follows from the simulation and from these results. So a second run that replays the
results of the first one makes the same decisions, in seconds, up to the last checkpoint. There it reads the models and
client states, and training continues. The result is bit-identical to that of a run that was never stopped.

The folder has `answers.jsonl`, one line for each result, and the last `checkpoint-N`: a folder that is renamed when it
is complete, with `checkpoint.json` and safetensors files. A resumed run cuts off the lines after the checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
from msgspec import Struct
from typing_extensions import override

from fedplat import aggregate, durable, errors
from fedplat.config.decoding import prepare_type
from fedplat.errors import ReplayError
from fedplat.model import Parameters
from fedplat.rounds import Assignment, Attempt, AttemptKey, JobState, ModelVersion, commands, states
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.federated.interface import Report, Snapshot, TrainingModel
from fedplat.simulation.federated.training import RealTraining
from fedplat.simulation.secure.groups import stand_in

_NAME = re.compile(r"checkpoint-(\d+)")
_RECORD, _STATE, _RESIDUALS, _MEMORIES = "checkpoint.json", "state.bin", "residuals.safetensors", "memories.safetensors"


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`; `num_bytes` is the size of the replay log when the checkpoint was written."""

    version: int
    models: list[int]
    step: float | None
    num_bytes: int


class Checkpoint(Struct, frozen=True):
    """A complete checkpoint on disk."""

    folder: Path
    num_bytes: int

    @property
    def version(self) -> int:
        """The latest model version in the checkpoint."""
        return int(self.folder.name.partition("-")[2])


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the last checkpoint of a folder, or None. Raises `ReplayError` if it cannot be read."""
    numbered = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    if not numbered:
        return None
    path = max(numbered)[1]
    return Checkpoint(path, _record(path).num_bytes)


def write_checkpoint(folder: Path, snapshot: Snapshot, num_bytes: int) -> None:
    """Write a checkpoint, and remove the earlier ones."""
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    record = _Record(snapshot.version, sorted(snapshot.models), snapshot.step, num_bytes)
    contents = {
        _RECORD: msgspec.json.encode(record),
        _STATE: aggregate.state_to_bytes(snapshot.state, snapshot.scalars, snapshot.memory),
        _RESIDUALS: _to_bytes({str(client): vector for client, vector in snapshot.residuals.items()}),
        _MEMORIES: _to_bytes(_flatten(snapshot.client_states)),
    }
    contents |= {_model_name(version): model.to_bytes() for version, model in snapshot.models.items()}
    for name, content in contents.items():
        (unfinished / name).write_bytes(content)
    target = folder / f"checkpoint-{snapshot.version:06}"
    shutil.rmtree(target, ignore_errors=True)
    durable.rename_folder(unfinished, target)
    for path in folder.glob("checkpoint-*"):
        if path != target and _NAME.fullmatch(path.name):
            shutil.rmtree(path)


def read_checkpoint(checkpoint: Checkpoint) -> Snapshot:
    """Read a snapshot. Raises `ReplayError` if a file is missing or damaged."""
    folder, record = checkpoint.folder, _record(checkpoint.folder)
    try:
        content = (folder / _STATE).read_bytes()
        (state, scalars), memory = aggregate.state_from_bytes(content), aggregate.memory_from_bytes(content)
        residuals = _from_bytes((folder / _RESIDUALS).read_bytes())
        client_states = _from_bytes((folder / _MEMORIES).read_bytes())
        models = {
            version: Parameters.from_bytes((folder / _model_name(version)).read_bytes()) for version in record.models
        }
    except (OSError, errors.ModelError) as exc:
        raise errors.ReplayError(f"{folder} cannot be used: {exc}; remove it to start again") from exc
    return Snapshot(
        version=record.version,
        models=models,
        state=state,
        scalars=scalars,
        memory=memory,
        residuals={int(client): vector for client, vector in residuals.items()},
        client_states=_unflatten(client_states),
        step=record.step,
    )


def _model_name(version: int) -> str:
    return f"model-{version}.safetensors"


def _record(folder: Path) -> _Record:
    try:
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=prepare_type(_Record))
    except (OSError, msgspec.MsgspecError) as exc:
        raise errors.ReplayError(f"{folder} cannot be used: {exc}; remove it to start again") from exc


def _to_bytes(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    return Parameters.from_arrays(arrays).to_bytes()


def _from_bytes(content: bytes) -> Mapping[str, npt.NDArray[Any]]:
    return Parameters.from_bytes(content)


def _flatten(states: Mapping[int, Mapping[str, Parameters]]) -> dict[str, npt.NDArray[Any]]:
    return {
        f"{client}/{name}/{tensor}": array
        for client, state in states.items()
        for name, parameters in state.items()
        for tensor, array in parameters.items()
    }


def _unflatten(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[int, dict[str, Parameters]]:
    grouped: dict[int, dict[str, dict[str, npt.NDArray[Any]]]] = {}
    for path, array in arrays.items():
        client, name, tensor = path.split("/", 2)
        grouped.setdefault(int(client), {}).setdefault(name, {})[tensor] = array
    return {
        client: {name: Parameters.from_arrays(tensors) for name, tensors in state.items()}
        for client, state in grouped.items()
    }


RecordedResult = dict[str, Any]
ANSWERS = "answers.jsonl"


class ReplayLog(TrainingModel):
    """Wraps training: replays the results in a folder, then computes further ones and writes them there.

    `identity` is a text that equal simulations share. Raises `ReplayError` for the folder of another simulation, or one
    that cannot be read. A checkpoint is written after every `every`-th version, if `due` returns true for it.
    """

    one_at_a_time = True

    def __init__(
        self,
        learning: RealTraining,
        folder: Path,
        identity: str,
        every: int = 1,
        due: Callable[[int], bool] = lambda version: True,
    ) -> None:
        self._learning, self._folder, self._every, self._due = learning, folder, every, due
        self._expected: dict[tuple[int, int], DeviceAssignment] = {}
        self._sizes = learning.sizes
        self._checkpoint = find_checkpoint(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ANSWERS
        self._replay = _read(path, self._checkpoint.num_bytes, identity) if self._checkpoint is not None else []
        self._next = 0
        self._file = path.open("r+b" if self._checkpoint is not None else "wb")
        if self._checkpoint is not None:
            self._file.truncate(self._checkpoint.num_bytes)
            self._file.seek(0, 2)
        else:
            self._write({"simulation": identity})

    @property
    def is_replaying(self) -> bool:
        """True if results are still read from the folder."""
        return self._next < len(self._replay)

    @property
    @override
    def sizes(self) -> Sizes:
        return self._sizes if self.is_replaying else self._learning.sizes

    @property
    def learning(self) -> RealTraining:
        """The wrapped training; its model is the latest one as soon as nothing is replayed any more."""
        return self._learning

    def close(self) -> None:
        """Close the file of results; the folder stays."""
        self._file.close()

    @override
    def first_version(self) -> ModelVersion:
        return self._learning.version_zero() if self._replay else self._learning.first_version()

    @override
    def track(self, assignment: Assignment) -> None:
        self._learning.track(assignment)  # during a replay too: a checkpoint does not have the open assignments

    @override
    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        if self.is_replaying:
            self._expected |= {(task.client, task.number): task for task in tasks}
        else:
            self._learning.expect(tasks)

    @override
    def report(self, task: DeviceAssignment) -> Report:
        if not self.is_replaying:
            report = self._learning.report(task)
            self._write(_of_report(task, report))
            return report
        self._expected.pop((task.client, task.number), None)
        return _to_report(task, self._take("client", task.client))

    @override
    def update_bytes(self, round: int) -> float:
        return self._learning.update_bytes(round)

    @override
    def num_entries(self, round: int) -> int:
        return self._learning.num_entries(round)

    @override
    def begin_step(self, attempt: Attempt) -> None:
        if not self.is_replaying:
            self._learning.begin_step(attempt)

    @override
    def take_step(self, task: DeviceAssignment) -> bytes:
        # A checkpoint is of a moment without open attempts, so the messages before it are not read any more.
        return stand_in(task.client, task.phase) if self.is_replaying else self._learning.take_step(task)

    @override
    def drop(self, task: DeviceAssignment) -> None:
        if self.is_replaying:
            self._expected.pop((task.client, task.number), None)
        else:
            self._learning.drop(task)

    @override
    def forget(self, key: AttemptKey, client_id: str) -> None:
        self._learning.forget(key, client_id)  # during a replay it has received nothing

    @override
    def fold(self, command: commands.Fold) -> AggregationFailed | None:
        subject = [*command.key[1:], command.assignment.client_id]
        if not self.is_replaying:
            failed = self._learning.fold(command)
            if failed is not None:  # successful folds have no line
                self._write({"fold": subject, "failed": failed.text})
            return failed
        if self._replay[self._next].get("fold") != subject:
            return None
        return AggregationFailed(command.key, self._take("fold", subject)["failed"], is_lasting=True)

    @override
    def restart(self, command: commands.Restart) -> None:
        self._learning.restart(command)  # during a replay it has folded nothing

    @override
    def commit(self, command: commands.Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        if self.is_replaying:
            result = self._take("attempt", list(command.key[1:]))
            if "failed" in result:
                return AggregationFailed(command.key, result["failed"], is_lasting=True)
            return AttemptAggregated(command.key, ModelVersion(**result["version"]))
        outcome = self._learning.commit(command, job)
        result: RecordedResult = {"attempt": list(command.key[1:])}
        if isinstance(outcome, AggregationFailed):
            result["failed"] = outcome.text
        else:
            result["version"] = {name: getattr(outcome.version, name) for name in ModelVersion.__struct_fields__}
        self._write(result)
        return outcome

    @override
    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        if not self.is_replaying:
            scores = self._learning.settle(key, version)
            self._write({"settled": list(key[1:]), "scores": dict(scores), "step": self._learning.sizes.step})
            if version is not None and version % self._every == 0 and self._due(version):
                self._write_checkpoint()
            return scores
        result = self._take("settled", list(key[1:]))
        self._sizes = self._sizes._replace(step=result["step"])
        if not self.is_replaying:
            assert self._checkpoint is not None
            waiting = [task for task in self._expected.values() if not task.is_over]
            self._learning.restore(read_checkpoint(self._checkpoint), waiting)
            self._expected.clear()
        return result["scores"]

    def _write_checkpoint(self) -> None:
        snapshot = self._learning.snapshot()
        if snapshot is not None:
            self._file.flush()
            os.fsync(self._file.fileno())  # a checkpoint is of no use without the lines before it
            write_checkpoint(self._folder, snapshot, self._file.tell())

    def _write(self, result: RecordedResult) -> None:
        self._file.write(json.dumps(result, separators=(",", ":")).encode() + b"\n")

    def _take(self, name: str, expected: object) -> RecordedResult:
        result = self._replay[self._next]
        self._next += 1
        if result.get(name) != expected:
            raise ReplayError(
                f"{self._folder / ANSWERS}, line {self._next + 1}: expected an answer for {name} {expected}; it was "
                "written by another version of fedplat or for other data; remove the folder to start again"
            )
        return result


def _read(path: Path, num_bytes: int, identity: str) -> list[RecordedResult]:
    """Return the results up to a checkpoint. Raises `ReplayError`."""
    try:
        content = path.read_bytes()[:num_bytes]
        if len(content) != num_bytes:
            raise ValueError(f"it has {len(content)} bytes; its checkpoint expects at least {num_bytes}")
        head, *results = [json.loads(line) for line in content.splitlines()]
    except (OSError, ValueError) as exc:
        raise ReplayError(f"{path} cannot be used: {exc}; remove the folder to start again") from exc
    if head != {"simulation": identity}:
        raise ReplayError(
            f"{path} belongs to another simulation; resume with the same file, seed and data, or choose another folder"
        )
    return results


def _of_report(task: DeviceAssignment, report: Report) -> RecordedResult:
    result: RecordedResult = {"client": task.client}
    if isinstance(report, UpdateRejected):
        return result | {"reason": report.reason.value, "text": report.text}
    return result | {
        "digest": report.digest,
        "examples": report.num_examples,
        "metrics": dict(report.metrics),
        "bytes": report.update_bytes,
        "norm": report.norm,
    }


def _to_report(task: DeviceAssignment, result: RecordedResult) -> Report:
    if "reason" in result:
        return UpdateRejected(task.key, task.client_id, states.Reason(result["reason"]), result["text"])
    return UpdateReported(
        task.key,
        task.client_id,
        result["digest"],
        result["examples"],
        result["metrics"],
        result["bytes"],
        result.get("norm"),
    )
