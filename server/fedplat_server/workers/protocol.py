"""The protocol between the daemon and rank 0, and the encryption between the ranks.

`Describe` returns a `WorkerInfo`. `Run` is one task: the daemon streams a `StartTask` and the task's messages, and
closes its side after the last one; rank 0 streams any number of `TaskNote`s, and then a `TaskReply` or `TaskRefusal`.
Cancelling the call cancels the task.

Events control the ranks, up to importing an operator's code, and contain the noise keys of private jobs. So ranks
encrypt them, and prove to each other that they have the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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


_NAME = "pool.key"
_KEY_BYTES = 32
_NONCE = struct.Struct("<IQ")


def create_key(data_dir: Path) -> None:
    """Create the key unless it exists."""
    path = data_dir / _NAME
    if path.exists():
        return
    draft = data_dir / f".{_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another host created it first
            os.link(draft, path)
    finally:
        os.close(descriptor)
        draft.unlink()


def read_key(data_dir: Path) -> bytes:
    """Read the key."""
    return (data_dir / _NAME).read_bytes()


class GroupCipher:
    """Encrypts the messages between the ranks of one group: AES-256-GCM under a key derived for that group.

    The nonce of a message is its sender and number, so no message can replace another. `group` is random, and new for
    each group, so no nonce is used twice under one key.
    """

    def __init__(self, key: bytes, group: bytes) -> None:
        self._cipher = AESGCM(hmac.digest(key, b"fedplat events\0" + group, hashlib.sha256))

    def encrypt(self, content: bytes, sender: int, number: int) -> bytes:
        """Encrypt a message; each (sender, number) must be used for one message only."""
        return self._cipher.encrypt(_NONCE.pack(sender, number), content, None)

    def decrypt(self, message: bytes, sender: int, number: int) -> bytes:
        """Decrypt a message. Raises `PermissionError` if it is of another group, sender or number."""
        try:
            return self._cipher.decrypt(_NONCE.pack(sender, number), message, None)
        except InvalidTag as exc:
            raise PermissionError(f"message {number} of rank {sender} does not belong to this pool") from exc
