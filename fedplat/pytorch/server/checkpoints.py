"""Checkpoints of a training on disk: the newest complete one is found again after a crash at any point.

A checkpoint is a folder of safetensors files, which cannot contain code, with the offsets that
`torch.distributed.checkpoint` needs to read the parts of other ranks' tensors. Each rank writes the parts that no rank
before it has, while the training continues; the one that finishes last gives the folder its name. Names and shapes are
those of the whole model, so another layout, or a single process, can read it: each rank reads only its own parts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fedplat import durable
from fedplat.pytorch import distributed, training

_NAME = "step-{:012d}"
_FILE = "rank-{:05d}-of-{:05d}.safetensors"
_OPTIMIZER = "optimizer.state."
_logger = logging.getLogger(__name__)

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Sizes: TypeAlias = Mapping[str, TensorStorageMetadata]


class TrainingState:
    """The state of a training after some steps: the module, the optimizer, and the losses so far."""

    def __init__(self, trainee: training.Trainee, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._trainee, self._optimizer = trainee, optimizer
        self._trained = trainee.parameters()
        self.done = 0
        self.losses = np.full(num_steps, np.nan)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this process's part of the state by name. An optimizer's other entries do not change."""
        state = self._optimizer.state
        entries = {
            f"{_OPTIMIZER}{name}.{key}": value
            for name, parameter in self._trained.items()
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        return self._own_tensors() | entries

    def make_tensors(self, saved: Sizes) -> dict[str, torch.Tensor]:
        """Return the tensors to read a checkpoint into; the optimizer's are new, and have the shapes of the saved."""
        tensors = self._own_tensors()
        for key, found in saved.items():
            parameter = self._trained.get(key.removeprefix(_OPTIMIZER).rpartition(".")[0])
            if key.startswith(_OPTIMIZER) and parameter is not None:
                like = parameter.detach() if found.size == parameter.shape else torch.empty(found.size)
                tensors[key] = torch.empty_like(like, dtype=found.properties.dtype)
        return tensors

    def load_tensors(self, tensors: Tensors) -> None:
        """Restore the state from the result of `make_tensors`, into which a checkpoint was read."""
        self.done = int(tensors["step"].item())
        entries: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith(_OPTIMIZER):
                name, _, entry = key.removeprefix(_OPTIMIZER).rpartition(".")
                entries.setdefault(name, {})[entry] = value
        names = {id(parameter): name for name, parameter in self._trained.items()}
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        state = {number: entries.get(names.get(id(each), ""), {}) for number, each in enumerate(parameters)}
        state = {number: own for number, own in state.items() if own}
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": state})

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        model = {f"model.{name}": value for name, value in self._trainee.shared_tensors().items()}
        return model | {"losses": torch.from_numpy(self.losses), "step": torch.tensor(self.done)}


class Checkpoints:
    """The checkpoints of one training, in their own folder."""

    def __init__(self, folder: Path, every: int, ranks: distributed.Ranks) -> None:
        self._folder, self._every, self._ranks = folder, every, ranks
        self._writing: threading.Thread | None = None

    def is_due(self, progress: TrainingState) -> bool:
        """Return whether to save now: every `every` steps, and at the end."""
        return progress.done % self._every == 0 or progress.done == len(progress.losses)

    def newest(self) -> str:
        """Return the name of the newest complete checkpoint that rank 0 sees, or ""; the same on all ranks."""
        if self._ranks.is_first and self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.suffix:  # what an earlier process could not finish; no rank writes yet
                    shutil.rmtree(path, ignore_errors=True)
        return self._ranks.broadcast(_newest(self._folder).encode()).decode()

    def restore(self, name: str, progress: TrainingState) -> None:
        """Continue from a checkpoint, unless its name is "". Raises `ValueError` for one of another training."""
        if not name:
            return
        path = self._folder / name
        try:
            reader = hf_storage.HuggingFaceStorageReader(os.fspath(path))
            tensors = progress.make_tensors(_sizes(reader))
            with _ignore_single_process_warning():
                load(tensors, storage_reader=reader, no_dist=True)
        except (CheckpointException, ValueError, RuntimeError) as exc:
            raise ValueError(
                f"the checkpoint {path} does not belong to this training: expected one of the same trainer and job; "
                "remove it to start again"
            ) from exc
        progress.load_tensors(tensors)

    def save(self, progress: TrainingState) -> None:
        """Write a checkpoint, and remove the older ones, while the training continues; all ranks call it.

        Waits until this rank has written the last one. After a crash, the old or the new one is complete. If a rank
        cannot write its part, it logs a warning, and the old one stays.
        """
        self.close()
        tensors = progress.tensors()
        # The next step changes the tensors, perhaps before they are written.
        copied = [(name, offset, part.detach().cpu().clone()) for name, offset, part in self._divide(tensors)]
        whole = self._folder / _NAME.format(progress.done)
        self._writing = threading.Thread(target=self._write, args=(whole, copied), name="checkpoint", daemon=True)
        self._writing.start()

    def close(self) -> None:
        """Wait until this rank has written its part of the last checkpoint."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _divide(self, tensors: Tensors) -> list[_Part]:
        """Return the parts of tensors that this rank has, and none before it."""
        parts, ranks = _parts(tensors), self._ranks
        names = [
            msgspec.msgpack.decode(each, type=set[str]) for each in ranks.all_gather(msgspec.msgpack.encode([*parts]))
        ]
        earlier = set[str]().union(*names[: ranks.rank])
        return [part for key, part in parts.items() if key not in earlier]

    def _write(self, whole: Path, parts: list[_Part]) -> None:
        part = whole.with_suffix(".part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            file = part / _FILE.format(self._ranks.rank, self._ranks.size)
            write_file(file.with_suffix(".tmp"), parts)
            durable.sync(file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
            self._finish(part, whole)
        except Exception as exc:  # whatever it was, the training continues
            _logger.warning("A checkpoint cannot be written: %s", exc, extra={"path": os.fspath(whole)})
            shutil.rmtree(part, ignore_errors=True)

    def _finish(self, part: Path, whole: Path) -> None:
        """Complete a checkpoint if all ranks have written their parts."""
        if any(not (part / _FILE.format(rank, self._ranks.size)).exists() for rank in range(self._ranks.size)):
            return
        try:
            durable.rename_folder(part, whole)
        except FileNotFoundError:  # another rank has finished at the same time, and was first
            return
        for other in self._folder.iterdir():
            if other.stem < whole.name:
                shutil.rmtree(other, ignore_errors=True)


_Part: TypeAlias = tuple[str, tuple[int, ...], torch.Tensor]
"""The name of a tensor, the offset of a part in it, and the part's values."""


def _parts(tensors: Tensors) -> dict[str, _Part]:
    """Return the parts of tensors that this process has, each by a text that names it."""
    found: dict[str, _Part] = {}
    for name, tensor in tensors.items():
        offset, part = (0,) * tensor.ndim, tensor
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            part = tensor.to_local()
        if part.numel() or not tensor.numel():  # a rank may have nothing of a small tensor
            found[f"{name}{list(offset)}"] = (name, tuple(offset), part)
    return found


def write_file(path: Path, parts: list[_Part]) -> None:
    """Write parts of tensors to a safetensors file, with their offsets."""
    offsets = {name: {"saved_offsets": offset} for name, offset, _ in parts}
    tensors = {name: part.contiguous() for name, _, part in parts}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
    save_file(tensors, path, metadata)


def _sizes(reader: hf_storage.HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    found = reader.read_metadata().state_dict_metadata
    return {name: size for name, size in found.items() if isinstance(size, TensorStorageMetadata)}


def _newest(folder: Path) -> str:
    """Return the name of the newest complete checkpoint, or ""."""
    if not folder.is_dir():
        return ""
    return max((path.name for path in folder.iterdir() if not path.suffix), default="")


@contextmanager
def _ignore_single_process_warning() -> Generator[None]:
    """Ignore the warning of `torch.distributed.checkpoint` about a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
