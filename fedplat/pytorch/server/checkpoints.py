"""Checkpoints of a training on disk: the newest complete one is found again after a crash at any point.

A checkpoint is a folder that `torch.distributed.checkpoint` writes, as safetensors, which cannot contain code. All
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
    """The state of a training after some steps: the module, the optimizer, and the losses so far."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._module, self._optimizer = module, optimizer
        self.done = 0
        self.losses = np.full(num_steps, np.nan)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the whole state by name. An optimizer's other entries are its options, which do not change."""
        module = {f"model.{name}": value for name, value in self._module.state_dict().items()}
        optimizer = {f"optimizer.{name}": value for name, value in self._optimizer_state().items()}
        tensors = {name: value for name, value in (module | optimizer).items() if isinstance(value, torch.Tensor)}
        return tensors | {"losses": torch.from_numpy(self.losses), "step": torch.tensor(self.done)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore the state from the result of `tensors`, perhaps of another process."""
        self.done = int(tensors["step"].item())
        optimizer = self._optimizer_state()
        optimizer |= {name: tensors[key] for name in optimizer if (key := f"optimizer.{name}") in tensors}
        states.set_optimizer_state_dict(self._module, self._optimizer, optimizer, options=_FLAT)

    def _optimizer_state(self) -> dict[str, Any]:
        return dict(states.get_optimizer_state_dict(self._module, self._optimizer, options=_FLAT))


class Checkpoints:
    """The checkpoints of one training, in their own folder."""

    def __init__(self, folder: Path, every: int, ranks: Ranks) -> None:
        self._folder, self._every, self._ranks = folder, every, ranks

    def is_due(self, progress: TrainingState) -> bool:
        """Return whether to save now: every `every` steps, and at the end."""
        return progress.done % self._every == 0 or progress.done == len(progress.losses)

    def newest(self) -> str:
        """Return the name of the newest complete checkpoint that rank 0 sees, or ""; the same on all ranks."""
        return self._ranks.broadcast(_newest(self._folder).encode()).decode()

    def restore(self, name: str, progress: TrainingState) -> None:
        """Continue from a checkpoint, unless its name is "". Raises `ValueError` for one of another training."""
        if not name:
            return
        path, tensors = self._folder / name, progress.tensors()
        try:
            with _ignore_single_process_warning():
                load(tensors, storage_reader=hf_storage.HuggingFaceStorageReader(os.fspath(path)), no_dist=True)
        except (CheckpointException, ValueError, RuntimeError) as exc:
            raise ValueError(
                f"the checkpoint {path} does not belong to this training: expected one of the same trainer and job; "
                "remove it to start again"
            ) from exc
        progress.load_tensors(tensors)

    def save(self, progress: TrainingState) -> None:
        """Write a checkpoint and remove the older ones. After a crash, the old or the new one is complete.

        If the checkpoint cannot be written, log a warning and keep the old one; the training continues.
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
        with _ignore_single_process_warning():
            writer = hf_storage.HuggingFaceStorageWriter(os.fspath(folder))
            save(progress.tensors(), storage_writer=writer, no_dist=True)


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
