"""The model and the data: those of the private example, for other numbers of clients."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "private"))

from digits import client_data, evaluate, initial, train

__all__ = ["client_data", "evaluate", "initial", "train"]
