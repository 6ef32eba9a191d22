"""Sweeps: many simulations with other values of some keys, in parallel, and a table of their results.

`run("sweep.toml")` computes a sweep. Planning (`plan`, `schedule`) and the `table` are pure functions of the file and
of the results; `runner`, `pool` and `worker` compute runs, and `result` keeps them.
"""

from __future__ import annotations

from fedplat.sweep.file import SweepFile, read
from fedplat.sweep.result import SweepResult
from fedplat.sweep.runner import StepProgress, run
from fedplat.sweep.table import SweepRow

__all__ = ["StepProgress", "SweepFile", "SweepResult", "SweepRow", "read", "run"]
