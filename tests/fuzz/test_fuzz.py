"""Any bytes cause only our own errors, bounded memory, and no hang. `make fuzz` runs for longer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz import run, targets
from hostile import attacks

pytestmark = [pytest.mark.fault("F22", "F23"), pytest.mark.slow]
NUM_INPUTS = 1500


@pytest.mark.parametrize("name", targets.TARGETS)
def test_targets_survive_mutations_with_little_memory(name: str) -> None:
    seed = str(random.SystemRandom().randrange(2**32))
    command = [sys.executable, str(Path(run.__file__)), name, "--count", str(NUM_INPUTS), "--seed", seed]
    # Each thread of a numeric library has its own arena, which counts as memory.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=150)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    assert f"{name}: {NUM_INPUTS + len(targets.seeds(name))} inputs did no harm" in done.stdout


@pytest.mark.parametrize("name", targets.TARGETS)
def test_targets_survive_whatever_hypothesis_thinks_of(name: str) -> None:
    seeds = targets.seeds(name)

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(st.binary(max_size=300), st.builds(_mutation, st.sampled_from(seeds), st.randoms())))
    @example(b"")
    def feed(data: bytes) -> None:
        targets.feed(name, data)

    feed()


def _mutation(seed: bytes, rng: random.Random) -> bytes:
    return attacks.mutated(rng, seed)


def test_good_inputs_are_good() -> None:
    """Otherwise mutation would begin with rubbish."""
    for name in ("model", "update", "encoded_update", "codec", "state", "job_file", "labels", "ticket"):
        targets.TARGETS[name](targets.seeds(name)[0])


HARM = {
    "an error": "1 // 0",
    "memory": "bytearray(2**31)",
    "time": "[None for _ in iter(int, 1)]",
}
HARMED = """
import pathlib, signal, sys
from fuzz import run, targets
run.FOUND, run.HANG_S, targets.feed = pathlib.Path(sys.argv[1]), 0.2, lambda *_: {harm}
signal.signal(signal.SIGPROF, run.too_long)
run.limit_memory()
run.guarded("model", b"bad")
"""


@pytest.mark.parametrize("kind", HARM)
def test_harm_is_noticed(kind: str, tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", HARMED.format(harm=HARM[kind]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": tests})
    assert done.returncode == 1, done.stderr
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"bad"]
