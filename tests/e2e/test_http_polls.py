"""A thousand long polls over HTTP/1.1 and TLS held at one server: its memory and its open files, counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf.message import Message

from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import fleet_pb2
from support import daemons, processes
from support.http_channel import headers_of, read_answer, request
from support.raw_client import CHALLENGE, FLEET, Signing, private_key

pytestmark = pytest.mark.slow
NUM_POLLS = 1000
AT_A_TIME = 50
WAIT_S = 240.0
BYTES_PER_POLL = 80 * 2**10
SPARE_FILES = 16
"""What the server opens besides: connections of operators, files of the database, threads."""


class Poller(Signing):
    """A client with one connection."""

    def __init__(self, number: int, port: int, tls: ssl.SSLContext) -> None:
        super().__init__(private_key(f"poller {number}"))
        self._port, self._tls = port, tls
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, server_hostname="localhost"
        )

    async def enroll(self, ticket: Ticket) -> None:
        enrolled = fleet_pb2.EnrollRequest(
            population=ticket.population,
            token=ticket.secret,
            public_key=self.public_key,
            idempotency_key=f"poller {self.public_key.hex()}",
            protocol_version=1,
        )
        answer = fleet_pb2.EnrollResponse.FromString(await self._prove("Enroll", enrolled))
        self.client_id = answer.client_id
        self.opened(fleet_pb2.OpenSessionResponse.FromString(await self._prove("OpenSession", self.opening())))

    def poll(self) -> None:
        """Send a check-in, without waiting for its answer."""
        check_in = fleet_pb2.CheckInRequest(protocol_version=1, wait_s=WAIT_S, trainers=["toy"])
        self._send("CheckIn", check_in, self.signed("CheckIn", check_in))

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _prove(self, method: str, message: Message) -> bytes:
        self._send("GetChallenge", CHALLENGE, ())
        nonce = fleet_pb2.GetChallengeResponse.FromString(await self._read()).nonce
        self._send(method, message, self.proven(method, message, nonce))
        return await self._read()

    def _send(self, method: str, message: Message, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        assert self._writer is not None
        headers = headers_of(metadata, "application/proto")
        self._writer.write(request(f"{FLEET}{method}", message.SerializeToString(), headers))

    async def _read(self) -> bytes:
        answer = await asyncio.wait_for(read_answer(self._reader), daemons.PATIENCE_S)
        assert answer.status == 200, answer
        return answer.body


def parts(pollers: Sequence[Poller]) -> Iterator[Sequence[Poller]]:
    return (pollers[start : start + AT_A_TIME] for start in range(0, len(pollers), AT_A_TIME))


def count_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    """The memory that the process occupies, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("VmRSS:"))


async def hold(server: processes.Server, pollers: Sequence[Poller]) -> tuple[int, int]:
    """Hold the polls of all; the server's memory and its open files meanwhile, and end all connections."""
    for part in parts(pollers):
        await asyncio.gather(*(poller.connect() for poller in part))
        for poller in part:
            poller.poll()

    async def are_waiting() -> bool:
        with server.admin() as admin:
            return admin.status().num_waiting == len(pollers)

    await daemons.until(are_waiting, "all polls")
    found = memory(server.pid), count_files(server.pid)
    for part in parts(pollers):
        await asyncio.gather(*(poller.close() for poller in part))
    return found


async def test_a_thousand_polls_have_a_file_each_and_little_memory(tmp_path: Path) -> None:
    port = processes.free_port()
    with processes.server(tmp_path / "server", "--http-listen", f"127.0.0.1:{port}") as server:
        ticket = Ticket.from_text(server.ticket("demo", NUM_POLLS))
        tls = ssl.create_default_context(cafile=str(server.ca))
        pollers = [Poller(number, port, tls) for number in range(NUM_POLLS)]
        for part in parts(pollers):
            await asyncio.gather(*(poller.connect() for poller in part))
            await asyncio.gather(*(poller.enroll(ticket) for poller in part))
            await asyncio.gather(*(poller.close() for poller in part))
        before, files = memory(server.pid), count_files(server.pid)
        first_memory, first_files = await hold(server, pollers)
        print(
            f"{(first_memory - before) / NUM_POLLS:.0f} bytes and {(first_files - files) / NUM_POLLS:.3f} files a poll"
        )
        assert NUM_POLLS <= first_files - files + SPARE_FILES <= NUM_POLLS + 2 * SPARE_FILES
        assert first_memory - before <= NUM_POLLS * BYTES_PER_POLL

        async def are_closed() -> bool:
            return count_files(server.pid) <= files + SPARE_FILES

        await daemons.until(are_closed, "the end of all connections")
        second_memory, _ = await hold(server, pollers)  # nothing is left of the first ones
        print(f"{second_memory - first_memory} bytes more for as many others")
        assert second_memory - first_memory <= 0.25 * NUM_POLLS * BYTES_PER_POLL
        assert server.stop() == 0
    assert "Traceback" not in server.log_text()
