"""What the clients of a cohort download side by side is read once, and memory does not grow with the model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fedplat.wire.v1 import model_pb2
from fedplat_server.errors import BlobError
from fedplat_server.storage.read_cache import Chunks

CONTENT = os.urandom(1050)
SIZE = len(CONTENT)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(CONTENT)
    return path


async def read(chunks: Chunks, path: Path, offset: int = 0) -> list[bytes]:
    return [model_pb2.Chunk.FromString(message).data async for message in chunks.messages(path, offset, SIZE)]


@pytest.mark.parametrize("offset", [0, 1, 99, 100, 101, 1000, 1049, 1050])
async def test_a_model_from_any_offset(model: Path, offset: int) -> None:
    parts = await read(Chunks(chunk_bytes=100), model, offset)
    assert b"".join(parts) == CONTENT[offset:]
    assert all(len(part) <= 100 for part in parts[:1])
    assert all(len(part) <= 200 for part in parts)


async def test_chunks_are_shared_by_those_who_read_side_by_side(model: Path) -> None:
    chunks = Chunks(chunk_bytes=100, num_kept=6)
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(chunks, model, offset)) for offset in (0, 0, 250, 0)]
    assert [b"".join(reader.result()) for reader in readers] == [CONTENT, CONTENT, CONTENT[250:], CONTENT]
    model.unlink()
    assert b"".join(await read(chunks, model)) == CONTENT  # from memory alone


async def test_only_the_latest_are_kept(model: Path) -> None:
    chunks = Chunks(chunk_bytes=100, num_kept=5)
    await read(chunks, model)
    model.write_bytes(bytes(SIZE))
    assert b"".join(await read(chunks, model)) == bytes(SIZE)  # each that is missing takes the place of the next


async def test_a_slow_line_gets_small_chunks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one resumes after the last chunk that has arrived as a whole."""
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    parts: list[int] = []
    async for message in Chunks(chunk_bytes=100).messages(model, 0, SIZE):
        parts.append(len(model_pb2.Chunk.FromString(message).data))
        now += 1.0 if len(parts) in (1, 4) else 0.1
    assert parts == [100, 100, 100, 200, 100, 100, 200, 150]


@pytest.mark.parametrize("left", [None, b"short"])
async def test_what_could_not_be_read_is_read_again(model: Path, left: bytes | None) -> None:
    chunks = Chunks(chunk_bytes=100)
    model.unlink()
    if left is not None:
        model.write_bytes(left)
    for _ in range(2):
        with pytest.raises(BlobError):
            await read(chunks, model)
    model.write_bytes(CONTENT)
    assert b"".join(await read(chunks, model)) == CONTENT


async def test_a_reader_that_leaves_does_not_disturb_the_others(model: Path) -> None:
    chunks = Chunks(chunk_bytes=100)
    leaving, staying = (asyncio.create_task(read(chunks, model)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert b"".join(await staying) == CONTENT
    with pytest.raises(asyncio.CancelledError):
        await leaving
