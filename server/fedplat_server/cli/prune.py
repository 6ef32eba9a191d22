"""`fedplat-server prune` and `fedplat-server verify`: check the stored data, and remove what is obsolete."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from fedplat_server.cli.options import (
    DEFAULT_DATA_DIR,
    Blobs,
    Database,
    DataDir,
    blob_place,
    check_data_dir,
    database_url,
    parse_period,
)
from fedplat_server.coordination import owner, retention
from fedplat_server.database.engine import async_url
from fedplat_server.database.store import open_store
from fedplat_server.errors import ConfigError, FolderInUseError
from fedplat_server.storage import data_dir as folder
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.storage.files import SET_ASIDE_FOLDER
from fedplat_server.verify import checks, inspection

DAY_S = 86400.0


def prune_(  # noqa: PLR0913 -- one parameter for each option of the command line
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database: Database = None,
    blobs: Blobs = "",
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Remove history and metrics of ended jobs older than this, such as 30d."),
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Remove model files of ended jobs, except those of version 0 and the newest N."
        ),
    ] = None,
    clients_unseen_for: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Remove clients that did not connect for this time, such as 90d; min. 1d."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, without removing it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; requires --dry-run or --yes.")] = False,
) -> None:
    """Remove obsolete data.

    Applies the [retention] of the jobs and the limits in these options. Rows of versions, rounds, the ledger and the
    audit log are kept. With PostgreSQL a daemon may be running.
    """
    check_data_dir(data_dir)
    limits = _limits(older_than, keep_versions, clients_unseen_for)
    if as_json and not (dry_run or yes):
        raise ConfigError("--json does not ask for confirmation: add --dry-run or --yes")
    place = blob_place(data_dir, blobs)
    url = database_url(data_dir, database)
    with _lock_data_dir(data_dir, url) as is_alone:
        plan = asyncio.run(_find(url, place, limits, is_alone=is_alone))
        is_done = not dry_run and not plan.is_empty
        if not as_json:
            print("\n".join(_lines(plan, is_alone=is_alone)))
            if is_done and not yes and not typer.confirm("Remove them?"):
                raise typer.Exit(1)
        if is_done:
            asyncio.run(_remove(url, place, limits, plan, is_alone=is_alone))
        if as_json:
            print(json.dumps(plan.counts | {"removed": is_done, "files_removed": is_done and is_alone}))


def _limits(older_than: str | None, keep_versions: int | None, clients_unseen_for: str | None) -> retention.PruneLimits:
    now = time.time()
    history_s = parse_period(older_than, "--older-than")
    unseen_s = parse_period(clients_unseen_for, "--clients-unseen-for")
    if unseen_s is not None and unseen_s < DAY_S:
        raise ConfigError(
            f"--clients-unseen-for {clients_unseen_for}: expected at least 1d, as daemons rarely store when they saw a "
            "client"
        )
    return retention.PruneLimits(
        now_unix_s=now,
        history_before=None if history_s is None else now - history_s,
        keep_versions=keep_versions,
        clients_before=None if unseen_s is None else now - unseen_s,
    )


@contextlib.contextmanager
def _lock_data_dir(data_dir: Path, url: str) -> Generator[bool]:
    """Lock the data folder; yield whether no daemon runs on it. Raises `FolderInUseError` if one does, with SQLite."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder.lock_data_dir(data_dir, shared=False))
        except FolderInUseError:
            if async_url(url).get_backend_name() == "sqlite":
                raise FolderInUseError(
                    f"a fedplat-server is running on {data_dir}, and no other process may write to its SQLite "
                    "database: stop it first, or set [retention] in its jobs, which it applies itself"
                ) from None
            stack.enter_context(folder.lock_data_dir(data_dir, shared=True))
            yield False
        else:
            yield True


async def _find(url: str, place: BlobPlace, limits: retention.PruneLimits, *, is_alone: bool) -> retention.PrunePlan:
    store = await open_store(url)
    try:
        blobs, _ = await owner.open_blobs(store, place, url)
        return await retention.find_obsolete(store, blobs, limits, with_orphans=is_alone)
    finally:
        await store.close()


async def _remove(
    url: str, place: BlobPlace, limits: retention.PruneLimits, plan: retention.PrunePlan, *, is_alone: bool
) -> None:
    store = await open_store(url)
    try:
        with _bar("removing", MofNCompleteColumn()) as progress:
            await retention.remove_obsolete(store, limits, plan, progress)
        if is_alone:
            blobs, _ = await owner.open_blobs(store, place, url)
            await retention.remove_obsolete_files(store, blobs)
    finally:
        await store.close()


@contextlib.contextmanager
def _bar(title: str, count: ProgressColumn) -> Generator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal."""
    console, columns = Console(stderr=True), (TextColumn(title), BarColumn(), count)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(plan: retention.PrunePlan, *, is_alone: bool) -> list[str]:
    if plan.is_empty:
        return ["nothing to remove"]
    counts = plan.counts
    kinds = {
        "models": "model files of old versions",
        "states": "states of aggregation rules",
        "attempts": "attempts with an old history",
        "clients": "clients that did not connect",
        "orphans": (
            "files that belong to no version; "
            f"those that the database does not know go to {SET_ASIDE_FOLDER} for 3 days"
        ),
    }
    lines = [f"{counts[kind]:>8} {words}" for kind, words in kinds.items() if counts[kind]]
    lines.append(f"{counts['bytes'] / 2**20:.1f} MiB of files; rows of versions and the audit log are kept")
    if not is_alone:
        lines.append("a daemon is running: it removes the files in some minutes, or when they are an hour old")
    return lines


def verify_and_print(database: str, place: BlobPlace, spool: str, *, live: bool, as_json: bool) -> bool:
    """Check, print the report and return whether nothing is broken. `live`: a daemon has been running for a minute.

    `spool` is the daemons' `--spool`.
    """
    with _bar("reading blobs", DownloadColumn()) as progress:
        verifying = inspection.verify(database, place.data_dir, progress, live=live, blobs=place, uploads=spool)
        report = asyncio.run(verifying)
    print(_as_json(report) if as_json else "\n".join(_report_lines(report)))
    return not report.findings


def _report_lines(report: checks.Report) -> list[str]:
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


def _as_json(report: checks.Report) -> str:
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
