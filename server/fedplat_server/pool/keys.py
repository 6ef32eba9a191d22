"""The key by which ranks know that an event is rank 0's: a secret in the data folder, which all of them read.

What they do follows from events, up to importing an operator's code, and the store that carries them asks nobody who
they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

_NAME = "pool.key"
_MAC_BYTES = 32


def make(data_dir: Path) -> None:
    """Makes the key, if there is none yet."""
    path = data_dir / _NAME
    if path.exists():
        return
    draft = data_dir / f".{_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_MAC_BYTES))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another host was faster
            os.link(draft, path)
    finally:
        os.close(descriptor)
        draft.unlink()


def read(data_dir: Path) -> bytes:
    """The key."""
    return (data_dir / _NAME).read_bytes()


def signed(key: bytes, name: str, content: bytes) -> bytes:
    """Content with a proof that whoever has the key has put it there, under this name."""
    return _mac(key, name, content) + content


def checked(key: bytes, name: str, message: bytes) -> bytes:
    """The content of a signed message. Raises `PermissionError` if it is none, or has another name."""
    mac, content = message[:_MAC_BYTES], message[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, name, content)):
        raise PermissionError(f"what was found under {name!r} is not of this pool")
    return content


def _mac(key: bytes, name: str, content: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + content, hashlib.sha256)
