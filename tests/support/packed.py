"""Small packed datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.packed import PackedWriter


def examples(count: int, seed: int = 0) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Inputs [count, 3, 4], and targets of three classes that follow from them."""
    inputs = np.random.default_rng(seed).normal(size=(count, 3, 4)).astype(np.float32)
    return inputs, inputs.sum(axis=1).argmax(axis=1) % 3


def write_packed(folder: Path, count: int, rows: int, seed: int = 0) -> Path:
    """Pack `examples` into shards with this number of rows."""
    with PackedWriter(folder, rows * (3 * 4 * 4 + 8)) as writer:
        writer.add(*examples(count, seed))
    return folder


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
