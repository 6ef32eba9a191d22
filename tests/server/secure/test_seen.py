"""What the server has seen: all that it receives, stores and logs in secure rounds, searched for what it must not know.

The server is curious but honest: it runs the protocol, and keeps every byte.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.secure_aggregation.messages import UnmaskAnswer
from fedplat.secure_aggregation.participant import Participant
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_server.rpc import interceptor
from support import daemons
from support.daemons import Site
from support.secure_clients import LIMITS, STEP_S, SecureWork, begin_all, expected_model, secure_job, together

NUM_CLIENTS = 7
WINDOW = 4
"""Consecutive entries that betray a vector: the first ones, and some from its middle."""
MODEL = Parameters.from_arrays({"weight": np.zeros(64, "f4")})


class Seen:
    """Everything that the server has received and stored, and the requests among it."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.steps: list[fleet_pb2.SecureMessage] = []
        self.files: dict[bytes, str] = {}

    def record(self, make: Callable[..., Callable[[bytes], Any]]) -> Callable[..., Callable[[bytes], Any]]:
        """Wraps the maker of decoders, which get the bytes of each message first."""

        def make_recording(*args: Any) -> Callable[[bytes], Any]:
            decode = make(*args)

            def record(data: bytes) -> Any:
                self.messages.append(bytes(data))
                received = decode(data)
                if isinstance(received.message, fleet_pb2.StepRequest):
                    self.steps.append(received.message.secure)
                return received

            return record

        return make_recording

    def copy_files(self, folder: Path, moment: str) -> None:
        """Keeps the bytes of all files: the database and its log, updates, models."""
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".sqlite-shm":
                self.files.setdefault(path.read_bytes(), f"{path.relative_to(folder)} {moment}")

    def contents(self) -> Iterable[tuple[str, bytes]]:
        yield from (("a message", content) for content in self.messages)
        yield from ((where, content) for content, where in self.files.items())

    def find(self, needles: dict[bytes, str]) -> list[str]:
        return [
            f"{what} in {where}"
            for where, content in self.contents()
            for needle, what in needles.items()
            if needle in content
        ]


def betraying(work: SecureWork) -> dict[bytes, str]:
    """Parts of a client's vector in the forms that a program might store it in."""
    assert work.encoded is not None
    weighted = work.update * np.float32(work.num_examples / 4)
    forms = {
        "the update": (work.update, work.update.astype(">f4"), work.update.astype("<f8")),
        "the weighted update": (weighted, weighted.astype("<f8")),
        "the quantized update": (work.encoded[:-1], work.encoded[:-1].astype(">u4"), work.encoded[:-1].astype("<u8")),
    }
    name = work.client.client_id
    return {
        values[start : start + WINDOW].tobytes(): f"{what} of {name}"
        for what, arrays in forms.items()
        for values in arrays
        for start in (0, len(values) // 2)
    }


def rows_with(folder: Path, needles: Iterable[bytes]) -> list[str]:
    """The tables of the database with a value that contains one of these."""
    found: list[str] = []
    with sqlite3.connect(folder / "fedplat.sqlite") as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in database.execute(f'SELECT * FROM "{table}"'):
                values = [value for value in row if isinstance(value, bytes)]
                found += [table for needle in needles if any(needle in value for value in values)]
    database.close()
    return found


def recording(work: SecureWork, drawn: list[bytes]) -> None:
    """Gives the client a participant whose secrets are known to the test."""

    def random(size: int) -> bytes:
        drawn.append(os.urandom(size))
        return drawn[-1]

    work.participant = Participant(work.setup, work.client.public_key, work.client.key.sign, LIMITS, random)


async def run_with_drop_outs(site: Site, seen: Seen, *, confirm: bool) -> tuple[list[SecureWork], list[bytes]]:
    """A round in which one client leaves before its shares, one before its update, and one before its answer."""
    job = await site.operator.start(secure_job(NUM_CLIENTS, threshold=0.55, confirm=confirm, step_s=STEP_S), MODEL)
    works = await begin_all(site, await site.fleet(NUM_CLIENTS), MODEL.schema.num_floating)
    drawn: list[bytes] = []
    for work in works:
        recording(work, drawn)

    async def leave(work: SecureWork) -> None:
        await work.ask(lambda client: client.fail(work.token, model_pb2.REASON_CLIENT_STOPPED))

    await together(works, "advertise")
    await leave(works[0])
    await together(works[1:], "share")
    for work in works[1:]:
        work.mask()  # the one that leaves, too: its vector must stay secret
    seen.copy_files(site.folder, "after the shares")
    await leave(works[1])
    await together(works[2:], "report")
    requests = await asyncio.gather(*(work.step() for work in works[2:]))
    if confirm:
        requests = await asyncio.gather(
            *(work.confirm(request) for work, request in zip(works[2:], requests, strict=True))
        )
    seen.copy_files(site.folder, "after the updates")
    assert list((site.folder / "uploads").rglob("*")), "the spool is where it was looked for"
    await asyncio.gather(*(work.answer(request) for work, request in zip(works[3:], requests[1:], strict=True)))
    seen.copy_files(site.folder, "after the answers")
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert model.to_vector().tobytes() == expected_model(MODEL, works[2:]).tobytes()
    seen.copy_files(site.folder, "in the end")
    return works, drawn


@pytest.mark.fault("S1")
@pytest.mark.calm("what the server sees does not depend on its store")
@pytest.mark.parametrize("confirm", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_what_the_server_has_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], confirm: bool
) -> None:
    seen = Seen()
    monkeypatch.setattr(interceptor, "_decoder", seen.record(interceptor._decoder))  # pyright: ignore[reportPrivateUsage]
    async with daemons.running(folder) as site:
        works, drawn = await run_with_drop_outs(site, seen, confirm=confirm)
    logs = capfd.readouterr()
    seen.messages += [logs.out.encode(), logs.err.encode()]

    # The recorder sees what there is to see: each masked update as it was sent, and its bytes in the spool.
    for work in works[2:]:
        part = work.masked[-64:]
        assert any(part in content for content in seen.messages)
        assert any(part in content and "uploads" in where for content, where in seen.files.items())
    control = Seen()
    assert works[2].encoded is not None
    control.messages = [works[2].encoded.tobytes(), works[3].update.tobytes()]
    assert len(control.find(betraying(works[2]) | betraying(works[3]))) >= 2

    # No unmasked input, of any client.
    assert seen.find({needle: what for work in works[1:] for needle, what in betraying(work).items()}) == []
    # No secret that a client has drawn: keys, seeds, and the coefficients of their shares.
    secrets = {secret: "a secret of a client" for secret in drawn if len(secret) >= 16}
    assert len(secrets) >= 3 * NUM_CLIENTS
    assert seen.find(secrets) == []
    check_answers(seen, works)

    # Nothing of it is left in the database, in which the messages were while the attempt was open.
    messages = [content for request in seen.steps for content in (request.keys, request.shares, request.answer)]
    kept = [content for content in messages if len(content) >= 64]
    assert any(content in stored for content in kept for stored in seen.files)
    assert rows_with(folder, kept) == []
    assert [path for path in (folder / "uploads").rglob("*") if path.is_file()] == []


def check_answers(seen: Seen, works: list[SecureWork]) -> None:
    """The server has shares of one secret of each client only: of the seed or of the masking key."""
    answers = {request.answer for request in seen.steps if request.answer}
    decoded = [UnmaskAnswer.from_bytes(answer) for answer in answers]
    assert len(decoded) == NUM_CLIENTS - 3
    seeds = Counter(position for answer in decoded for position in answer.seed_shares)
    keys = Counter(position for answer in decoded for position in answer.key_shares)
    assert not seeds.keys() & keys.keys()
    assert len(seeds) == NUM_CLIENTS - 2
    assert len(keys) == 1, "of the client that dropped out after its shares; that of the other one is not needed"
    assert {(each.survivors, each.dropped) for work in works for each in work.asked} == {
        (works[3].asked[0].survivors, works[3].asked[0].dropped)
    }
