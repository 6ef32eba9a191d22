"""Checks an update that has arrived: is it exactly what the base version's schema says, and finite?

An update's file must begin with the very header of its base version. So nothing of a foreign header is parsed or
believed unless the update is refused anyway, and then only to say why.
"""

from __future__ import annotations

from pathlib import Path

from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.rounds.states import Reason


def size_limit(base_size_bytes: int) -> int:
    """The most bytes that an upload may announce; room above the exact size lets a misfit be refused by name."""
    return 2 * base_size_bytes + 2**20


def check_update(update: Path, base: Path) -> tuple[Reason, str] | None:
    """Why the update is not acceptable, or None. Reads it once; memory does not grow with it."""
    expected = Parameters.open(base)
    header = expected.schema.header
    with update.open("rb") as file:
        same = file.read(len(header)) == header
    if not same or update.stat().st_size != expected.schema.file_size_bytes:
        return Reason.REJECTED_SCHEMA, _difference(update, expected)
    if not Parameters.open(update).is_finite():
        return Reason.REJECTED_NONFINITE, ""
    return None


def public_text(error: ModelError, path: Path) -> str:
    """What is wrong with a file, without where the server keeps it."""
    return str(error).replace(str(path), "the file")


def _difference(update: Path, expected: Parameters) -> str:
    try:
        difference = Parameters.open(update).schema.difference_from(expected.schema)
    except ModelError as exc:
        return public_text(exc, update)
    return difference or "the header is not byte for byte that of the base version's file"
