"""The tests that need one GPU, and no server."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu.lines import Check, Line, Setting

NAME = "tests"
ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/core/ranks/test_device.py",
    "tests/core/simulation/engines/test_vmap.py",
    "tests/core/local/test_precision.py",
    "tests/core/packed/test_prefetch.py",
)


def measure(setting: Setting) -> Iterator[Line]:
    """Run the tests; on a CPU, or in a small run, only collect them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *FILES]
    if importlib.util.find_spec("pytest_benchmark"):
        command += ["-p", "no:benchmark"]  # it warns beside xdist, and warnings are errors
    statement = "the tests of one GPU pass"
    if setting.is_small or not setting.is_on_gpu:
        command.append("--collect-only")
        statement = "the tests of one GPU can be collected"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = (done.stdout.splitlines() or done.stderr.splitlines() or ["no output"])[-1]
    yield Check(part=NAME, statement=statement, passed=done.returncode == 0, found=found)
