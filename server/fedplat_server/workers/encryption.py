"""Encryption between the ranks of a pool; the key is a file in the data folder that only their user can read.

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
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
