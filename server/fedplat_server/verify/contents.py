"""Checks of the updates and blobs that are rows of the database: these must be intact, whatever files there are."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from fedplat.rounds import AssignmentId
from fedplat.rounds.invariants import records
from fedplat_server.database import sql_contents
from fedplat_server.database.tables import blob_contents, update_contents
from fedplat_server.verify import files
from fedplat_server.verify.checks import RESTORE, Finding, Report

LOST_UPDATE = "Restart the daemon: it abandons the attempt and repeats the round. Then check the database's disk."
RESTORED = "the next start of the daemon writes them again from the database"


@dataclasses.dataclass(frozen=True)
class StoredContents:
    """The digests of the bytes in the rows: of updates, each with the digest that the row states, and of blobs.

    The latter have their sizes, too.
    """

    updates: Mapping[AssignmentId, tuple[str, str]]
    blobs: Mapping[str, tuple[str, int]]

    def has_update(self, key: AssignmentId, digest: str) -> bool:
        """Return whether an update is an intact row."""
        return self.updates.get(key) == (digest, digest)

    def without(self, reported: Mapping[AssignmentId, str]) -> dict[AssignmentId, str]:
        """Return the updates that must be elsewhere."""
        return {key: digest for key, digest in reported.items() if key not in self.updates}

    def has_blob(self, digest: str, size_bytes: int | None = None) -> bool:
        """Return whether a blob is an intact row, which has this size if that is known."""
        found, size = self.blobs.get(digest, ("", 0))
        return found == digest and size_bytes in (None, size)


async def read(connection: AsyncConnection) -> StoredContents:
    """Read and hash all rows, a few at a time."""
    updates: dict[AssignmentId, tuple[str, str]] = {}
    async with connection.stream(select(update_contents)) as result:
        async for row in result:
            updates[sql_contents.assignment_of(row)] = row.digest, hashlib.sha256(row.content).hexdigest()
    blobs: dict[str, tuple[str, int]] = {}
    async with connection.stream(select(blob_contents)) as result:
        async for row in result:
            blobs[row.digest] = hashlib.sha256(row.content).hexdigest(), len(row.content)
    return StoredContents(updates, blobs)


def check(
    report: Report,
    stored: StoredContents,
    needed: Mapping[str, files.ReferencedFiles],
    reported: Mapping[AssignmentId, str],
) -> None:
    """Check I2 and I3: the row of a needed blob or update has the bytes that its digest names."""
    for digest, reference in needed.items():
        if digest in stored.blobs and not stored.has_blob(digest):
            found = f"{reference.what} has the digest {stored.blobs[digest][0]} in blob_contents"
            expected = f"{digest}, the digest of its row"
            report.findings.append(Finding("I2", "blob_rows", reference.place, found, expected, RESTORE))
    for key, digest in reported.items():
        if key in stored.updates and not stored.has_update(key, digest):
            place = records.Location(*key.attempt, key.client_id)
            found = f"its update has the digest {stored.updates[key][1]} in update_contents"
            expected = f"{digest}, which was reported"
            report.findings.append(Finding("I3", "update_rows", place, found, expected, LOST_UPDATE))
    num_left = len(stored.blobs.keys() - needed.keys()) + len(stored.updates.keys() - reported.keys())
    if num_left:
        report.notes.append(
            f"{num_left} rows of updates and models are not needed; the next start of the daemon removes them"
        )
