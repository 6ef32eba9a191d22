"""The processes of a benchmarked deployment: started, watched, and ended together with their children."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import psutil

POLL_S = 0.05
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class FailedError(Exception):
    """A deployment failed. The message ends with its last output."""


class NotInstalledError(FailedError):
    """The programs of another platform are not installed."""


@dataclasses.dataclass
class Processes:
    """Processes with one environment. Their output goes to files in `logs`.

    They end with the context: also if the benchmark is ended by SIGTERM.
    """

    logs: Path
    environment: Mapping[str, str]
    peaks: dict[int, int] = dataclasses.field(default_factory=dict)
    _started: dict[str, psutil.Popen] = dataclasses.field(default_factory=dict)

    def __enter__(self) -> Processes:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tree = [process for started in self._started.values() for process in family(started)]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in tree:
                try:
                    end(process)
                except psutil.NoSuchProcess:
                    continue
            _, tree = psutil.wait_procs(tree, timeout=5.0)

    def start(self, name: str, command: Sequence[str | Path], folder: Path | None = None) -> psutil.Popen:
        """Start a process in the background."""
        with (self.logs / f"{name}.log").open("wb") as log:
            process = psutil.Popen(
                list(map(str, command)),
                cwd=folder or self.logs,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started[name] = process
        return process

    def run(self, command: Sequence[str | Path], timeout_s: float) -> bool:
        """Run a command to its end. Returns whether its exit status was 0 within the timeout."""
        with (self.logs / "commands.log").open("ab") as log:
            try:
                done = subprocess.run(
                    list(map(str, command)),
                    cwd=self.logs,
                    env=dict(self.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                return False
        return done.returncode == 0

    def note_peak(self, server: psutil.Process) -> None:
        """Record the peak memory so far of a server and of each process that it started."""
        for process in family(server):
            peak = peak_rss(process.pid)
            if peak:
                self.peaks[process.pid] = peak

    def wait(self, what: str, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `is_done`. Raises `FailedError` after the timeout, or if a process ends before."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            for name, process in self._started.items():
                if process.poll() is not None:
                    raise FailedError(f"{name} ended while waiting for {what}: {self._last_output(name)}")
            if time.monotonic() > deadline:
                output = "; ".join(f"{name}: {self._last_output(name)}" for name in list(self._started)[:2])
                raise FailedError(f"waited {timeout_s:.0f} s for {what}; {output}")
            time.sleep(POLL_S)

    def _last_output(self, name: str) -> str:
        lines = _COLOUR.sub("", (self.logs / f"{name}.log").read_text(errors="replace")).split("\n")
        return " | ".join([line for line in lines if line.strip()][-3:])[-600:] or "(nothing printed)"


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def peak_rss(pid: int) -> int:
    """Return the peak memory of a process in bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def free_port() -> int:
    """Return a free loopback port, below those that connections get."""
    while True:
        port = secrets.choice(range(10_000, 30_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def is_open(port: int) -> bool:
    """Return whether a process listens on this loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
