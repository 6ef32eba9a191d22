"""SIGKILL in the middle of saves: what was acknowledged is there, and nothing is there by half."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fedplat.rounds.states import JobStatus
from fedplat_server.database.engine import async_url
from fedplat_server.database.store import open_store
from support.store import victim
from support.store.driver import Driver, check_invariants

TESTS = Path(__file__).parents[2]


def _killed_after(database: str, saves: int) -> dict[str, int]:
    """Runs victim.py until it has said so many saves; the last revision of each job that it said was saved."""
    command = [sys.executable, victim.__file__, database]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    revisions: dict[str, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for _, line in zip(range(saves), process.stdout, strict=False):
            job_id, revision = line.split()
            revisions[job_id] = int(revision)
        process.kill()
        for line in process.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                job_id, revision = line.split()
                revisions[job_id] = int(revision)
    assert process.returncode == -9
    return revisions


@pytest.mark.parametrize("saves", [1, *(pytest.param(saves, marks=pytest.mark.slow) for saves in (10, 57, 150))])
async def test_a_killed_server_leaves_a_consistent_database(sqlite: str, saves: int) -> None:
    acknowledged = _killed_after(sqlite, saves)
    assert acknowledged
    with closing(sqlite3.connect(async_url(sqlite).database or "")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    store = await open_store(sqlite)
    try:
        await check_invariants(sqlite)
        found = {record.state.job_id: record.state for record in await store.jobs.load_jobs()}
        for job_id, revision in acknowledged.items():
            assert found[job_id].revision >= revision

        driver = Driver(store, "after ")
        for job in found.values():
            driver.coordinator.add(job)
        await driver.restart()
        assert not any(job.open_attempt for job in driver.coordinator.jobs.values() if job.status != JobStatus.RUNNING)
        await check_invariants(sqlite)
    finally:
        await store.close()
