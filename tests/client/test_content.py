"""What a client uploads, in parts from any byte on: content in memory, and updates that are computed meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedplat import wire
from fedplat.model import Parameters
from fedplat_client._work.content import Content, Outgoing, StreamedUpdate

FAST, SLOW = (0.01, wire.CHUNK_BYTES), (5.0, wire.UPLOAD_CHUNK_BYTES)
BASE = Parameters.from_arrays({"weight": np.arange(10**6, dtype=np.float32), "steps": np.arange(5)})
TRAINED = Parameters.from_arrays({"weight": np.full(10**6, 0.1, np.float32), "steps": np.arange(5) + 2})
UPDATE = TRAINED.minus(BASE)


def streamed() -> StreamedUpdate:
    return StreamedUpdate(BASE.difference_to(TRAINED))


def parts_of(content: Outgoing, start: int, seconds: float = 0.0) -> list[bytes]:
    """The parts of a content, each of which takes its receiver some seconds."""
    return list(map(bytes, content.split(start, itertools.count(0.0, seconds).__next__)))


@pytest.mark.parametrize("make", [lambda: Content(UPDATE.pieces), streamed])
@pytest.mark.parametrize(("seconds", "largest"), [FAST, SLOW])
def test_parts_grow_where_the_line_is_fast(make: Callable[[], Outgoing], seconds: float, largest: int) -> None:
    file, header = UPDATE.to_bytes(), len(UPDATE.schema.header)
    content = make()
    assert content.size_bytes == len(file)
    for start in (0, 1, header, header + 1, len(file) - 1, len(file)):
        parts = parts_of(content, start, seconds)
        assert b"".join(parts) == file[start:]
        assert max(map(len, parts), default=0) == min(largest, len(file) - start)
    assert content.digest == hashlib.sha256(file).hexdigest()
    assert content.to_bytes() == file


@pytest.mark.parametrize("starts", [(), (0,), (0, 777, 300_001, 5), (len(UPDATE.to_bytes()),), (2_000_003, 0)])
def test_the_digest_of_a_streamed_update_is_that_of_its_file_however_it_was_sent(starts: tuple[int, ...]) -> None:
    """The server may have more bytes or fewer than the client has computed: its disk, or a lost answer."""
    content = streamed()
    for start in starts:
        parts = content.split(start, float)
        sent = bytes(next(parts, b"")) + bytes(next(parts, b""))
        assert sent == UPDATE.to_bytes()[start : start + len(sent)]  # the call breaks here
    assert content.digest == content.digest == hashlib.sha256(UPDATE.to_bytes()).hexdigest()


def test_two_calls_that_read_a_streamed_update_at_a_time_hash_it_once() -> None:
    """The parts of a call that broke may still be read while the next one begins."""
    content = streamed()
    for first, second in itertools.zip_longest(content.split(0, float), content.split(0, float)):
        assert first == second
    assert content.digest == hashlib.sha256(UPDATE.to_bytes()).hexdigest()


@pytest.mark.parametrize("trained", [TRAINED, dict(TRAINED)], ids=["parameters", "arrays"])
def test_the_memory_of_a_streamed_update_is_that_of_a_part(trained: Mapping[str, npt.NDArray[Any]]) -> None:
    tracemalloc.start()
    try:
        content = StreamedUpdate(BASE.difference_to(trained))
        for _ in content.split(0, float):
            pass
        assert content.digest
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * wire.CHUNK_BYTES
