"""Real processes for the tests: a server daemon and clients, as an operator would start them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from fedplat.admin import AdminClient, profile
from support import process_logs, releases
from support.polling import BIN, PATIENCE_S, until
from support.ports import free_port

__all__ = ["BIN", "until"]  # beside servers, most tests need these

ROOT = releases.ROOT


class Server:
    """A `fedplat-server run` process on a port of its own; may be killed and started again with the same line.

    `release` is the version of the program.
    """

    def __init__(self, folder: Path, *options: str, release: releases.Release = releases.MAIN) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "server.log"
        self.command = release.command("fedplat-server", "run", "--listen", self.address, "--data-dir", str(folder))
        self.command += options
        self._process: subprocess.Popen[bytes] | None = None
        self.profile_path = folder / "admin.toml"
        self.ca = folder / "pki" / "ca.pem"
        database = options[options.index("--database") + 1] if "--database" in options else None
        self.said_by_init = release.init(folder, int(self.address.rpartition(":")[2]), database)

    @property
    def profile(self) -> profile.Profile:
        """Of an operator of role admin."""
        insecure = "--insecure" in self.command
        return msgspec.structs.replace(profile.load(self.profile_path), insecure=insecure)

    def admin(self) -> AdminClient:
        """An operator of role admin."""
        return AdminClient(self.profile)

    @property
    def pid(self) -> int:
        """The process that runs now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with process_logs.open_log(self.log) as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        with self.admin() as admin:
            admin.wait_until_ready(PATIENCE_S)

    def replace(self, release: releases.Release) -> None:
        """Use another version from the next start on."""
        self.command[0] = release.command("fedplat-server")[0]

    def ticket(self, population: str, num_uses: int = 1) -> str:
        with self.admin() as admin:
            return admin.create_enrollment(population, num_uses, 3600.0, self.address).ticket

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(PATIENCE_S)

    def log_text(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def server(folder: Path, *options: str, release: releases.Release = releases.MAIN) -> Generator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    running = Server(folder, *options, release=release)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def processes(commands: Sequence[Sequence[str]], log: Path) -> Generator[list[subprocess.Popen[bytes]]]:
    """Processes that end with the test."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running: list[subprocess.Popen[bytes]] = []
    try:
        with process_logs.open_log(log) as output:
            for command in commands:
                running.append(
                    subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
                )
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(PATIENCE_S)


def exit_code(process: subprocess.Popen[bytes], patience_s: float, *logs: Path) -> int:
    """The exit code of a process that ends by itself; if the test fails, the ends of these logs are shown."""
    for log in logs:
        process_logs.show_log(log)
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the process did not end within {patience_s:g} s") from None
