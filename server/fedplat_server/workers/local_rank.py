"""A rank that the daemon starts itself if there is no pool, for code that must not run in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command
from fedplat_server import logs
from fedplat_server.child_environment import child_environment
from fedplat_server.errors import PoolBrokenError, PoolUnavailableError, PoolWorkError
from fedplat_server.workers import protocol
from fedplat_server.workers.client import RunningTask, WorkerPool

IDLE_S = 60.0
"""How long a rank without tasks keeps running."""
START_S = 120.0
_POLL_S = 1.0
_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""The variables in which torchrun, mpirun and srun number their processes; see `fedplat.pytorch.distributed`."""


class LocalRank:
    """A rank in its own process, at a private socket; started when it is needed, stopped when it is idle.

    It ends with the daemon, also if that crashes. It has as many PyTorch threads as a rank of a pool has by default
    (one, or OMP_NUM_THREADS), so the results have the same bits.
    """

    def __init__(self, backend: Literal["auto", "gloo"] = "auto", idle_s: float = IDLE_S) -> None:
        """Create a rank that computes on a GPU if there is one; with "gloo", on the CPU."""
        self._backend = backend
        self._idle_s = idle_s
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._folder: Path | None = None
        self._killed: list[Process] = []
        self._num_tasks = 0
        self._idle_timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def start_task(
        self, name: str, request: msgspec.Struct, on_note: Callable[[bytes], None]
    ) -> AsyncGenerator[RunningTask]:
        """Start a task as `WorkerPool.start_task` does. Raises `PoolUnavailableError` if the rank does not start."""
        self._num_tasks += 1
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        try:
            pool = await self._start()
            async with pool.start_task(name, request, on_note) as task:
                yield task
        except (PoolBrokenError, PoolWorkError):
            self.kill()  # a task that raises ends its process, but not at once
            raise
        finally:
            self._num_tasks -= 1
            if not self._num_tasks:
                self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self.kill)

    async def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self.kill()
        await asyncio.gather(*(process.wait() for process in self._killed))

    def kill(self) -> None:
        """Kill the process; the next task starts another one."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self._killed = [process, *(killed for killed in self._killed if killed.returncode is None)]
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _start(self) -> WorkerPool:
        """Start the process unless it is running; return the pool of its one rank once that listens."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self.kill()
                self._folder = Path(tempfile.mkdtemp(prefix="fedplat-rank-"))
                self._process = await _create_process(self._folder / "rank.sock", self._backend)
            process, folder = self._process, self._folder
            assert folder is not None
            pool = WorkerPool(folder / "rank.sock")
            waited_s = 0.0
            while not await pool.is_ready(_POLL_S):
                waited_s += _POLL_S
                if process.returncode is not None or waited_s >= START_S:
                    self.kill()
                    raise PoolUnavailableError("the rank for the server's own data did not start; see the log")
            return pool


def make_environment(daemon: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank that is alone, also if a launcher of several processes started the daemon.

    It runs the trainers of the server's owner, which get none of the daemon's secrets.
    """
    inherited = {name: value for name, value in child_environment(daemon).items() if name not in _LAUNCHERS}
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **inherited, **protocol.RANK_ENVIRONMENT}


async def _create_process(socket: Path, backend: str) -> Process:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError(
            f"training on the server's own data needs PyTorch; install it with: {install_command('torch')}"
        )
    command = (sys.executable, "-P", "-m", "fedplat_server.workers.rank", str(socket), backend, "INFO")
    # Its own process group, so that Ctrl-C only reaches the daemon.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, env=make_environment(os.environ), process_group=0
    )
    logs.get().info("a rank for the server's own data was started", process=process.pid)
    return process
