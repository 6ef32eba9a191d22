"""What becomes of the update that a report brings or names: received, checked, and made durable.

All of it blocks, and is meant for one visit to a thread: for a small update the visits cost more than the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedplat.rounds.states import Reason
from fedplat_server import logs
from fedplat_server.errors import BlobError, BlobFullError, Code, RefusedError, SpoolError, UploadError
from fedplat_server.uploads import UploadKey, UploadStore

Check = Callable[[Path], float | tuple[Reason, str]]


class TakenIn(NamedTuple):
    """An update that was received and is good."""

    size_bytes: int
    norm: float


def take_in(
    uploads: UploadStore, key: UploadKey, digest: str, update: bytes, check: Check
) -> TakenIn | tuple[Reason, str]:
    """The size and the norm of an update that is on the disk for good now; or why it is not acceptable.

    `update` came with the report; it is empty if the update was uploaded before. `check` gives the norm of a
    file, or what is wrong with it. Raises `RefusedError` if it is not
    there or could not be stored, `BlobFullError`, and `SpoolError` if the attempt cannot go on.
    """
    if update:
        if hashlib.sha256(update).hexdigest() != digest:
            return Reason.REJECTED_DIGEST, ""
        try:
            _receive(uploads, key, digest, update)
        except UploadError as exc:  # the same report comes twice at a time, or a broken upload still writes
            raise RefusedError(Code.UPLOAD_INCOMPLETE, f"{exc}; report again") from exc
    path = uploads.complete(key, digest)
    if path is None:
        raise RefusedError(Code.UPLOAD_INCOMPLETE, "ask QueryUpload where to resume")
    try:
        found = check(path)
    except FileNotFoundError as exc:  # thrown away this very moment, because the assignment has ended
        raise RefusedError(Code.UPLOAD_INCOMPLETE, "the assignment has ended") from exc
    if isinstance(found, tuple):
        return found
    try:
        return TakenIn(uploads.persist(key, digest), found)
    except (BlobFullError, SpoolError):
        raise
    except (BlobError, UploadError) as exc:
        logs.get().error("an update could not be made durable", upload=str(key), error=str(exc))
        raise RefusedError(Code.UPLOAD_INCOMPLETE, "the server could not store it; send it again") from exc


def _receive(uploads: UploadStore, key: UploadKey, digest: str, update: bytes) -> None:
    if uploads.complete(key, digest) is None:
        received = uploads.received(key, digest)  # an earlier upload of these bytes may have broken off
        upload = uploads.open(key, digest, len(update), received)
        try:
            upload.write(update[received:])
        finally:
            upload.close()
