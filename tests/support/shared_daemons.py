"""Server processes that share a PostgreSQL and a data folder, each of any version."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from fedplat.admin import AdminClient, profile
from fedplat.errors import ServerUnreachableError
from fedplat.wire.v1 import admin_pb2
from support import process_logs, processes, releases


class Daemon:
    """A `fedplat-server run` on the shared database and folder."""

    def __init__(self, folder: Path, database: str, name: str, release: releases.Release = releases.MAIN) -> None:
        self.address = f"127.0.0.1:{processes.free_port()}"
        self.log = folder.parent / f"{name}.log"
        self.release = release
        self._options = ["run", "--listen", self.address, "--data-dir", str(folder), "--database", database]
        self._process: subprocess.Popen[bytes] | None = None
        self.profile_path, self.ca = folder / "admin.toml", folder / "pki" / "ca.pem"

    def admin(self) -> AdminClient:
        """An operator who talks to this daemon."""
        return AdminClient(msgspec.structs.replace(profile.load(self.profile_path), server=self.address))

    def start(self) -> None:
        command = self.release.command("fedplat-server", *self._options)
        with process_logs.open_log(self.log) as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=releases.environment()
            )
        with self.admin() as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
        python = Path(f"/proc/{self._process.pid}/cmdline").read_text().split("\0")[0]
        assert Path(python).parent == self.release.bin  # whose modules `releases.install` has checked

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(processes.PATIENCE_S)

    def replace(self, release: releases.Release) -> None:
        """Stop the daemon as an operator does, and start another version in its place."""
        assert self.stop() == 0
        self.release = release
        self.start()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def started(folder: Path, database: str, versions: Sequence[releases.Release]) -> Generator[list[Daemon]]:
    """Daemons of these versions, which start one after the other; the first one leads, and also makes the folder."""
    folder.mkdir()
    versions[0].init(folder, database=database)
    daemons = [Daemon(folder, database, f"daemon-{number}", each) for number, each in enumerate(versions)]
    try:
        for daemon in daemons:
            daemon.start()
        yield daemons
    finally:
        for daemon in daemons:
            daemon.end()


@contextlib.contextmanager
def two(folder: Path, database: str) -> Generator[tuple[Daemon, Daemon]]:
    """A leader and a gateway of this version."""
    with started(folder, database, [releases.MAIN, releases.MAIN]) as (leader, other):
        yield leader, other


def status(daemon: Daemon) -> admin_pb2.GetStatusResponse | None:
    """The status of a daemon; None if it does not answer."""
    try:
        with daemon.admin() as admin:
            return admin.status()
    except ServerUnreachableError:
        return None


def lease(database: str) -> dict[str, Any]:
    """The row of the lease, with the current time on the database's clock."""

    async def read() -> dict[str, Any]:
        connection = await asyncpg.connect(database)
        try:
            row = await connection.fetchrow("SELECT *, extract(epoch FROM clock_timestamp())::float AS now FROM leases")
            assert row is not None
            return dict(row)
        finally:
            await connection.close()

    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(read())))
    thread.start()
    thread.join()
    return found[0]
