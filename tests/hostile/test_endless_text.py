"""Text that a client chooses in an update's header, or of itself: the server keeps little of it, and watches go on."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from grpc import aio

from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from support import processes
from support.jobs import write_job
from support.raw_client import RawClient, digest_of, private_key, reason_name

MIB = 2**20
ESC = "\x1b[2J"
JOB = write_job(
    "bait",
    population="hostile",
    rounds=1000,
    deadlines={"selection_s": 3600, "training_s": 3600},
    retry={"base_s": 0.01, "max_s": 0.01},
)
ENTRY = {"dtype": "F32", "shape": [MIB], "data_offsets": [0, 4 * MIB]}
SQL_OF_TEXTS = """
SELECT (SELECT sum(length(CAST(text AS BLOB)) + length(CAST(metrics AS BLOB))) FROM assignments),
       (SELECT sum(length(CAST(reason AS BLOB)) + length(CAST(metrics AS BLOB))) FROM attempts),
       (SELECT sum(length(CAST(reason AS BLOB)) + length(CAST(metrics AS BLOB))) FROM history)
"""


def with_header(header: Mapping[str, Any], body_bytes: int) -> bytes:
    text = msgspec.json.encode(header)
    return len(text).to_bytes(8, "little") + text + bytes(body_bytes)


def texts_in(database: Path) -> int:
    """Bytes of all texts and metrics in the tables that grow with the reports of clients."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return sum(size or 0 for size in connection.execute(SQL_OF_TEXTS).fetchone())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("fedplat.sqlite*"))


class Place:
    """A daemon with a job, and the hostile client that works for it."""

    def __init__(self, server: processes.Server, admin: AdminClient, model: Parameters) -> None:
        self.server, self.admin = server, admin
        self.job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id
        self.database = server.folder / "fedplat.sqlite"

    async def client(self, channel: aio.Channel) -> RawClient:
        client = RawClient(channel, private_key("hostile"))
        ticket = Ticket.from_text(self.server.ticket("hostile"))
        await client.enroll(population="hostile", idempotency_key="a hostile client", token=ticket.secret)
        await client.open_session()
        return client


@contextlib.contextmanager
def place(folder: Path, model: Parameters) -> Generator[Place]:
    with processes.server(folder / "server", "--insecure") as server, server.admin() as admin:
        yield Place(server, admin, model)


@pytest.mark.slow
@pytest.mark.fault("F46")
def test_endless_headers(tmp_path: Path) -> None:
    model = Parameters.from_arrays({"weight": np.zeros(MIB, np.float32)})
    endless = ESC * 10 + "x" * (8 * MIB)
    # Of 8 MiB, and of as much as is still read for the sake of a good reason.
    updates = [
        with_header({"weight": {**ENTRY, text: 1}}, 0) for text in (endless, endless[: 2**15], ESC + "\x00" * 400)
    ]
    updates += [with_header({text: ENTRY}, 0) for text in (endless, endless[: 2**15], ESC * 200)]
    updates += [with_header({"weight": {**ENTRY, "shape": [int("9" * digits)]}}, 4 * MIB) for digits in (4000, 1500)]
    with place(tmp_path, model) as here:
        refusals = asyncio.run(_deliver(here, updates))
        assert {reason for reason, _ in refusals} == {"REJECTED_SCHEMA"}
        assert max(len(text.encode()) for _, text in refusals) <= 1000
        assert all(text.isprintable() for _, text in refusals)
        texts, log = texts_in(here.database), here.server.log.stat().st_size
        print(f"texts {texts}, log {log}, files {size_of(here.server.folder)} bytes for {len(updates)} updates")
        assert texts < 4096 * len(updates)
        assert log < 8192 * len(updates)
        assert size_of(here.server.folder) < 8 * MIB
        here.admin.cancel(here.job)
        events = list(here.admin.watch_job(here.job))
        rejected = [event for event in events if event.to_state == "REJECTED"]
        assert [event.reason for event in rejected] == [text for _, text in refusals]
        assert events[-1].to_state == "CANCELLED"


async def _deliver(here: Place, updates: list[bytes]) -> list[tuple[str, str]]:
    refusals = list[tuple[str, str]]()
    async with aio.insecure_channel(here.server.address) as channel:
        client = await here.client(channel)
        for content in updates:
            work = await client.assignment()
            refusal = (await client.deliver(work.token, content)).refusal
            refusals.append((reason_name(refusal.reason), refusal.text))
    return refusals


@pytest.mark.slow
@pytest.mark.fault("F46")
def test_misfits_are_not_copied(tmp_path: Path) -> None:
    """One upload of twice the model under a header of an odd length, and many reports of it at once."""
    model = Parameters.from_arrays({"weight": np.zeros(4 * MIB, np.float32)})
    header = {"other": {"dtype": "F32", "shape": [8 * MIB], "data_offsets": [0, 32 * MIB]}}
    update = with_header(header, 32 * MIB)
    assert int.from_bytes(update[:8], "little") % 8
    with place(tmp_path, model) as here:
        grown = asyncio.run(_report_at_once(here, update, 14))
    print(f"RssAnon grew by {grown / MIB:.1f} MiB")
    assert grown < 48 * MIB


async def _report_at_once(here: Place, update: bytes, num_reports: int) -> int:
    """How much more memory the process has at most, while it answers, than before."""
    process = psutil.Process(here.server.pid)
    async with aio.insecure_channel(here.server.address) as channel:
        client = await here.client(channel)
        work = await client.assignment()
        await client.upload(work.token, update)
        before = private_bytes(process)
        reports = asyncio.gather(*(client.report(work.token, digest_of(update)) for _ in range(num_reports)))
        most = before
        while not reports.done():
            most = max(most, private_bytes(process))
            await asyncio.sleep(0)
        answers = await reports
    # A report that comes when the next attempt has begun is of an assignment that is over.
    assert {reason_name(answer.refusal.reason) for answer in answers} in (
        {"REJECTED_SCHEMA"},
        {"REJECTED_SCHEMA", "STALE"},
    )
    return most - before


def private_bytes(process: psutil.Process) -> int:
    """Anonymous memory: without the pages of mapped files, which are the page cache's."""
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


@pytest.mark.slow
@pytest.mark.fault("F46", "F47")
def test_new_metrics_in_every_round(tmp_path: Path) -> None:
    """The largest reports that are accepted, with other names each time: the database grows by a bounded amount."""
    model = Parameters.from_arrays({"weight": np.zeros(2, np.float32)})
    num_rounds = 8
    with place(tmp_path, model) as here:
        before = texts_in(here.database)
        reasons = asyncio.run(_report_metrics(here, model.to_bytes(), num_rounds))
        assert reasons == ["REJECTED_METRICS"] * 2 + [""] * num_rounds
        grown = texts_in(here.database) - before
        print(f"{grown / num_rounds:.0f} bytes of text for each report")
        assert grown < num_rounds * 48_000
        rounds = here.admin.list_rounds(here.job)
        assert len([one for one in rounds if one.client_metrics]) == num_rounds


async def _report_metrics(here: Place, update: bytes, num_rounds: int) -> list[str]:
    wide = "\U0001f600"  # 4 bytes, and 12 in JSON that is ASCII
    reports = [
        {f"{number:02}" + wide * 98: 0.1 for number in range(64)},  # a name of 394 bytes
        {f"{number:02}" + wide * 24: 0.1 for number in range(64)},  # good names, too many of them
    ]
    reports += [
        {f"{turn:02}{number:02}" + wide * 24: 0.12345678901234567 for number in range(40)} for turn in range(num_rounds)
    ]
    reasons = list[str]()
    async with aio.insecure_channel(here.server.address) as channel:
        client = await here.client(channel)
        for metrics in reports:
            work = await client.assignment()
            answer = await client.deliver(work.token, update, metrics=metrics)
            reasons.append(reason_name(answer.refusal.reason) if answer.HasField("refusal") else "")
        await client.assignment()  # the last round is committed
    return reasons
