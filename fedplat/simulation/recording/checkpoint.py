"""Checkpoints of a simulation: folders that are written beside the last one, synced, and renamed when complete.

`checkpoint-N` has `checkpoint.json`, `model-V.safetensors` for each version in use, `state.bin` of the rule,
`residuals.safetensors` with a vector for each client, and `memories.safetensors` with the client states as tensors
`CLIENT/NAME/TENSOR`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
from msgspec import Struct

from fedplat import aggregate, durable, errors
from fedplat.config.decoding import prepare_type
from fedplat.model import Parameters
from fedplat.simulation.federated.base_models import Snapshot

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


def find(folder: Path) -> Checkpoint | None:
    """Return the last checkpoint of a folder, or None. Raises `ReplayError` if it cannot be read."""
    numbered = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    if not numbered:
        return None
    path = max(numbered)[1]
    return Checkpoint(path, _record(path).num_bytes)


def write(folder: Path, snapshot: Snapshot, num_bytes: int) -> None:
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


def read(checkpoint: Checkpoint) -> Snapshot:
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
