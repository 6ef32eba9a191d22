"""A pool of ranks for tests: the real command, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import psutil

from fedplat_server.workers.client import WorkerPool
from support import process_logs


class PoolProcess:
    """A running `fedplat-server pool run`."""

    def __init__(self, folder: Path, ranks: int, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.log = folder / "pool.log"
        command = [str(Path(sys.executable).parent / "fedplat-server"), "pool", "run", "--data-dir", str(folder)]
        with process_logs.open_log(self.log) as log:
            self.process = subprocess.Popen(
                [*command, "--ranks", str(ranks), *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def link(self) -> WorkerPool:
        """The daemon's end."""
        return WorkerPool.at(self.folder)

    async def ready(self) -> WorkerPool:
        """Returns when it listens."""
        assert await self.link.is_ready(150.0)
        return self.link

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by number."""
        children = psutil.Process(self.process.pid).children()
        return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)


@contextlib.contextmanager
def pool(folder: Path, ranks: int = 2, *options: str) -> Generator[PoolProcess]:
    """A pool that ends with the context."""
    assert "RANK" not in os.environ
    running = PoolProcess(folder, ranks, options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()
