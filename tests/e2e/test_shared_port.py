"""Two server processes on one PostgreSQL and one port: calls arrive at both, and go on when one is killed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from fedplat.admin import AdminClient, profile
from fedplat.errors import ServerUnreachableError
from support import process_logs, processes

pytestmark = pytest.mark.slow


class Host:
    """Daemons on one machine that share a port."""

    def __init__(self, folder: Path, database: str) -> None:
        self.shared = f"127.0.0.1:{processes.free_port()}"
        self.own = self.shared
        self.folder = folder
        self.command = [str(processes.BIN / "fedplat-server"), "run", "--share-port", "--listen", self.shared]
        self.command += ["--data-dir", str(folder), "--database", database, "--lease", "3"]

    def admin(self, address: str) -> AdminClient:
        """An operator on a connection of its own."""
        return AdminClient(msgspec.structs.replace(profile.load(self.folder / "admin.toml"), server=address))

    def started(self) -> subprocess.Popen[bytes]:
        """A daemon more; `own` is its own address."""
        own = self.own = f"127.0.0.1:{processes.free_port()}"
        with process_logs.open_log(self.folder / "log") as log:
            process = subprocess.Popen([*self.command, "--advertise", own], stdout=log, stderr=log)
        with self.admin(own) as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
        return process

    def taken_by(self) -> str:
        """Which daemon a new connection comes to: the name of a gateway, or "" for the leader."""
        with self.admin(self.shared) as admin:
            return admin.status().gateway


def test_calls_arrive_at_all_and_go_on_when_one_is_killed(tmp_path: Path, database: str) -> None:
    # The real command: other tests run it in their own process.
    init = [str(processes.BIN / "fedplat-server"), "init", "--data-dir", str(tmp_path), "--database", database]
    subprocess.run([*init, "--host", "127.0.0.1"], check=True, capture_output=True)
    host = Host(tmp_path, database)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            running.append(host.started())
        seen = set[str]()

        def both() -> bool:
            seen.add(host.taken_by())
            return len(seen) == 2

        processes.until(both, "connections to both daemons")
        assert "" in seen
        again = [*host.command, "--advertise", host.own]
        refused = subprocess.run(again, capture_output=True, text=True)
        assert (refused.returncode, f"cannot listen on {host.own}" in refused.stderr) == (2, True), refused.stderr
        running[0].send_signal(signal.SIGKILL)  # it leads
        running[0].wait()

        def led_by_the_other() -> bool:
            try:
                return host.taken_by() == ""
            except ServerUnreachableError:
                return False

        processes.until(led_by_the_other, "the other daemon to lead")
        assert [host.taken_by() for _ in range(8)] == [""] * 8  # no connection is lost at the one that is gone
    finally:
        for process in running:
            process.kill()
            process.wait()
