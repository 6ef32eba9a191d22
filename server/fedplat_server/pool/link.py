"""The daemon's end of the pool: begins works, sends what belongs to them, and waits for their results."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from fedplat_server.errors import PoolBrokenError, PoolError, PoolMemoryError, PoolUnavailableError, PoolWorkError
from fedplat_server.pool import address, frames
from fedplat_server.pool.frames import Frame, Hello

_HELLO_S = 10.0
_LOOK_AGAIN_S = 0.1
_R = TypeVar("_R", bound=msgspec.Struct)
Backend = Literal["auto", "gloo", "nccl"]
_BROKEN = "the pool broke off the work: a rank has died, or the pool was stopped"


def _ignore(content: bytes) -> None:
    return


class Session:
    """One work that is under way; made by `PoolLink.begin`. `hello` says who works."""

    def __init__(self, hello: Hello, connection: socket.socket, on_note: Callable[[bytes], None]) -> None:
        self.hello = hello
        # No stream of asyncio: one that cannot be written to any more forgets what there was to be read.
        self._connection = connection
        self._on_note = on_note

    async def begin(self, work: str, request: msgspec.Struct, backend: Backend) -> None:
        """Names the work; `PoolLink.begin` does it. Raises `PoolUnavailableError`."""
        try:
            await self._write(frames.Begin(work, msgspec.msgpack.encode(request), backend))
        except OSError as exc:
            raise PoolUnavailableError(_BROKEN) from exc

    async def send(self, message: msgspec.Struct) -> None:
        """Sends more for the work. Raises `PoolBrokenError`, or `PoolWorkError` if it was refused meanwhile."""
        try:
            await self._write(frames.Message(msgspec.msgpack.encode(message)))
        except OSError as exc:
            await self._reply()  # which may say why
            raise PoolBrokenError(_BROKEN) from exc

    async def result(self, kind: type[_R]) -> _R:
        """Ends the messages, and returns the work's result. Raises as `send` does."""
        with contextlib.suppress(OSError):  # the ranks may have ended before: what they said at last is read below
            await self._write(frames.End())
        content = await self._reply()
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except msgspec.DecodeError as exc:
            raise PoolWorkError(f"the pool gave a result that cannot be read: {exc}") from exc

    async def _write(self, frame: Frame) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, frames.encoded(frame))

    async def _reply(self) -> bytes:
        while True:
            try:
                frame = await frames.read(self._connection)
            except OSError as exc:
                raise PoolBrokenError(_BROKEN) from exc
            match frame:
                case frames.Note():
                    self._on_note(frame.content)
                case frames.Reply():
                    return frame.content
                case frames.Refused():
                    raise (PoolMemoryError if frame.out_of_memory else PoolWorkError)(frame.text)
                case _:
                    raise PoolBrokenError(f"the pool said {type(frame).__name__}, which nobody asked for")


class PoolLink:
    """The pool that listens at a socket, if there is one; with the backend "nccl", if it has GPUs."""

    def __init__(self, path: Path, backend: Backend = "auto") -> None:
        self._path = path
        self._backend: Backend = backend

    @classmethod
    def of_folder(cls, data_dir: Path) -> PoolLink:
        """The pool of a data folder."""
        return cls(address.of_folder(data_dir))

    def suited(self, backend: Backend) -> PoolLink:
        """The same pool for a job that wants this backend."""
        return PoolLink(self._path, backend)

    @contextlib.asynccontextmanager
    async def begin(
        self, work: str, request: msgspec.Struct, on_note: Callable[[bytes], None] = _ignore
    ) -> AsyncGenerator[Session]:
        """A work of this name. Whoever leaves the context before its result has it thrown away.

        `on_note` is told what the ranks say meanwhile, as long as somebody waits for the result. Raises
        `PoolUnavailableError` when nobody listens.
        """
        async with self._connected() as (connection, hello):
            session = Session(hello, connection, on_note)
            await session.begin(work, request, self._backend)
            yield session

    async def look(self) -> Hello:
        """Who would work. Raises `PoolUnavailableError`."""
        async with self._connected() as (_, hello):
            return hello

    async def is_there(self, patience_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> bool:
        """Whether a pool listens; waits for one that is being formed anew, but no longer than this."""
        deadline = clock() + patience_s
        while True:
            try:
                await self.look()
            except PoolError:
                if clock() >= deadline:
                    return False
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                return True

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[tuple[socket.socket, Hello]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            try:
                with address.short(self._path) as name:
                    await asyncio.get_running_loop().sock_connect(connection, name)
            except OSError as exc:
                raise PoolUnavailableError(
                    f"there is no pool at {self._path} ({exc.strerror or exc}); start one with fedplat-server pool run"
                ) from exc
            yield connection, await self._hello(connection)

    async def _hello(self, connection: socket.socket) -> Hello:
        try:
            frame = await asyncio.wait_for(frames.read(connection), _HELLO_S)
        except (OSError, TimeoutError) as exc:
            raise PoolUnavailableError(f"the pool at {self._path} does not answer") from exc
        if not isinstance(frame, Hello):
            raise PoolUnavailableError(f"what listens at {self._path} is no pool of this version of fedplat")
        if self._backend == "nccl" and not frame.device.startswith("cuda"):
            raise PoolUnavailableError(
                f'the pool computes on {frame.device}, and the job wants GPUs: pool.backend = "nccl"'
            )
        return frame
