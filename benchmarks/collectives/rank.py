"""One rank of the comparison, started by `compare.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the ranks do not import from the folder of their program

from collectives.implementations import make_trials
from fedplat.pytorch.distributed.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(make_trials))
