"""How far a training is, on the disk: the newest whole checkpoint is found again, whatever was killed in between.

A checkpoint is a folder that `torch.distributed.checkpoint` writes, as safetensors: no byte of it can become code. All
ranks have the same values, so rank 0 writes them; any number of processes may read them.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fedplat import durable
from fedplat.pytorch.distributed import Ranks

_NAME = "step-{:012d}"
_logger = logging.getLogger(__name__)
_FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


class TrainingState:
    """What a training is after so many steps: the module's values, the optimizer's, and the losses so far."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._module, self._optimizer = module, optimizer
        self.done = 0
        self.losses = np.full(num_steps, np.nan)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name. What an optimizer keeps besides tensors are its options, which nobody changes."""
        module = {f"model.{name}": value for name, value in self._module.state_dict().items()}
        optimizer = {f"optimizer.{name}": value for name, value in self._optimizer_state().items()}
        tensors = {name: value for name, value in (module | optimizer).items() if isinstance(value, torch.Tensor)}
        return tensors | {"losses": torch.from_numpy(self.losses), "step": torch.tensor(self.done)}

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Goes on from what `tensors` gave, and another process perhaps has read."""
        self.done = int(tensors["step"].item())
        optimizer = self._optimizer_state()
        optimizer |= {name: tensors[key] for name in optimizer if (key := f"optimizer.{name}") in tensors}
        states.set_optimizer_state_dict(self._module, self._optimizer, optimizer, options=_FLAT)

    def _optimizer_state(self) -> dict[str, Any]:
        return dict(states.get_optimizer_state_dict(self._module, self._optimizer, options=_FLAT))


class Checkpoints:
    """The checkpoints of one training, in a folder of its own."""

    def __init__(self, folder: Path, every: int, ranks: Ranks) -> None:
        self._folder, self._every, self._ranks = folder, every, ranks

    def is_due(self, progress: TrainingState) -> bool:
        """Whether to save now: every so many steps, and at the end."""
        return progress.done % self._every == 0 or progress.done == len(progress.losses)

    def newest(self) -> str:
        """The name of the newest whole checkpoint that rank 0 sees, or nothing; the same on all ranks."""
        return self._ranks.broadcast(_newest(self._folder).encode()).decode()

    def restore(self, name: str, progress: TrainingState) -> None:
        """Goes on from a checkpoint, if it has a name. Raises `ValueError` for one that does not fit the training."""
        if not name:
            return
        path, tensors = self._folder / name, progress.tensors()
        try:
            with _by_itself():
                load(tensors, storage_reader=hf_storage.HuggingFaceStorageReader(os.fspath(path)), no_dist=True)
        except (CheckpointException, ValueError, RuntimeError) as exc:
            raise ValueError(
                f"the checkpoint {path} is not one of this training: expected that of the same trainer and job; "
                "remove it to begin anew"
            ) from exc
        progress.take(tensors)

    def save(self, progress: TrainingState) -> None:
        """Writes a checkpoint and removes the older ones. A crash leaves the old one, or the new one.

        Where it cannot be written, a warning says so, and the training goes on with the old one.
        """
        if not self._ranks.is_first:
            return
        whole = self._folder / _NAME.format(progress.done)
        part = whole.with_suffix(".part")
        try:
            self._write(progress, part)
            durable.rename_folder(part, whole)
        except (CheckpointException, OSError) as exc:
            _logger.warning("A checkpoint cannot be written: %s", exc, extra={"path": os.fspath(whole)})
            shutil.rmtree(part, ignore_errors=True)
            return
        for other in self._folder.iterdir():
            if other != whole:
                shutil.rmtree(other, ignore_errors=True)

    def _write(self, progress: TrainingState, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _by_itself():
            writer = hf_storage.HuggingFaceStorageWriter(os.fspath(folder))
            save(progress.tensors(), storage_writer=writer, no_dist=True)


def _newest(folder: Path) -> str:
    """The name of the newest whole checkpoint, or nothing."""
    if not folder.is_dir():
        return ""
    return max((path.name for path in folder.iterdir() if not path.suffix), default="")


@contextmanager
def _by_itself() -> Generator[None]:
    """Within it, `torch.distributed.checkpoint` does not warn that one process saves or loads alone: it shall."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
