"""`fedplat-server verify`: check the stored data and print a report, as lines for people or JSON for programs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Generator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.verify import checker, files
from fedplat_server.verify.checks import Report


def run(database: str, place: BlobPlace, spool: str, *, live: bool, as_json: bool) -> bool:
    """Check, print the report and return whether nothing is broken. `live`: a daemon has been running for a minute.

    `spool` is the daemons' `--spool`.
    """
    with _bar() as progress:
        verifying = checker.verify(database, place.data_dir, progress, live=live, blobs=place, uploads=spool)
        report = asyncio.run(verifying)
    print(_as_json(report) if as_json else "\n".join(_lines(report)))
    return not report.findings


@contextlib.contextmanager
def _bar() -> Generator[files.Progress]:
    """Show a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("reading blobs"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(report: Report) -> list[str]:
    checked = report.checked
    names = ("jobs", "attempts", "assignments", "versions", "history rows", "audit rows")
    counts = ", ".join(f"{checked[name]} {name}" for name in names)
    verdict = f"{len(report.findings)} findings" if report.findings else "nothing is broken"
    files_seen = (
        f"{checked['updates']} spooled updates and {checked['blobs']} blobs ({checked['bytes'] / 2**20:.1f} MiB)"
    )
    summary = f"checked {counts}, {files_seen}: {verdict}"
    broken = [f"broken {_one_line(str(finding))}" for finding in report.findings]
    return [*broken, *(f"note: {_one_line(note)}" for note in report.notes), summary]


def _as_json(report: Report) -> str:
    return json.dumps(
        {
            "clean": not report.findings,
            "findings": [dataclasses.asdict(finding) for finding in report.findings],
            "notes": report.notes,
            "checked": dict(report.checked),
        }
    )


def _one_line(text: str) -> str:
    """Replace control characters: ids and reasons come from clients, and must not add lines or move the cursor."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
