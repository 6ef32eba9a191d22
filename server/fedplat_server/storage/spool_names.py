"""The names of updates in the spool. Ids may contain anything that callers send; a hash is always a valid name."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedplat.rounds import AssignmentId, AttemptKey


def path_of(folder: Path, key: AssignmentId, digest: str) -> Path:
    """Return the path of an update in a spool's folder."""
    return folder / name_attempt(key.attempt) / f"{name_update(key)}-{digest}"


def name_attempt(attempt: AttemptKey) -> str:
    """Return the name of an attempt's folder."""
    return _hash(attempt)


def name_update(key: AssignmentId) -> str:
    """Return the beginning of the name of an update's file, which its digest follows."""
    return _hash((*key.attempt, key.client_id))


def _hash(names: tuple[object, ...]) -> str:
    return hashlib.sha256("\n".join(map(str, names)).encode()).hexdigest()
