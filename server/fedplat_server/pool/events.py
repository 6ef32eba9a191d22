"""What rank 0 tells the other ranks: the same events for all of them, in one order, each through a socket of its own.

A collective would do it too, but one that waits has a time limit, and a pool may have nothing to do for days. A
key-value store would, but PyTorch's listens for every user of the host, and its files only grow. Ranks of one host
connect to a Unix socket in a folder of their own user; those of several hosts over their network. Events hold the
noise of private jobs, so they are encrypted in both cases.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from fedplat.backends.ranks import Backend, Ranks
from fedplat_server.pool import address
from fedplat_server.pool.frames import Refused
from fedplat_server.pool.keys import Sealed

_LENGTH = struct.Struct("<I")
_MOST = 2**30
_HELLO_BYTES = 1024
_JOIN_S = 120.0
_STRANGER_S = 5.0
_R = TypeVar("_R", bound=msgspec.Struct)


class LostRankError(ConnectionError):
    """The process of another rank is gone."""


class Event(msgspec.Struct, frozen=True):
    """Something of one work.

    It begins (its name, the request, what carries tensors), gets a message, gets no more of them, goes on, or is not
    wanted any more.
    """

    work: int
    kind: Literal["begin", "message", "end", "resume", "cancel"]
    content: bytes = b""
    name: str = ""
    backend: Backend = "auto"


class _Hello(msgspec.Struct, frozen=True):
    """Another rank has connected."""

    rank: int


class _Meeting(msgspec.Struct, frozen=True):
    """Where rank 0 listens: a Unix socket, or a port of its host. `group` is new for each group."""

    group: bytes
    port: int = 0


class Events:
    """The events of the present group; each rank makes it at the same time."""

    def __init__(self, ranks: Ranks, key: bytes, folder: Path | None = None) -> None:
        """`key` is the pool's secret (`keys.py`). `folder` is that of ranks of one host, which only their user opens.

        A rank alone needs neither. Raises `LostRankError` when the ranks do not find together.
        """
        self._rank = ranks.rank
        self._count = 0
        self._connections: list[socket.socket] = []
        if ranks.size == 1:
            return
        try:
            if ranks.is_first:
                with _listening(folder) as listener:
                    meeting = _Meeting(secrets.token_bytes(16), 0 if folder else listener.getsockname()[1])
                    ranks.told(msgspec.msgpack.encode(meeting))
                    self._sealed = Sealed(key, meeting.group)
                    self._connections = self._accepted(listener, ranks.size)
            else:
                meeting = msgspec.msgpack.decode(ranks.told(), type=_Meeting)
                self._sealed = Sealed(key, meeting.group)
                self._connections = [_connected(folder, meeting.port)]
                self._send(_Hello(ranks.rank), 0)
        except OSError as exc:
            raise LostRankError(f"the ranks do not find together: {exc}") from exc

    def publish(self, event: Event) -> None:
        """Tells the other ranks; for rank 0. Raises `LostRankError` when one of them is gone."""
        if self._connections:
            self._send(event, self._count)
        self._count += 1

    def next(self) -> Event:
        """Waits for the next event; for the others.

        Raises `LostRankError` when rank 0 is gone, and `PermissionError` for an event that is not rank 0's.
        """
        event = self._received(self._connections[0], 0, self._count, Event)
        self._count += 1
        return event

    def tell_failure(self, failure: Refused) -> None:
        """Tells rank 0 why this rank fails."""
        if self._connections:
            self._send(failure, 1)

    def wait_for_failure(self) -> Refused | None:
        """Returns when another rank fails, why; None when all others have ended without a word."""
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections, 1):
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    connection = self._connections[key.data - 1]
                    try:
                        return self._received(connection, key.data, 1, Refused)
                    except LostRankError:
                        selector.unregister(connection)
        return None

    def _accepted(self, listener: socket.socket, size: int) -> list[socket.socket]:
        """The connections of all other ranks, in their order; what others send is left alone."""
        found: dict[int, socket.socket] = {}
        listener.settimeout(_JOIN_S)
        while len(found) < size - 1:
            connection, _ = listener.accept()
            connection.settimeout(_STRANGER_S)
            rank = self._greeted(connection, size)
            if rank is None or rank in found:
                connection.close()
            else:
                connection.settimeout(None)
                found[rank] = connection
        return [found[rank] for rank in range(1, size)]

    def _greeted(self, connection: socket.socket, size: int) -> int | None:
        """The number of the rank that has connected; None for whatever is no rank of this group."""
        try:
            content = _receive(connection, _HELLO_BYTES)
        except OSError:
            return None
        for rank in range(1, size):
            try:
                hello = msgspec.msgpack.decode(self._sealed.opened(content, rank, 0), type=_Hello)
            except PermissionError:
                continue
            return rank if hello.rank == rank else None
        return None

    def _send(self, record: msgspec.Struct, number: int) -> None:
        content = self._sealed.sealed(msgspec.msgpack.encode(record), self._rank, number)
        try:
            for connection in self._connections:
                connection.sendall(_LENGTH.pack(len(content)) + content)
        except OSError as exc:
            raise LostRankError(f"another rank is gone: {exc}") from exc

    def _received(self, connection: socket.socket, sender: int, number: int, kind: type[_R]) -> _R:
        try:
            content = _receive(connection, _MOST)
        except OSError as exc:
            raise LostRankError(f"rank {sender} is gone: {exc}") from exc
        return msgspec.msgpack.decode(self._sealed.opened(content, sender, number), type=kind)


def _listening(folder: Path | None) -> socket.socket:
    if folder is None:
        return socket.create_server((os.environ["MASTER_ADDR"], 0), backlog=128)
    path = folder / "events.sock"
    path.unlink(missing_ok=True)  # what an earlier group left
    listener = socket.socket(socket.AF_UNIX)
    with address.short(path) as name:
        listener.bind(name)
        os.chmod(name, 0o600)
    listener.listen(128)
    return listener


def _connected(folder: Path | None, port: int) -> socket.socket:
    if folder is None:
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port), _JOIN_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    else:
        connection = socket.socket(socket.AF_UNIX)
        with address.short(folder / "events.sock") as name:
            connection.connect(name)
    connection.settimeout(None)
    return connection


def _receive(connection: socket.socket, most: int) -> bytes:
    [length] = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > most:
        raise ConnectionError(f"a message of {length} bytes; expected at most {most}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]
    return bytes(content)
