"""What does one server process take for clients that wait, and how fast does a cohort of them get its work?

    python benchmarks/check_ins.py [--clients 100 --clients 1000] [--full] [--json] [--save]

Real clients but for their processes: enrolled, with a session and a key each, every call signed, over TLS and SQLite.
Beside them the limit: as many long polls over as many connections of bare grpc.aio, with nothing behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from grpc import aio

import crowd
from crowd import Member
from fedplat.admin import AdminClient, profile
from fedplat.auth import Ticket
from fedplat.cli import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_server.auth.pki_folder import PkiFolder
from report import Cell, JsonOption, Report, SaveOption, finish

HERE = Path(__file__).resolve().parent
COHORT = 1000
ASKERS = 32
"""Clients that ask again and again while the others wait."""
ASKING_S = 3.0
FOR_EVER_S = 300.0
"""The longest poll that the server allows."""
JOB = """
name = "crowd"
population = "bench"
trainer = "noop"
rounds = 1
[model]
initial = "noop.safetensors"
[selection]
goal = {cohort}
over_selection = 1.0
min_fraction = 1.0
"""


@dataclasses.dataclass
class Process:
    """A server in a process of its own."""

    address: str
    command: Sequence[str]
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; whoever calls it waits until it answers."""
        self.running = subprocess.Popen([sys.executable, *self.command], stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """Ends it at once."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()

    def memory_kb(self, name: str = "VmRSS") -> int:
        """A size that the kernel tells of the process."""
        assert self.running is not None
        lines = Path(f"/proc/{self.running.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


@contextlib.contextmanager
def server(folder: Path, *, tls: bool, bare: bool = False) -> Generator[Process]:
    """A server on a free port; it is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    init = ["-m", "fedplat_server", "init", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    if subprocess.run([sys.executable, *init], stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("the server could not be set up; see above")
    files = PkiFolder.of(folder).files
    if bare:
        command = [str(HERE / "bare_polls.py"), address]
        command += ["--certificate", str(files.certificate), "--key", str(files.key)] if tls else []
    else:
        command = ["-m", "fedplat_server", "run", "--listen", address, "--data-dir", str(folder)]
        command += ["--log-level", "warning", *([] if tls else ["--insecure"])]
    process = Process(address, command)
    try:
        process.start()
        yield process
    finally:
        process.kill()


Measured = dict[str, Cell]


async def bare(folder: Path, count: int, num_connections: int, tls: bool) -> Measured:
    """The limit: what the transport itself takes."""
    with server(folder, tls=tls, bare=True) as process:
        ca = profile.load(folder / "admin.toml").ca if tls else ""
        async with crowd.connections(process.address, ca, num_connections) as channels:
            await asyncio.gather(*(ask(channel, "Ask", wait_for_ready=True) for channel in channels))
            await rate(channels, lambda channel: ask(channel, "Ask"), 1.0)
            before = process.memory_kb()
            polls = [asyncio.create_task(ask(channels[n % len(channels)], "Wait")) for n in range(count)]
            await asyncio.gather(*(ask(channel, "Ask") for channel in channels))
            calls = await rate(channels, lambda channel: ask(channel, "Ask"))
            after = process.memory_kb()
            await ask(channels[0], "Release")
            await asyncio.gather(*polls)
    return {"bare gRPC: KB a waiter": (after - before) / count, "bare gRPC: calls/s beside them": calls}


async def ask(channel: aio.Channel, method: str, **options: Any) -> bytes:
    """A call of the bare server, as large as a check-in."""
    call: Any = channel.unary_unary(f"/bench.Bare/{method}")
    return await call(bytes(200), timeout=600.0, **options)


async def rate(among: Sequence[Any], what: Callable[[Any], Awaitable[object]], seconds: float = ASKING_S) -> float:
    """How many calls a second `ASKERS` callers get done who ask again and again."""
    end, num_calls = time.monotonic() + seconds, 0

    async def one(who: Any) -> None:
        nonlocal num_calls
        while time.monotonic() < end:
            await what(who)
            num_calls += 1

    start = time.monotonic()
    await asyncio.gather(*(one(among[number % len(among)]) for number in range(ASKERS)))
    return num_calls / (time.monotonic() - start)


async def measure(folder: Path, count: int, num_connections: int, tls: bool) -> Measured:
    """Lets `count` clients wait, and work."""
    found: Measured = {}
    with server(folder, tls=tls) as process, operator(folder, tls=tls) as admin:
        await asyncio.to_thread(admin.wait_until_ready, 60.0)
        made = admin.create_enrollment("bench", count + ASKERS, 3600.0, process.address)
        ticket = Ticket.from_text(made.ticket)
        async with crowd.connections(process.address, ticket.ca, num_connections) as channels:
            everybody = crowd.members(channels, count + ASKERS)
            found["enrollments/s"] = await timed(everybody, lambda member: member.enroll(ticket))
            found["sessions/s"] = await timed(everybody, Member.open_session)
            who, askers = everybody[:count], everybody[count:]
            await rate(askers, lambda member: member.check_in(0.0), 1.0)
            before = process.memory_kb()
            fleet = Fleet(who)
            await all_wait(admin, count)
            found["server with them, MB"] = process.memory_kb() / 1000
            found["KB a waiter"] = (process.memory_kb() - before) / count
            found["check-ins/s beside them"] = await rate(askers, lambda member: member.check_in(0.0))
            found.update(await rounds(admin, fleet))
            found["server at its peak, MB"] = process.memory_kb("VmHWM") / 1000
            found["all wait again after a SIGKILL, s"] = await comeback(process, admin, count)
            await fleet.close()
    return found


@contextlib.contextmanager
def operator(folder: Path, tls: bool) -> Generator[AdminClient]:
    """An operator of role admin."""
    known = profile.load(folder / "admin.toml")
    with AdminClient(known if tls else msgspec.structs.replace(known, ca="", insecure=True)) as admin:
        yield admin


async def timed(who: Sequence[Member], what: Callable[[Member], Awaitable[object]]) -> float:
    """How many of them a second do something."""
    start = time.monotonic()
    await crowd.each(who, what)
    return len(who) / (time.monotonic() - start)


class Fleet:
    """Members that wait for work, each by a long poll that is begun again until there is some."""

    def __init__(self, who: Sequence[Member]) -> None:
        self.size = len(who)
        self._assigned: asyncio.Queue[tuple[Member, str]] = asyncio.Queue()
        self._polls: set[asyncio.Task[None]] = set()
        self.wait(who)

    def wait(self, who: Sequence[Member]) -> None:
        """Lets these members wait."""
        for member in who:
            poll = asyncio.create_task(self._wait(member))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)

    async def cohort(self, count: int) -> list[tuple[Member, str]]:
        """The next members that have an assignment in hand, with its token."""
        return [await self._assigned.get() for _ in range(count)]

    async def close(self) -> None:
        """Ends the long polls."""
        polls = list(self._polls)
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)

    async def _wait(self, member: Member) -> None:
        while True:
            answer = await crowd.wait_through_outages(member, FOR_EVER_S)
            if answer.HasField("assignment"):
                self._assigned.put_nowait((member, answer.assignment.token))
                return


async def all_wait(admin: AdminClient, count: int) -> None:
    """Returns when so many clients are in the waiting room."""
    while (await asyncio.to_thread(admin.status)).num_waiting < count:
        await asyncio.sleep(0.05)


async def rounds(admin: AdminClient, fleet: Fleet, repeats: int = 3) -> Measured:
    """The time from a job's start to the last client's assignment, and from there to the committed version."""
    size = min(COHORT, fleet.size)
    text = JOB.format(cohort=size)
    job = submission.Submission(text, parse_job(text), Parameters.from_arrays({"w": np.zeros(1000, np.float32)}))
    update = job.parameters.to_bytes()
    assigned: list[float] = []
    committed: list[float] = []
    for _ in range(repeats):
        await all_wait(admin, fleet.size)
        draft = await asyncio.to_thread(submission.submit, admin, job, start=False)
        start = time.monotonic()
        starting = asyncio.create_task(asyncio.to_thread(admin.start, draft.job_id))
        cohort = await fleet.cohort(size)
        assigned.append(time.monotonic() - start)
        await starting
        start = time.monotonic()
        await asyncio.gather(*(member.report(token, update) for member, token in cohort))
        await asyncio.to_thread(list, admin.watch_job(draft.job_id))
        committed.append(time.monotonic() - start)
        fleet.wait([member for member, _ in cohort])
    return {
        "clients of a round": size,
        "all of them assigned, s": statistics.median(assigned),
        "all reported and committed, s": statistics.median(committed),
    }


async def comeback(process: Process, admin: AdminClient, count: int) -> float:
    """The time from the restart of a server that was killed until everybody waits again, in a new session."""
    await all_wait(admin, count)
    process.kill()
    process.start()
    start = time.monotonic()
    await asyncio.to_thread(admin.wait_until_ready, 60.0)
    await all_wait(admin, count)
    return time.monotonic() - start


def main(
    clients: Annotated[list[int] | None, typer.Option(min=1, help="Clients that wait; may be repeated.")] = None,
    full: Annotated[bool, typer.Option("--full", help="100, 1,000 and 10,000 clients, also without TLS.")] = False,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure check-ins, waiting clients and cohorts."""
    counts = clients or ([100, 1000, 10_000] if full else [100, 1000])
    settings = [(count, True) for count in counts] + ([(counts[-1], False)] if full else [])
    columns: list[str] = ["clients that wait"]
    found: list[Measured] = []
    for count, tls in settings:
        num_connections = min(1000, max(10, count // 10))
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as another:
            limit = asyncio.run(bare(Path(one), count, num_connections, tls))
            ours = asyncio.run(measure(Path(another), count, num_connections, tls))
        columns.append(f"{count:,}" + ("" if tls else " without TLS"))
        found.append({"connections": num_connections, **ours, **limit})
    rows = tuple((name, *(one[name] for one in found)) for name in found[0])
    report = Report(
        name="check-ins",
        title="One server process, and clients that wait for work",
        columns=tuple(columns),
        rows=rows,
        notes=("The load comes from one process on the same machine, which takes at least one core for itself.",),
    )
    finish(report, as_json, save)


if __name__ == "__main__":
    typer.run(main)
