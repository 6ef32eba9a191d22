"""Encrypted files for the server's relay: written whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import RelayLink


def seal_file(link: RelayLink, own: KeyPair, source: Path, target: Path) -> None:
    """Encrypt a file for its receiver. Raises `SecureAggregationError` or `OSError`, and then leaves no target."""
    _convert(lambda plain, sealed: link.seal(own, plain, sealed), source, target)


def open_file(link: RelayLink, own: KeyPair, source: Path, target: Path) -> None:
    """Decrypt a file of its sender. Raises `SecureAggregationError` or `OSError`, and then leaves no target."""
    _convert(lambda sealed, plain: link.open(own, sealed, plain), source, target)


def _convert(convert: Callable[[BinaryIO, BinaryIO], None], source: Path, target: Path) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as writing, source.open("rb") as reading:
            convert(reading, writing)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
