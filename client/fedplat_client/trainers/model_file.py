"""The model of a task as a temporary file on each host, which all ranks of the host map into memory.

Pages of a mapped file are not memory that a process has for itself: the system reads them when a rank needs its slices,
and frees them again. The folder and the file are readable by their user only, and are removed as soon as all ranks have
mapped the file. A process that is killed before that leaves them behind, without their lock; the next one removes them.
They are in the folder for temporary files (TMPDIR), which should be on a disk, not in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import distributed

from fedplat import system
from fedplat.model import FLOATING, Parameters, blocks
from fedplat.pytorch.distributed import STEP_BYTES, Ranks, work_in_steps

_CHUNK_BYTES = 4 << 20
_STEP_CHUNKS = STEP_BYTES // _CHUNK_BYTES
_PREFIX = "fedplat-model-"


@contextlib.contextmanager
def share_model(ranks: Ranks, model: Parameters | None = None) -> Generator[Parameters]:
    """Yield the `model` of rank 0 on all ranks, which all call it, each mapped from a file of its host.

    Rank 0 sends the file once to each other host. Its own mapping may be written: the result of a training then needs
    no memory. Raises `TrainingError`, on all ranks alike, if a file cannot be written, such as without space.
    """
    hosts = ranks.all_gather(describe_host())
    writers = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
    sizes = [] if model is None else [len(piece) for piece in model.pieces]
    sizes = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(sizes)), type=list[int])
    own: Path | None = None
    lock = -1
    try:
        if ranks.rank in writers:
            remove_stale()
            own, lock = make_folder()
            chunks = _receive(ranks, sizes) if model is None else _send(ranks, model, writers[1:])
            steps = _write(own / "model.safetensors", chunks)
        else:
            # as many empty steps as `_write` has
            steps = itertools.repeat(None, sum(1 for size in sizes for _ in _split(size)) // _STEP_CHUNKS)
        work_in_steps(ranks, steps, "the model's file")
        folders = ranks.all_gather(b"" if own is None else os.fsencode(own))
        path = Path(os.fsdecode(folders[hosts.index(hosts[ranks.rank])])) / "model.safetensors"
        parameters = _open_writable(path) if ranks.is_first else Parameters.open(path)
        ranks.barrier()
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
            os.close(lock)
    yield parameters


def make_folder() -> tuple[Path, int]:
    """Make a temporary folder; `remove_stale` spares it while this process lives and has the descriptor open."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another process took it for a stale one
            descriptor = _open_folder(path)
            with contextlib.suppress(OSError):  # a file system without locks, where none is taken for stale
                system.lock(descriptor)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def remove_stale() -> None:
    """Remove the folders of this user that killed processes have left behind; no process has their locks."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, no folder, or of another user
            descriptor = _open_folder(path)
            try:
                if os.fstat(descriptor).st_uid == system.user_id():
                    system.lock(descriptor, wait=False)  # fails while a process has it
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _open_folder(path: Path) -> int:
    return system.open_folder_to_lock(path, system.O_NOFOLLOW)


def subtract(trained: Parameters, base: Parameters) -> Parameters:
    """Turn trained values into the update, in place and block by block, as `Parameters.minus` computes it."""
    with np.errstate(over="ignore"):
        for run in trained.schema.segments:
            if run.dtype not in FLOATING:
                continue
            view, origin = trained.segment(run), base.segment(run)
            for block in blocks(run.count):
                part, before = view[block], origin[block]
                if run.dtype in ("F64", "F32"):
                    np.subtract(part, before, out=part)
                else:
                    part[...] = part.astype(np.float32) - before.astype(np.float32)
    return trained


def describe_host() -> bytes:
    """Return what is equal for processes that can open the same files: the running system, its mounts, and the user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        place = f"{boot} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:  # no /proc
        place = socket.gethostname()
    return f"{place} {system.user_id()}".encode()


def _write(path: Path, chunks: Iterator[memoryview]) -> Iterator[None]:
    """Write chunks in steps. A failure is raised at the end of a step: its chunks are on their way to other ranks."""
    failure: OSError | None = None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.O_BINARY, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for number, chunk in enumerate(chunks, 1):
            rest = chunk
            try:
                while rest and failure is None:
                    rest = rest[file.write(rest) :]
            except OSError as exc:
                failure = exc
            if number % _STEP_CHUNKS == 0:
                if failure is not None:
                    raise failure
                yield
    if failure is not None:
        raise failure


def _send(ranks: Ranks, model: Parameters, writers: list[int]) -> Iterator[memoryview]:
    """Send the pieces of the file to other ranks in chunks, and yield these."""
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for piece in model.pieces:
        for first, size in _split(len(piece)):
            chunk = buffer[:size]
            chunk.numpy()[:] = piece[first : first + size]
            for writer in writers:
                distributed.send(chunk, group=ranks.group, group_dst=writer)
            yield chunk.numpy().data


def _receive(ranks: Ranks, sizes: list[int]) -> Iterator[memoryview]:
    """Receive the chunks that rank 0 sends, and yield them."""
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for total in sizes:
        for _, size in _split(total):
            distributed.recv(buffer[:size], group=ranks.group, group_src=0)
            yield buffer[:size].numpy().data


def _split(total: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the size of each chunk."""
    return ((first, min(_CHUNK_BYTES, total - first)) for first in range(0, total, _CHUNK_BYTES))


def _open_writable(path: Path) -> Parameters:
    return Parameters.from_bytes(np.asarray(np.memmap(path, np.uint8, mode="r+")))
