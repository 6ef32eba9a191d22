"""The daemon's client of the worker pool: starts tasks, sends their messages, and waits for their results."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Literal, TypeVar

import grpc
import msgspec

from fedplat.config.decoding import prepare_type
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
        with contextlib.suppress(*_CALL_ERRORS):  # the ranks may have ended; `_reply` has their last response
            await self._call.done_writing()
        try:
            return msgspec.msgpack.decode(await self._reply, type=prepare_type(kind))
        except msgspec.DecodeError as exc:
            raise PoolWorkError(f"the pool returned a result that cannot be decoded: {exc}") from exc

    async def close(self) -> None:
        """Cancel the task if it is still running."""
        self._call.cancel()
        self._reply.cancel()
        await asyncio.gather(self._reply, return_exceptions=True)

    async def _receive(self) -> bytes:
        try:
            async for content in self._call:
                match _responses.decode(content):
                    case protocol.TaskNote(note):
                        self._on_note(note)
                    case protocol.TaskReply(reply):
                        return reply
                    case protocol.TaskRefusal(text, out_of_memory):
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

    async def is_ready(self, timeout_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> bool:
        """Return whether a pool listens; wait up to `timeout_s` for one that is starting."""
        deadline = clock() + timeout_s
        while True:
            try:
                await self.describe()
            except PoolError:
                if clock() >= deadline:
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
