"""The secret that the ranks of a pool have in common: a file in the data folder, which only their own user reads.

What they do follows from events, up to importing an operator's code, and events hold the noise of private jobs. So
ranks encrypt them, and prove to each other that they have the secret.
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


def make(data_dir: Path) -> None:
    """Makes the key, if there is none yet."""
    path = data_dir / _NAME
    if path.exists():
        return
    draft = data_dir / f".{_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another host was faster
            os.link(draft, path)
    finally:
        os.close(descriptor)
        draft.unlink()


def read(data_dir: Path) -> bytes:
    """The key."""
    return (data_dir / _NAME).read_bytes()


class Sealed:
    """Encrypts what the ranks of one group tell each other: AES-256-GCM under a key that the group has for itself.

    Each message has its sender and its number as the nonce, so none can stand for another. A group has a new `group`
    of random bytes, so no nonce is used twice under one key.
    """

    def __init__(self, key: bytes, group: bytes) -> None:
        self._cipher = AESGCM(hmac.digest(key, b"fedplat events\0" + group, hashlib.sha256))

    def sealed(self, content: bytes, sender: int, number: int) -> bytes:
        """The content, encrypted; each (sender, number) is for one message only."""
        return self._cipher.encrypt(_NONCE.pack(sender, number), content, None)

    def opened(self, message: bytes, sender: int, number: int) -> bytes:
        """The content of a message. Raises `PermissionError` if it is not of this group, sender and number."""
        try:
            return self._cipher.decrypt(_NONCE.pack(sender, number), message, None)
        except InvalidTag as exc:
            raise PermissionError(f"message {number} of rank {sender} is not of this pool") from exc
