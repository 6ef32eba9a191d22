"""`fedplat-server prune`, and the daemon's own retention: what is not needed goes, and everything else still works."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import sqlite3
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import Result
from grpc import aio

from fedplat_server.cli.commands import app
from fedplat_server.errors import BlobError, ConfigError
from fedplat_server.storage import ownership
from fedplat_server.verify.inspection import verify
from support import daemons, databases
from support.cli.runner import CliRunner
from support.daemons import Site
from support.jobs import job_file
from support.rollbacks import ZERO, play, roll_back, values

ROUNDS = 6
POLICY = "[retention]\nversions = 2\nevery = 3\n"


def prune(folder: Path, *options: str, answer: str = "") -> Result:
    """The command, in a thread: it has an event loop of its own."""
    command = ["prune", "--data-dir", str(folder), *options]
    with ThreadPoolExecutor(1) as thread:
        call = functools.partial(CliRunner().invoke, app, command, input=answer, catch_exceptions=False)
        return thread.submit(call).result()


def counted(folder: Path, *options: str) -> dict[str, int]:
    result = prune(folder, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@contextlib.contextmanager
def rows(folder: Path) -> Generator[sqlite3.Connection]:
    connection = sqlite3.connect(folder / "fedplat.sqlite")
    with contextlib.closing(connection), connection:
        yield connection


async def trained(site: Site, more: str = "", rounds: int = ROUNDS) -> str:
    """A job of two clients that has ended; version v has the values (v, 0)."""
    job, clients = await site.operator.start(job_file(rounds=rounds, more=more), ZERO), await site.fleet(2)
    for version in range(1, rounds + 1):
        await play(site, clients, job, version, 1.0, 0.0)
    await site.operator.until(job, "job", "COMPLETED")
    return job


async def kept(site: Site, job: str) -> list[int]:
    return [one.model.version for one in await site.operator.versions(job) if not one.model_removed_unix_s]


async def findings(folder: Path) -> object:
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    return report.findings, report.notes


async def test_the_daemon_keeps_what_a_job_says(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await trained(site, POLICY)

        async def applied() -> bool:
            return await kept(site, job) == [0, 3, 5, 6]

        await daemons.until(applied, "old models to be given up")
        assert (await values(site, job, 3), await values(site, job)) == ([3.0, 0.0], [6.0, 0.0])
        text = "the model file of this version was removed: 4; the kept versions are 0, 3, 5 to 6"
        with pytest.raises(aio.AioRpcError, match=text):
            await site.operator.export(job, 4)
        with pytest.raises(aio.AioRpcError, match="was removed: 2"):
            await roll_back(site, job, 2)
    async with daemons.running(folder):
        pass
    assert len([path for path in (folder / "blobs").rglob("*") if path.is_file()]) == 4
    assert await findings(folder) == ([], [])


async def test_by_default_all_models_stay(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await trained(site, rounds=3)
    async with daemons.running(folder) as site:
        assert await kept(site, job) == [0, 1, 2, 3]
    assert counted(folder, "--dry-run") == {
        "models": 0,
        "states": 0,
        "attempts": 0,
        "clients": 0,
        "orphans": 0,
        "bytes": 0,
        "removed": False,
        "files_removed": False,
    }
    assert prune(folder, "--yes").stdout == "nothing to remove\n"


async def test_an_operator_prunes_what_has_ended(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await trained(site)
        await site.operator.upload(daemons.initial_model())  # no job has it
    with rows(folder) as database:
        database.execute("UPDATE attempts SET ended_unix_s = ended_unix_s - 40 * 86400 WHERE round <= 4")
        database.execute("UPDATE clients SET seen_unix_s = seen_unix_s - 100 * 86400 WHERE sequence = 1")
        database.execute("UPDATE assignments SET metrics = json_object('loss', 0.5)")
        num_audited = database.execute("SELECT count(*) FROM audit_log").fetchone()[0]
    limits = ("--keep-versions", "2", "--older-than", "30d", "--clients-unseen-for", "90d")
    planned = counted(folder, *limits, "--dry-run")
    expected = {"models": 4, "states": 0, "attempts": 4, "clients": 1, "orphans": 1}
    assert {name: planned[name] for name in expected} == expected
    assert planned["bytes"] > 0
    refused = prune(folder, *limits, answer="n\n")
    assert refused.exit_code == 1
    assert "4 model files of old versions" in refused.stdout
    assert counted(folder, *limits, "--dry-run") == planned, "asked, and answered with no"
    done = counted(folder, *limits, "--yes")
    assert done == planned | {"removed": True, "files_removed": True}
    assert counted(folder, *limits, "--dry-run")["bytes"] == 0
    with rows(folder) as database:
        assert database.execute("SELECT count(*) FROM audit_log").fetchone()[0] == num_audited + 1
        assert database.execute("SELECT count(*) FROM clients").fetchone()[0] == 1
        assert database.execute("SELECT count(*) FROM assignments").fetchone()[0] == 2 * ROUNDS
        with_metrics = "SELECT min(round), count(*) FROM assignments WHERE metrics LIKE '%loss%'"
        assert database.execute(with_metrics).fetchone() == (5, 2 * (ROUNDS - 4))
        of_old = "SELECT count(*) FROM history WHERE entity = 'assignment' AND round <= 4"
        assert database.execute(of_old).fetchone()[0] == 0
        assert database.execute(of_old.replace("<=", ">")).fetchone()[0] > 0
    assert await findings(folder) == ([], [])
    async with daemons.running(folder) as site:
        assert await kept(site, job) == [0, 5, 6]
        assert await values(site, job) == [6.0, 0.0]
        assert len(await site.operator.rounds(job)) == ROUNDS


async def test_limits_of_the_command_concern_jobs_that_have_ended(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job, clients = await site.operator.start(job_file(rounds=ROUNDS), ZERO), await site.fleet(2)
        for version in range(1, 4):
            await play(site, clients, job, version, 1.0, 0.0)
    with rows(folder) as database:
        database.execute("UPDATE attempts SET ended_unix_s = ended_unix_s - 40 * 86400")
    planned = counted(folder, "--keep-versions", "1", "--older-than", "30d", "--dry-run")
    assert (planned["models"], planned["attempts"]) == (0, 0)


async def test_a_client_that_was_pruned_needs_a_new_ticket(folder: Path) -> None:
    async with daemons.running(folder) as site:
        client = await site.enroll(key="the only one")
    with rows(folder) as database:
        database.execute("UPDATE clients SET seen_unix_s = 1.0")
    assert counted(folder, "--clients-unseen-for", "1d", "--yes")["clients"] == 1
    async with daemons.running(folder) as site:
        with pytest.raises(aio.AioRpcError, match="this server has no such client; enroll with a ticket"):
            await client.over(site.channel).open_session()
        again = await site.enroll(key="the only one")
        assert again.client_id != client.client_id


async def test_sqlite_is_not_pruned_beside_a_daemon(folder: Path) -> None:
    async with daemons.running(folder):
        with pytest.raises(ConfigError, match="no other process may write to its SQLite database: stop it first"):
            prune(folder, "--dry-run")


@pytest.mark.slow
async def test_beside_a_daemon_on_postgresql_files_are_left_to_it(folder: Path, postgres: str) -> None:
    async with daemons.running(folder, database=postgres) as site:
        job = await trained(site)
        await site.operator.upload(daemons.initial_model())  # as if the daemon was about to reference it
        number = len([path for path in (folder / "blobs").rglob("*") if path.is_file()])
        options = ["--database", postgres, "--keep-versions", "1", "--yes", "--json"]
        # A process of its own: what this one prints is also the daemon's log.
        command = [str(Path(sys.executable).parent / "fedplat-server"), "prune", "--data-dir", str(folder), *options]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode == 0
        told = json.loads(output)
        assert (told["models"], told["orphans"]) == (5, 0)
        assert (told["removed"], told["files_removed"]) == (True, False)
        assert len([path for path in (folder / "blobs").rglob("*") if path.is_file()]) == number
        assert await kept(site, job) == [0, 6]
        assert await values(site, job) == [6.0, 0.0]
    async with daemons.running(folder, database=postgres) as site:
        left = [path.parent.name for path in (folder / "blobs").rglob("*") if path.is_file()]
        assert (len(left), left.count("set-aside")) == (3, 1)  # the operator's model, which no version had


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--older-than", "soon"], "--older-than 'soon': expected a number and s, m, h, d or w, such as 24h or 90d"),
        (
            ["--clients-unseen-for", "3h"],
            "--clients-unseen-for 3h: expected at least 1d, as daemons rarely store when they saw a client",
        ),
        (["--json"], "--json does not ask for confirmation: add --dry-run or --yes"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path: Path, options: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prune(tmp_path, *options)
    assert str(caught.value) == text


def test_a_lock_that_cannot_be_opened_is_no_running_daemon(tmp_path: Path) -> None:
    databases.create_sqlite(tmp_path / "fedplat.sqlite")
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be written to: Is a directory"):
        prune(tmp_path, "--dry-run")


def test_models_that_cannot_be_listed_are_not_nothing_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does another database find a folder of models empty."""
    databases.create_sqlite(tmp_path / "fedplat.sqlite")
    assert "nothing to remove" in prune(tmp_path, "--dry-run").output
    (tmp_path / "blobs" / "0a").mkdir()

    list_all = os.listdir

    def list_some(folder: Path) -> list[str]:
        if folder.name == "0a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return list_all(folder)

    monkeypatch.setattr(os, "listdir", list_some)
    with pytest.raises(BlobError, match=r"blobs/0a'; let the user of the server read and write it"):
        prune(tmp_path, "--dry-run")
    with pytest.raises(BlobError, match="Permission denied"):
        ownership.check_new_database(tmp_path, "postgresql://h/new")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no data folder"):
        prune(tmp_path / "none")
