"""Puts the checks together: one snapshot of the database, then the files that it names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fedplat_server.store import inspection
from fedplat_server.verify import files, invariants
from fedplat_server.verify.records import Attempt, Job, Place, Report, Unit


def _no_progress(done: int, total: int) -> None:
    """Tells nobody."""


async def verify(database: str, data_dir: Path, progress: files.Progress = _no_progress) -> Report:
    """Checks everything that can be seen at rest; a daemon may run meanwhile.

    Raises what `open_store` does when the database cannot be read. `progress` is called from a thread.
    """
    blob_dir = data_dir / "blobs"
    # First, so that a version that a running daemon commits meanwhile is no file without a row.
    folder = await asyncio.to_thread(files.look, blob_dir)
    report, needed = Report(), dict[str, files.Needed]()
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection):
            report.findings.extend(invariants.findings(unit))
            _count(report, unit)
            if isinstance(unit, Job):
                _need(needed, unit)
    found = await asyncio.to_thread(lambda: list(files.blobs(blob_dir, needed, progress)))
    report.findings.extend(found)
    report.checked |= {"blobs": len(needed), "bytes": sum(folder.sizes.get(digest, 0) for digest in needed)}
    orphans = len(folder.sizes.keys() - needed)
    if orphans:
        report.notes.append(f"{orphans} blobs belong to no version; the next start of the daemon removes them")
    report.notes.extend(f"the file {path} in {blob_dir} is no blob" for path in folder.unknown)
    return report


def _count(report: Report, unit: Unit) -> None:
    if isinstance(unit, Job):
        report.checked.update(jobs=1, versions=len(unit.versions))
    if isinstance(unit, Attempt):
        report.checked.update(attempts=1, assignments=len(unit.assignments))
    report.checked.update({"history rows": len(unit.history)})


def _need(needed: dict[str, files.Needed], job: Job) -> None:
    for version in job.versions:
        place = Place(job.row.job_id, version=version.version)
        # Jobs may share bytes. A size that the database knows is not forgotten.
        needed[version.digest] = files.Needed(place, "its model", version.size_bytes)
        if version.state_digest:
            needed.setdefault(version.state_digest, files.Needed(place, "its optimizer's state", None))
