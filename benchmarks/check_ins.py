"""Measure the memory of one server process with waiting clients, and how fast a cohort gets its assignments.

    python benchmarks/check_ins.py [--clients 100 --clients 1000] [--full] [--json] [--save]

The clients share processes, but are otherwise real: each is enrolled and has its own session and key, every call is
signed, over TLS and with SQLite. The limit: as many long polls over as many connections of bare grpc.aio, without a
server behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from fedplat.admin import AdminClient, profile, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from fedplat_server.auth.pki_folder import PkiFolder
from processes import free_port
from report import Cell, JsonOption, Report, SaveOption, finish

HERE = Path(__file__).resolve().parent
COHORT = 1000
ASKERS = 32
"""Clients that check in repeatedly while the others wait."""
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
    """A separate server process."""

    address: str
    command: Sequence[str]
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. The caller waits until it answers."""
        self.running = subprocess.Popen([sys.executable, *self.command], stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill the process."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()

    def memory_kb(self, name: str = "VmRSS") -> int:
        """Read a memory size of the process from the kernel, in KB."""
        assert self.running is not None
        lines = Path(f"/proc/{self.running.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


@contextlib.contextmanager
def server(folder: Path, *, tls: bool, bare: bool = False) -> Generator[Process]:
    """Run a server on a free port, and end it afterwards."""
    port = free_port()
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
    """Measure the limit: the cost of the transport itself."""
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
    """Make a call of the bare server, as large as a check-in."""
    call: Any = channel.unary_unary(f"/bench.Bare/{method}")
    return await call(bytes(200), timeout=600.0, **options)


async def rate(among: Sequence[Any], what: Callable[[Any], Awaitable[object]], seconds: float = ASKING_S) -> float:
    """Return the calls per second of `ASKERS` callers that repeat a call."""
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
    """Measure the server while `count` clients wait, and while they work."""
    found: Measured = {}
    with server(folder, tls=tls) as process, operator(folder, tls=tls) as admin:
        await asyncio.to_thread(admin.wait_until_ready, 60.0)
        made = admin.create_enrollment("bench", count + ASKERS, 3600.0, process.address)
        ticket = Ticket.from_text(made.ticket)
        async with crowd.connections(process.address, ticket.ca, num_connections) as channels:
            members = crowd.members(channels, count + ASKERS)
            found["enrollments/s"] = await timed(members, lambda member: member.enroll(ticket))
            found["sessions/s"] = await timed(members, Member.open_session)
            who, askers = members[:count], members[count:]
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
    """Connect as an operator with the role admin."""
    known = profile.load(folder / "admin.toml")
    with AdminClient(known if tls else msgspec.structs.replace(known, ca="", insecure=True)) as admin:
        yield admin


async def timed(who: Sequence[Member], what: Callable[[Member], Awaitable[object]]) -> float:
    """Return how many members per second complete an operation."""
    start = time.monotonic()
    await crowd.each(who, what)
    return len(who) / (time.monotonic() - start)


class Fleet:
    """Members that wait for assignments, each with a repeated long poll."""

    def __init__(self, who: Sequence[Member]) -> None:
        self.size = len(who)
        self._assigned: asyncio.Queue[tuple[Member, str]] = asyncio.Queue()
        self._polls: set[asyncio.Task[None]] = set()
        self.wait(who)

    def wait(self, who: Sequence[Member]) -> None:
        """Start the long polls of these members."""
        for member in who:
            poll = asyncio.create_task(self._wait(member))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)

    async def cohort(self, count: int) -> list[tuple[Member, str]]:
        """Return the next members that have an assignment, with its token."""
        return [await self._assigned.get() for _ in range(count)]

    async def close(self) -> None:
        """Cancel the long polls."""
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
    """Wait until `count` clients are in the waiting room."""
    while (await asyncio.to_thread(admin.status)).num_waiting < count:
        await asyncio.sleep(0.05)


async def rounds(admin: AdminClient, fleet: Fleet, repeats: int = 3) -> Measured:
    """Measure the seconds from a job's start to the last assignment, and from there to the committed version."""
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
    """Measure the seconds from the restart of a killed server until all clients wait again, in new sessions."""
    await all_wait(admin, count)
    process.kill()
    process.start()
    start = time.monotonic()
    await asyncio.to_thread(admin.wait_until_ready, 60.0)
    await all_wait(admin, count)
    return time.monotonic() - start


def main(
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of waiting clients; may be repeated.")
    ] = None,
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
        notes=("One process on the same machine generates the load, and uses at least one core.",),
    )
    finish(report, as_json, save)


if __name__ == "__main__":
    typer.run(main)
