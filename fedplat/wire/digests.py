"""The digests of updates: SHA-256, which all programs know, or BLAKE3 where both ends have the package `blake3`.

SHA-256 takes most of the time that either end needs for the bytes of a large update; BLAKE3 takes less than half of
that. A digest of BLAKE3 begins with `b3:`, and so does the `upload_id` of an upload that will have one. All else has a
SHA-256: models, which are stored by it, small updates, encoded and masked ones, and files from client to client.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from fedplat.wire import messages

BLAKE3: Final = "b3:"
"""What a digest of BLAKE3 begins with."""
_READ_BYTES = 1 << 20
_DIGEST = re.compile(f"(?:{BLAKE3})?[0-9a-f]{{64}}")


class _Hash(Protocol):
    def update(self, data: messages.Bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


class UpdateHash:
    """The hash of bytes that arrive in pieces. `kind` is `BLAKE3`, which needs `has_blake3()`, or "" for SHA-256."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self._hash: _Hash = _new_blake3() if kind else hashlib.sha256()

    def update(self, data: messages.Bytes) -> None:
        """Add bytes, or memory of entries of any type."""
        self._hash.update(memoryview(data).cast("B"))

    @property
    def digest(self) -> str:
        """The digest of the bytes so far."""
        return self.kind + self._hash.hexdigest()


def kind_of(name: str) -> str:
    """Return `BLAKE3` or "", the kind of a digest, or of the `upload_id` of an upload that will have one."""
    return BLAKE3 if name.startswith(BLAKE3) else ""


def is_digest(text: str) -> bool:
    """Return whether a text is the digest of an update: 64 lower-case hexadecimal digits, perhaps after `b3:`."""
    return _DIGEST.fullmatch(text) is not None


def hash_file(path: Path, kind: str) -> str:
    """Return the digest of a file. Raises `OSError`."""
    found = UpdateHash(kind)
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            found.update(part)
    return found.digest


def has_blake3() -> bool:
    """Return whether this process has BLAKE3."""
    return _find_blake3() is not None


def _new_blake3() -> _Hash:
    new = _find_blake3()
    assert new is not None, "the package blake3 is not installed"
    return new()


@functools.cache
def _find_blake3() -> Callable[[], _Hash] | None:
    try:
        from blake3 import blake3
    except ImportError:
        return None
    return blake3
