"""The daemon's client of the worker pool, and a rank that the daemon starts itself if there is no pool."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import grpc
import msgspec

from fedplat import errors, extras
from fedplat.config.decoding import prepare_type
from fedplat_server import logs
from fedplat_server.child_environment import child_environment
from fedplat_server.errors import PoolBrokenError, PoolError, PoolMemoryError, PoolUnavailableError, PoolWorkError
from fedplat_server.workers import protocol

_DESCRIBE_S = 10.0
_RETRY_S = 0.1
_BROKEN = "the pool broke off the task: a rank has died, or the pool was stopped"
_CALL_ERRORS = (grpc.RpcError, asyncio.InvalidStateError)  # InvalidStateError: the call has already ended
_Result = TypeVar("_Result", bound=msgspec.Struct)
_responses: msgspec.msgpack.Decoder[protocol.Response] = msgspec.msgpack.Decoder(protocol.Response)
Backend = Literal["auto", "gloo", "nccl"]


def _ignore(content: bytes) -> None:
    return


class RunningTask:
    """One task of the ranks, as `WorkerPool.start_task` yields it."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes], on_note: Callable[[bytes], None]) -> None:
        self._call = call
        self._on_note = on_note
        # Read responses from the start: a reason sent before the ranks ended would be lost with the connection.
        self._reply = asyncio.create_task(self._receive(), name="reply of the pool")

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message to the task.

        Raises `PoolWorkError` or `PoolMemoryError` with the reason that the ranks sent, else `PoolBrokenError`.
        """
        try:
            await self._call.write(msgspec.msgpack.encode(message))
        except _CALL_ERRORS as exc:
            await self._reply  # raises the reason, if there is one
            raise PoolBrokenError(_BROKEN) from exc

    async def result(self, kind: type[_Result]) -> _Result:
        """End the messages and return the task's result. Raises as `send` does."""
        await self._end_messages()
        try:
            return msgspec.msgpack.decode(await self._reply, type=prepare_type(kind))
        except msgspec.DecodeError as exc:
            raise PoolWorkError(f"the pool returned a result that cannot be decoded: {exc}") from exc

    async def close(self) -> None:
        """Cancel the task if it is still running."""
        self._call.cancel()
        self._reply.cancel()
        await asyncio.gather(self._reply, return_exceptions=True)

    async def _end_messages(self) -> None:
        with contextlib.suppress(*_CALL_ERRORS):  # the ranks may have ended; `_reply` has their last response
            await self._call.done_writing()

    async def _receive(self) -> bytes:
        try:
            async for content in self._call:
                match _responses.decode(content):
                    case protocol.TaskNote(note):
                        self._on_note(note)
                    case protocol.TaskReply(reply):
                        await self._end_messages()
                        return reply
                    case protocol.TaskRefusal(text, out_of_memory):
                        await self._end_messages()  # the ranks wait for it before they end
                        raise (PoolMemoryError if out_of_memory else PoolWorkError)(text)
        except (grpc.RpcError, msgspec.DecodeError) as exc:
            raise PoolBrokenError(_BROKEN) from exc
        raise PoolBrokenError(_BROKEN)


class WorkerPool:
    """The ranks that listen at a socket. With the backend "nccl", ranks without GPUs count as unavailable."""

    def __init__(self, path: Path, backend: Backend = "auto") -> None:
        self._path = path
        self._backend: Backend = backend

    @classmethod
    def at(cls, data_dir: Path) -> WorkerPool:
        """Return the pool of a data folder."""
        return cls(protocol.socket_path(data_dir))

    def with_backend(self, backend: Backend) -> WorkerPool:
        """Return the same pool for a job with this backend."""
        return WorkerPool(self._path, backend)

    @contextlib.asynccontextmanager
    async def start_task(
        self, name: str, request: msgspec.Struct, on_note: Callable[[bytes], None] = _ignore
    ) -> AsyncGenerator[RunningTask]:
        """Start a task; leaving the context cancels it if it has no result yet.

        `on_note` is called with each note of the ranks. Raises `PoolUnavailableError` if no pool listens.
        """
        start = protocol.StartTask(name, msgspec.msgpack.encode(request), self._backend)
        async with self._connect() as channel:
            await self._describe(channel)
            call = channel.stream_stream(f"/{protocol.SERVICE}/Run")()
            try:
                await call.write(msgspec.msgpack.encode(start))
            except _CALL_ERRORS as exc:
                raise PoolUnavailableError(_BROKEN) from exc
            task = RunningTask(call, on_note)
            try:
                yield task
            finally:
                await task.close()

    async def describe(self) -> protocol.WorkerInfo:
        """Return the number of ranks and their device. Raises `PoolUnavailableError` if no pool listens."""
        async with self._connect() as channel:
            return await self._describe(channel)

    async def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether a pool listens; wait up to `timeout_s` for one that is starting."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.describe()
            except PoolError:
                if time.monotonic() >= deadline:
                    return False
                await asyncio.sleep(_RETRY_S)
            else:
                return True

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncGenerator[grpc.aio.Channel]:
        with contextlib.ExitStack() as stack:
            try:
                name = stack.enter_context(protocol.short_path(self._path))
            except OSError as exc:
                raise self._unavailable(str(exc.strerror)) from exc
            async with grpc.aio.insecure_channel(f"unix:{name}", options=protocol.OPTIONS) as channel:
                yield channel

    async def _describe(self, channel: grpc.aio.Channel) -> protocol.WorkerInfo:
        describe = channel.unary_unary(f"/{protocol.SERVICE}/Describe")
        try:
            info = msgspec.msgpack.decode(
                await describe(b"", timeout=_DESCRIBE_S), type=prepare_type(protocol.WorkerInfo)
            )
        except grpc.aio.AioRpcError as exc:
            reason = exc.details() or exc.code().name
            raise self._unavailable(reason.rpartition("error: ")[2]) from exc  # the text of the system error, if any
        except msgspec.DecodeError as exc:
            raise self._unavailable(f"a pool of another version of fedplat: {exc}") from exc
        if self._backend == "nccl" and not info.device.startswith("cuda"):
            raise PoolUnavailableError(
                f'the pool computes on {info.device}, and the job needs GPUs: pool.backend = "nccl"'
            )
        return info

    def _unavailable(self, reason: str) -> PoolUnavailableError:
        return PoolUnavailableError(
            f"there is no pool at {self._path} ({reason}); start one with: fedplat-server pool run"
        )


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

    def __init__(self, backend: Literal["auto", "gloo"] = "auto") -> None:
        """Create a rank that computes on a GPU if there is one; with "gloo", on the CPU."""
        self._backend = backend
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
                self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self.kill)

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
        raise errors.MissingExtraError(
            f"training on the server's own data needs PyTorch; install it with: {extras.install_command('torch')}"
        )
    command = (sys.executable, "-P", "-m", "fedplat_server.workers.rank", str(socket), backend, "INFO")
    # Its own process group, so that Ctrl-C only reaches the daemon.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, env=make_environment(os.environ), process_group=0
    )
    logs.get().info("a rank for the server's own data was started", process=process.pid)
    return process
