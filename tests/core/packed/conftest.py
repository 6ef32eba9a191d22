from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.packed import write_packed


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """300 examples in shards of 100: inputs float32[3, 4] and targets int64."""
    return write_packed(tmp_path / "packed", 300, rows=100)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
