"""Rank 0's gRPC server, and the broadcast of its events to the other ranks: the same ones in the same order.

The broadcast uses no collective: a pool may be idle for days, and a waiting collective times out. Nor PyTorch's
key-value store: it is open to every user of the host, and its files only grow. Ranks of one host connect to a Unix
socket in a folder of their own user, those of several hosts over their network. Events contain the noise keys of
private jobs, so they are encrypted in both cases. Messages are framed by `multiprocessing.connection`, and never
pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeVar

import grpc
import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.pytorch.distributed import Backend, Ranks
from fedplat_server.workers import protocol
from fedplat_server.workers.protocol import TaskRefusal

_MAX_GREETING_BYTES = 1024
_JOIN_S = 120.0
_STALLED_S = 5
_Record = TypeVar("_Record", bound=msgspec.Struct)


class LostRankError(ConnectionError):
    """The process of another rank has ended, or cannot be reached."""


class TaskEvent(msgspec.Struct, frozen=True):
    """One step of a task.

    "start" has its name, request and backend, "message" a message of the daemon, and "end" follows the last message;
    "resume" continues a task that has paused, and "cancel" ends it.
    """

    task: int
    kind: Literal["start", "message", "end", "resume", "cancel"]
    content: bytes = b""
    name: str = ""
    backend: Backend = "auto"


class _Greeting(msgspec.Struct, frozen=True):
    """The first message of another rank to rank 0."""

    rank: int


class _Address(msgspec.Struct, frozen=True):
    """The port on which rank 0 listens (0: a Unix socket). `group` is random, and new for each group."""

    group: bytes
    port: int = 0


class Broadcast:
    """The connections between rank 0 and the others. All ranks of a group must create theirs at the same time."""

    def __init__(self, ranks: Ranks, key: bytes, folder: Path | None = None) -> None:
        """Connect the ranks.

        `key` is the pool's secret (`protocol.py`). `folder` is for ranks of one host: a folder that only their user
        can open. A single rank needs neither. Raises `LostRankError` if a rank does not connect in time.
        """
        self._rank = ranks.rank
        self._count = 0
        self._connections: list[Connection] = []
        if ranks.size == 1:
            return
        try:
            if ranks.is_first:
                with _listen(folder) as listener:
                    address = _Address(secrets.token_bytes(16), 0 if folder else listener.getsockname()[1])
                    ranks.broadcast(msgspec.msgpack.encode(address))
                    self._cipher = protocol.GroupCipher(key, address.group)
                    self._connections = self._accept_all(listener, ranks.size)
            else:
                address = msgspec.msgpack.decode(ranks.broadcast(), type=prepare_type(_Address))
                self._cipher = protocol.GroupCipher(key, address.group)
                self._connections = [_connect(folder, address.port)]
                self._send(_Greeting(ranks.rank), 0)
        except OSError as exc:
            raise LostRankError(f"the ranks cannot connect to each other: {exc}") from exc

    def publish(self, event: TaskEvent) -> None:
        """Send an event to the other ranks; only rank 0 calls this. Raises `LostRankError` if one of them is gone."""
        if self._connections:
            self._send(event, self._count)
        self._count += 1

    def receive(self) -> TaskEvent:
        """Wait for the next event; only the other ranks call this.

        Raises `LostRankError` if rank 0 is gone, and `PermissionError` for an event that rank 0 did not send.
        """
        event = self._receive(self._connections[0], 0, self._count, TaskEvent)
        self._count += 1
        return event

    def report_failure(self, failure: TaskRefusal) -> None:
        """Send rank 0 the reason why this rank fails."""
        if self._connections:
            self._send(failure, 1)

    def wait_for_failure(self) -> TaskRefusal | None:
        """Wait until another rank fails, and return its reason; None if all others have ended without one."""
        ranks = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        while ranks:
            for connection in wait(list(ranks)):
                assert isinstance(connection, Connection)
                try:
                    return self._receive(connection, ranks[connection], 1, TaskRefusal)
                except LostRankError:
                    del ranks[connection]
        return None

    def _accept_all(self, listener: socket.socket, size: int) -> list[Connection]:
        """Return the connections of all other ranks, by rank; close all other connections."""
        connections: dict[int, Connection] = {}
        listener.settimeout(_JOIN_S)
        while len(connections) < size - 1:
            peer, _ = listener.accept()
            # An unknown process must not block the ranks by sending half a message.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALLED_S, 0))
            connection = Connection(peer.detach())
            rank = self._identify(connection, size)
            if rank is None or rank in connections:
                connection.close()
            else:
                connections[rank] = connection
        return [connections[rank] for rank in range(1, size)]

    def _identify(self, connection: Connection, size: int) -> int | None:
        """Return the rank that has connected; None if the peer is not a rank of this group."""
        try:
            content = connection.recv_bytes(_MAX_GREETING_BYTES)
        except (OSError, EOFError):
            return None
        for rank in range(1, size):
            try:
                greeting = msgspec.msgpack.decode(self._cipher.decrypt(content, rank, 0), type=prepare_type(_Greeting))
            except PermissionError:
                continue
            return rank if greeting.rank == rank else None
        return None

    def _send(self, record: msgspec.Struct, number: int) -> None:
        content = self._cipher.encrypt(msgspec.msgpack.encode(record), self._rank, number)
        try:
            for connection in self._connections:
                connection.send_bytes(content)
        except OSError as exc:
            raise LostRankError(f"another rank is gone: {exc}") from exc

    def _receive(self, connection: Connection, sender: int, number: int, kind: type[_Record]) -> _Record:
        try:
            content = connection.recv_bytes(protocol.MAX_MESSAGE_BYTES)
        except (OSError, EOFError) as exc:
            raise LostRankError(f"rank {sender} is gone: {exc or 'the connection has ended'}") from exc
        return msgspec.msgpack.decode(self._cipher.decrypt(content, sender, number), type=prepare_type(kind))


def _listen(folder: Path | None) -> socket.socket:
    if folder is None:
        return socket.create_server((os.environ["MASTER_ADDR"], 0), backlog=128)
    path = folder / "events.sock"
    path.unlink(missing_ok=True)  # left by an earlier group
    listener = socket.socket(socket.AF_UNIX)
    with protocol.short_path(path) as name:
        listener.bind(name)
        os.chmod(name, 0o600)
    listener.listen(128)
    return listener


def _connect(folder: Path | None, port: int) -> Connection:
    if folder is None:
        peer = socket.create_connection((os.environ["MASTER_ADDR"], port), _JOIN_S)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    else:
        peer = socket.socket(socket.AF_UNIX)
        with protocol.short_path(folder / "events.sock") as name:
            peer.connect(name)
    peer.settimeout(None)
    return Connection(peer.detach())


CANCEL_S = 5.0
"""How long a cancelled task may keep running; then the process ends, and torchrun restarts the ranks."""
MAX_OPEN_TASKS = 1000
"""Each open task occupies a thread of the server, which waits for its responses."""
_FLUSH_S = 10.0


class Rank0Listener:
    """Serves at a socket that only its user can open. `events` is the queue of the events of all calls."""

    def __init__(self, path: Path, info: protocol.WorkerInfo) -> None:
        self.events: SimpleQueue[TaskEvent] = SimpleQueue()
        self.running: int | None = None
        self._task_ids = itertools.count()
        self._responses: dict[int, SimpleQueue[protocol.Response | None]] = {}
        self._info = info
        methods = {
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe, None, msgspec.msgpack.encode),
            "Run": grpc.stream_stream_rpc_method_handler(self._run, None, msgspec.msgpack.encode),
        }
        threads = ThreadPoolExecutor(MAX_OPEN_TASKS, thread_name_prefix="task")
        handler = grpc.method_handlers_generic_handler(protocol.SERVICE, methods)
        self._server = grpc.server(threads, [handler], options=protocol.OPTIONS)
        path.unlink(missing_ok=True)  # left by an earlier group
        with protocol.short_path(path) as name:
            self._server.add_insecure_port(f"unix:{name}")
            os.chmod(name, 0o600)
        self._server.start()

    def send(self, task: int, response: protocol.Response) -> None:
        """Send a response to the daemon, unless its call has ended."""
        if (responses := self._responses.get(task)) is not None:
            responses.put(response)

    def finish(self, task: int, response: protocol.Response) -> None:
        """Send the last response of a task."""
        if (responses := self._responses.pop(task, None)) is not None:
            responses.put(response)
            responses.put(None)

    def refuse_all(self, refusal: protocol.TaskRefusal) -> None:
        """Refuse all open tasks and further calls; return when the daemon has received the reason."""
        for task in list(self._responses):
            self.finish(task, refusal)
        self._server.stop(_FLUSH_S).wait()

    def _describe(self, request: bytes, context: grpc.ServicerContext) -> protocol.WorkerInfo:
        return self._info

    def _run(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[protocol.Response]:
        start = msgspec.msgpack.decode(next(requests), type=prepare_type(protocol.StartTask))
        task = next(self._task_ids)
        responses = self._responses[task] = SimpleQueue[protocol.Response | None]()
        self.events.put(TaskEvent(task, "start", start.request, start.name, start.backend))
        receiving = threading.Thread(target=self._receive, args=(task, requests), name=f"messages {task}", daemon=True)
        receiving.start()
        if not context.add_callback(lambda: self._cancel(task)):  # the call has ended already
            self._cancel(task)
        return _respond(responses, receiving)

    def _receive(self, task: int, messages: Iterator[bytes]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the daemon is gone, or has cancelled the task
            for message in messages:
                self.events.put(TaskEvent(task, "message", message))
            self.events.put(TaskEvent(task, "end"))

    def _cancel(self, task: int) -> None:
        """Cancel a task whose call has ended, if it is not finished."""
        if (responses := self._responses.pop(task, None)) is not None:
            responses.put(None)
            self.events.put(TaskEvent(task, "cancel"))
            threading.Timer(CANCEL_S, self._end_if_running, (task,)).start()

    def _end_if_running(self, task: int) -> None:
        if self.running == task:
            os._exit(1)


def _respond(
    responses: SimpleQueue[protocol.Response | None], receiving: threading.Thread
) -> Iterator[protocol.Response]:
    """Yield the responses of a task, and wait until the daemon ends its messages, which it does after the last one.

    If the connection closed while the daemon writes, the responses that the daemon did not read would be lost.
    """
    yield from iter(responses.get, None)
    receiving.join(_FLUSH_S)
