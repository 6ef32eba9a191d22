"""Trainers that tests give to a server."""

from __future__ import annotations

from pathlib import Path

TRAINERS = """
import os, signal
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from fedplat.pytorch.server import ServerTrainer

HERE = Path(__file__).parent
inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.argmax(1) % 2)
loss = torch.nn.functional.cross_entropy
calls = 0

def module():
    return torch.nn.Linear(3, 2)

def fragile(outputs, targets):
    '''Kills its process in the middle, once.'''
    global calls
    calls += 1
    if calls == 50 and not (HERE / "died").exists():
        (HERE / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(outputs, targets)

def mended(outputs, targets):
    '''Raises until the operator has mended it.'''
    if not (HERE / "mended").exists():
        raise RuntimeError("no luck\\ntoday")
    return loss(outputs, targets)

def large(outputs, targets):
    '''Needs more memory than the first ranks have.'''
    if not (HERE / "elsewhere").exists():
        (HERE / "elsewhere").touch()
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")
    return loss(outputs, targets)

def infinite(outputs, targets):
    return (outputs * float("inf")).sum()

def no_data():
    raise FileNotFoundError("public.bin is not here")

public = ServerTrainer(model=module, data=data, evaluation=data)
killed = ServerTrainer(model=module, data=data, loss=fragile)
too_large = ServerTrainer(model=module, data=data, loss=large)
raises = ServerTrainer(model=module, data=data, loss=mended)
explodes = ServerTrainer(model=module, data=data, loss=infinite)
absent = ServerTrainer(model=module, data=no_data)
other = ServerTrainer(model=lambda: torch.nn.Linear(4, 2), data=data)
none = "not a trainer"
"""
NAMES = ("public", "killed", "too_large", "raises", "explodes", "absent", "other", "none")


def trainers(folder: Path) -> dict[str, str]:
    """Trainers by name, in a new file of a folder."""
    path = folder / "trainers.py"
    path.write_text(TRAINERS)
    return {name: f"{path}:{name}" for name in NAMES}


def learning(table: str, trainer: object = "public", **options: object) -> str:
    """A table of a job file."""
    chosen = {"trainer": trainer, "batch_size": 8, "learning_rate": 0.1, **options}
    return f"[{table}]\n" + "".join(f"{key} = {_in_toml(value)}\n" for key, value in chosen.items())


def _in_toml(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value).lower()
