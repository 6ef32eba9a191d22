"""The one rank that the daemon starts itself, where there is no pool: for code that must not run in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Literal

import msgspec

from fedplat.errors import MissingExtraError
from fedplat_server import logs
from fedplat_server.errors import PoolBrokenError, PoolUnavailableError, PoolWorkError
from fedplat_server.pool.link import PoolLink, Session

IDLE_S = 60.0
"""How long a rank without work keeps its memory."""
START_S = 120.0
_TURN_S = 1.0


class OwnRank:
    """A rank in a process of its own, reached by a private socket; started when it is needed, ended when it is not.

    It ends with the daemon, however that ends. PyTorch has as many threads in it as a pool's rank by default: one, or
    what OMP_NUM_THREADS says. So the results have the same bits.
    """

    def __init__(self, backend: Literal["auto", "gloo"] = "auto", idle_s: float = IDLE_S) -> None:
        """It computes on a GPU if there is one; with "gloo", on the CPU."""
        self._backend = backend
        self._idle_s = idle_s
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._folder: Path | None = None
        self._ended: list[Process] = []
        self._num_users = 0
        self._ending: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def begin(
        self, work: str, request: msgspec.Struct, on_note: Callable[[bytes], None]
    ) -> AsyncGenerator[Session]:
        """What `PoolLink.begin` does; raises `PoolUnavailableError` when the rank cannot be started."""
        self._num_users += 1
        if self._ending is not None:
            self._ending.cancel()
        try:
            link = await self._ready()
            async with link.begin(work, request, on_note) as session:
                yield session
        except (PoolBrokenError, PoolWorkError):
            self.end()  # what a work raises ends its process; that may take a moment
            raise
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._ending = asyncio.get_running_loop().call_later(self._idle_s, self.end)

    async def close(self) -> None:
        """Ends the process, and returns when there is none any more."""
        self.end()
        await asyncio.gather(*(process.wait() for process in self._ended))

    def end(self) -> None:
        """Ends the process; the next work has another one."""
        if self._ending is not None:
            self._ending.cancel()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self._ended = [process, *(each for each in self._ended if each.returncode is None)]
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _ready(self) -> PoolLink:
        """The rank's socket, once it listens."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self.end()
                self._folder = Path(tempfile.mkdtemp(prefix="fedplat-rank-"))
                self._process = await _start(self._folder / "rank.sock", self._backend)
            process, folder = self._process, self._folder
            assert folder is not None
            link = PoolLink(folder / "rank.sock")
            waited_s = 0.0
            while not await link.is_there(_TURN_S):
                waited_s += _TURN_S
                if process.returncode is not None or waited_s >= START_S:
                    self.end()
                    raise PoolUnavailableError("the rank for the server's own data did not start; the log says why")
            return link


async def _start(socket: Path, backend: str) -> Process:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError(
            "training on the server's own data needs PyTorch; install it with: pip install 'fedplat-server[pool]'"
        )
    command = (sys.executable, "-P", "-m", "fedplat_server.pool.rank", str(socket), backend, "INFO")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONSAFEPATH": "1"}
    # Not in our process group: Ctrl-C is the daemon's business.
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, env=environment, process_group=0)
    logs.get().info("a rank for the server's own data was started", process=process.pid)
    return process
