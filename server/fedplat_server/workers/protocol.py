"""The protocol between the daemon and rank 0: gRPC over a Unix socket in the data folder, with msgpack payloads.

`Describe` returns a `WorkerInfo`. `Run` is one task: the daemon streams a `StartTask` and the task's messages, and
closes its side after the last one; rank 0 streams any number of `TaskNote`s, and then a `TaskReply` or `TaskRefusal`.
Cancelling the call cancels the task.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import msgspec

SERVICE = "fedplat.pool.Rank0"
MAX_MESSAGE_BYTES = 2**30
OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, without the backoff of earlier ones
)
RANK_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
"""Environment variables of the process of a rank."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """The number of ranks, and the device of rank 0."""

    num_ranks: int
    device: str


class StartTask(msgspec.Struct, frozen=True):
    """The first message of a call: a task's name and request. `backend` is from a job's `[pool]`."""

    name: str
    request: bytes
    backend: Literal["auto", "gloo", "nccl"] = "auto"


class TaskNote(msgspec.Struct, tag="note", frozen=True):
    """An intermediate report of the task, such as its progress."""

    content: bytes


class TaskReply(msgspec.Struct, tag="reply", frozen=True):
    """The result of the task."""

    content: bytes


class TaskRefusal(msgspec.Struct, tag="refusal", frozen=True):
    """The reason why the task failed. `out_of_memory`: an accelerator ran out of memory."""

    text: str
    out_of_memory: bool = False


Response = TaskNote | TaskReply | TaskRefusal


def socket_path(data_dir: Path) -> Path:
    """Return the path of the socket of a data folder's pool."""
    return data_dir / "pool.sock"


@contextlib.contextmanager
def short_path(path: Path) -> Generator[str]:
    """Yield a short path of the same socket: the kernel's limit is 107 bytes, and `path` may be longer."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
