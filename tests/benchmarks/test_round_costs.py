"""benchmarks/round_costs.py: what it counts is what the programs do, and a count above its bound is reported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import metered
import round_costs

PROGRAM = """
import hashlib, mmap, os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import metered

path, file = Path(sys.argv[1]), Path(sys.argv[2])
counts = metered.Counts(path)
metered.count_calls(counts)
metered.count_hashes(counts)
metered.count_hand_overs(counts)
with ThreadPoolExecutor() as pool:
    assert pool.submit(int).result() == 0
metered.count_reads(counts)
metered.count_maps(counts)
with file.open("wb") as writing:
    os.fsync(writing.fileno())
    os.fdatasync(writing.fileno())
assert hashlib.sha256(b"123").hexdigest() == hashlib.new("sha256", b"123").hexdigest()
with file.open("rb") as reading:
    hashlib.file_digest(reading, "sha256")
whole = hashlib.sha256()
whole.update(memoryview(bytes(1000)))
update = file.parent / "uploads" / "update"
update.parent.mkdir()
update.write_bytes(bytes(100))
assert update.read_bytes() == bytes(100)
with update.open("rb", buffering=0) as reading:
    os.fsync(reading)
    hashlib.file_digest(reading, "sha256")
    os.preadv(reading.fileno(), [bytearray(10)], 0)
    assert mmap.mmap(reading.fileno(), 0, access=mmap.ACCESS_READ)[:] == bytes(100)
assert len(mmap.mmap(-1, 1000)) == 1000
file.rename(f"{file}.moved")
Path(f"{file}.moved").unlink()
"""
WORK = round_costs.WORKS["1MB"]


def test_a_program_is_counted(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    folder = Path(metered.__file__).parent
    command = [sys.executable, "-c", PROGRAM, str(counts), str(tmp_path / "file")]
    subprocess.run(command, check=True, cwd=folder)
    expected = {
        "syncs": 3,
        "update syncs": 1,
        "unlinks": 1,
        "renames": 1,
        "hashed": 2 * 3 + 100 + 1000,
        "read back": 3 * 100 + 10,
    }
    expected |= {"hand-overs": 1}
    assert metered.read_counts(counts) == dict.fromkeys(metered.NAMES, 0) | expected


def test_a_cost_is_what_more_rounds_cost_more(tmp_path: Path) -> None:
    lines = "\n".join(["100.0 1.0 0.5", "102.0 2.0 1.0", "103.0 2.25 1.125", "105.0 2.75 1.5", ""])
    cost = round_costs.cost_of_lines(lines)
    assert cost == {"user": (2.75 - 2.0) / 2, "kernel": (1.5 - 1.0) / 2, "wall": 1.5}


@pytest.mark.parametrize("name", sorted(round_costs.BOUNDS[WORK.name]))
def test_a_count_above_its_bound_is_named(name: str) -> None:
    within = dict(round_costs.BOUNDS[WORK.name])
    assert round_costs.exceeded_bounds(WORK, within) == []
    (line,) = round_costs.exceeded_bounds(WORK, within | {name: within[name] + 0.5})
    assert line.startswith(f"1MB x 10: {name} is {within[name] + 0.5:.2f} in a round; expected at most")


@pytest.mark.slow
def test_rounds_cost_at_most_their_bounds() -> None:
    work = dataclasses.replace(round_costs.WORKS["4KB"], rounds=24, short=4)
    counts = round_costs.count(work)
    assert round_costs.exceeded_bounds(work, counts) == []
    assert counts["server transactions"] > 1.0
    assert counts["server syncs"] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("1MB-alone", 10), ("100MB-alone", 3)])
def test_rounds_of_a_large_model_cost_at_most_their_bounds(name: str, rounds: int) -> None:
    work = dataclasses.replace(round_costs.WORKS[name], rounds=rounds, short=1)
    counts = round_costs.count(work)
    assert round_costs.exceeded_bounds(work, counts) == []
    assert counts["server read back"] > 0.9
    assert counts["update syncs"] > 0.9
    assert counts["client peak"] > 0.0
