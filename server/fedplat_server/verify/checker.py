"""Puts the checks together: one snapshot of the database, then the files that it names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fedplat.rounds.states import AssignmentState, AttemptKind
from fedplat_server.store import inspection
from fedplat_server.uploads import UploadKey
from fedplat_server.verify import files, invariants
from fedplat_server.verify.records import Attempt, Finding, Job, Place, Report, Unit


def _no_progress(done: int, total: int) -> None:
    """Tells nobody."""


async def verify(database: str, data_dir: Path, progress: files.Progress = _no_progress) -> Report:
    """Checks everything that can be seen at rest; a daemon may run meanwhile.

    Raises what `open_store` does when the database cannot be read. `progress` is called from a thread.
    """
    blob_dir = data_dir / "blobs"
    # First, so that a version that a running daemon commits meanwhile is no file without a row.
    folder = await asyncio.to_thread(files.look, blob_dir)
    report, needed, reported = Report(), dict[str, files.Needed](), _Reported()
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection):
            report.findings.extend(invariants.findings(unit))
            _count(report, unit)
            reported.take(unit)
            if isinstance(unit, Job):
                _need(needed, unit)
    found = await asyncio.to_thread(lambda: list(files.blobs(blob_dir, needed, progress)))
    report.findings.extend(found)
    report.findings.extend(await _spool(database, data_dir / "uploads", reported))
    report.checked |= {"updates": len(reported.digests)} | {
        "blobs": len(needed),
        "bytes": sum(folder.sizes.get(digest, 0) for digest in needed),
    }
    orphans = len(folder.sizes.keys() - needed)
    if orphans:
        report.notes.append(f"{orphans} blobs belong to no version; the next start of the daemon removes them")
    report.notes.extend(f"the file {path} in {blob_dir} is no blob" for path in folder.unknown)
    return report


class _Reported:
    """The updates that must lie in the spool: accepted, for an attempt that has not ended, and to be kept."""

    def __init__(self) -> None:
        self.digests: dict[UploadKey, str] = {}
        self._kept = False

    def take(self, unit: Unit) -> None:
        """Looks at a job, and then at its attempts."""
        if isinstance(unit, Job):
            self._kept = unit.spec is not None and unit.spec.durability == "spool"
        if isinstance(unit, Attempt) and self._kept and unit.row.kind == AttemptKind.TRAIN:
            for one in unit.assignments if invariants.is_open(unit.row) else ():
                if one.state == AssignmentState.REPORTED:
                    key = UploadKey(unit.row.job_id, unit.row.round, unit.row.number, one.client_id)
                    self.digests[key] = one.digest


async def _spool(database: str, folder: Path, reported: _Reported) -> list[Finding]:
    wrong = await asyncio.to_thread(lambda: dict(files.spooled(folder, reported.digests)))
    if not wrong:
        return []
    # A daemon that runs may have merged them meanwhile, and thrown them away.
    still = _Reported()
    async with inspection.snapshot(database) as connection:
        async for unit in inspection.units(connection):
            still.take(unit)
    return [finding for key, finding in wrong.items() if key in still.digests]


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
