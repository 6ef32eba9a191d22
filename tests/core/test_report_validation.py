"""Why an update does not fit is found in its header alone."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.rounds.states import Reason
from fedplat.rounds.transition import Verdict
from fedplat import report_validation

MIB = 2**20
MODEL = Parameters.from_arrays({"weight": np.zeros(4 * MIB, np.float32)})
NUM_REPORTS = 14


def upload(path: Path, tensors: dict[str, int], header_bytes: int | None = None) -> Path:
    """A file of float32 vectors of zeros, which takes no room on the disk; its header is padded to some length."""
    entries, end = dict[str, object](), 0
    for name, count in tensors.items():
        entries[name] = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = msgspec.json.encode(entries).ljust(header_bytes or 0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    path.write_bytes(MODEL.to_bytes())
    return path


@pytest.mark.parametrize("header_bytes", [101, 104])
@pytest.mark.fault("F23", "F46")
def test_memory_does_not_grow_with_a_misfit(base: Path, tmp_path: Path, header_bytes: int) -> None:
    """Neither with a header of an odd length, whose tensors would be copied, nor with one of another order."""
    odd = upload(tmp_path / "odd", {"a": 8 * MIB, "b": 0}, header_bytes)
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(NUM_REPORTS) as pool:
            checks = [pool.submit(report_validation.validate_file, odd, base, None) for _ in range(NUM_REPORTS)]
            answers = {check.result() for check in checks}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answers == {Verdict(Reason.REJECTED_SCHEMA, "tensor 'weight' is missing (1 in all)")}
    assert peak < 4 * MIB


@pytest.mark.fault("F46")
def test_a_header_that_is_far_too_long_is_not_read(base: Path, tmp_path: Path) -> None:
    long = upload(tmp_path / "long", {"weight": 4 * MIB}, 16 * MIB)
    tracemalloc.start()
    try:
        answer = report_validation.validate_file(long, base, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(answer, Verdict)
    assert answer.text.startswith(f"the header has {16 * MIB} bytes; the base version's file has ")
    assert peak < MIB
