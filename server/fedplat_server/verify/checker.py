"""The whole verification: one snapshot of the database, then the files that it references."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from fedplat.rounds.invariants import attempts
from fedplat.rounds.invariants.records import Location, StoredAttempt, StoredJob, StrayHistory
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.verify import checks, files, inspection
from fedplat_server.verify.checks import AuditPart, Finding, Report, Unit

_REMOVED = {
    False: "the next start of the daemon removes them, or sets them aside if the database never had them",
    True: "the daemon removes them, or sets aside those that the database never had, when they are an hour old",
}


def _no_progress(done: int, total: int) -> None:
    pass


async def verify(
    database: str,
    data_dir: Path,
    progress: files.Progress = _no_progress,
    *,
    live: bool = False,
    blobs: BlobPlace | None = None,
    uploads: str = "",
) -> Report:
    """Check the database and its files. A daemon may be running; with `live` one is running.

    Without `blobs` they are in the data folder. `uploads` is the daemons' `--spool`: a folder, the URL of an object
    store, or "" for the default folder. `progress` is called from a thread. Raises the errors of `open_store` if the
    database cannot be read, and `BlobError` if the blobs or the updates cannot be listed.
    """
    place, updates = blobs or BlobPlace(data_dir), files.open_place(data_dir, uploads)
    stored = files.stored_blobs(place)
    # First, so that the files of a version that a running daemon commits meanwhile are not reported as orphans.
    folder = await asyncio.to_thread(stored.list)
    await asyncio.to_thread(updates.list_updates)
    report, needed, spooled = Report(), dict[str, files.ReferencedFiles](), files.ExpectedUpdates()
    num_overdue = 0
    now = time.time()
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection, now):
            report.findings.extend(checks.findings(unit, live=live))
            _count(report, unit)
            spooled.add(unit)
            if isinstance(unit, StoredJob):
                _add_references(needed, unit)
                if unit.is_foreign and unit.row.status in ENDED_JOBS:
                    what = f"job {unit.row.job_id} has ended, and {unit.unreadable}"
                    report.notes.append(f"{what}; another version made it, and its models are complete")
            if isinstance(unit, StoredAttempt) and not live:
                num_overdue += len(list(attempts.overdue(unit)))
    report.findings.extend(await _check_blobs(database, stored, needed, progress))
    report.findings.extend(await _check_updates(database, updates, spooled))
    report.checked |= {"updates": len(spooled.reported)} | {
        "blobs": len(needed),
        "bytes": sum(folder.sizes.get(digest, 0) for digest in needed),
    }
    if num_overdue:
        report.notes.append(f"{num_overdue} assignments are open after their deadline; a running daemon ends them")
    orphans = len(folder.sizes.keys() - needed)
    if orphans:
        report.notes.append(f"{orphans} blobs belong to no version; {_REMOVED[place.is_remote]}")
    report.notes.extend(f"the file {path} in {place.folder} is not a blob" for path in folder.unknown)
    report.notes.extend(await asyncio.to_thread(lambda: list(updates.notes(spooled))))
    return report


async def _check_blobs(
    database: str, stored: files.StoredBlobs, needed: Mapping[str, files.ReferencedFiles], progress: files.Progress
) -> list[Finding]:
    findings = await asyncio.to_thread(lambda: dict(files.blobs(stored, needed, progress)))
    if not findings:
        return []
    # A running daemon may have removed the blobs meanwhile.
    still_needed = dict[str, files.ReferencedFiles]()
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection):
            if isinstance(unit, StoredJob):
                _add_references(still_needed, unit)
    return [finding for digest, finding in findings.items() if digest in still_needed]


async def _check_updates(database: str, place: files.SpoolPlace, spooled: files.ExpectedUpdates) -> list[Finding]:
    findings = await asyncio.to_thread(lambda: dict(place.check(spooled.reported)))
    if not findings:
        return []
    # A running daemon may have merged and removed the updates meanwhile.
    still_spooled = files.ExpectedUpdates()
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection):
            still_spooled.add(unit)
    return [finding for key, finding in findings.items() if key in still_spooled.reported]


def _count(report: Report, unit: Unit) -> None:
    if isinstance(unit, AuditPart):
        report.checked.update({"audit rows": len(unit.rows)})
    if isinstance(unit, StoredJob):
        report.checked.update(jobs=1, versions=len(unit.versions))
    if isinstance(unit, StoredAttempt):
        report.checked.update(attempts=1, assignments=len(unit.made))
    report.checked.update(
        {"history rows": len(unit.history) if isinstance(unit, StoredJob | StoredAttempt | StrayHistory) else 0}
    )


def _add_references(needed: dict[str, files.ReferencedFiles], job: StoredJob) -> None:
    for version in job.versions:
        if version.is_held_by_clients:
            continue
        place = Location(job.row.job_id, version=version.version)
        # Versions may share blobs: an entry with a size must not be replaced by one without.
        if version.model_removed_unix_s is None:
            needed[version.digest] = files.ReferencedFiles(place, "its model", version.size_bytes)
        if version.state_digest and version.state_removed_unix_s is None:
            needed.setdefault(version.state_digest, files.ReferencedFiles(place, "its optimizer's state", None))
        if version.delta_digest and version.model_removed_unix_s is None:
            delta = files.ReferencedFiles(place, "its delta", version.delta_size_bytes)
            needed.setdefault(version.delta_digest, delta)
