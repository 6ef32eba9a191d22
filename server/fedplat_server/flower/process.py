"""The process of a ServerApp: `python -m fedplat_server.flower.process`, started by the daemon.

Standard input and output carry the protocol. What the app prints goes to the server's log, and it can read nothing.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from fedplat import errors, texts
from fedplat.config.decoding import prepare_type
from fedplat.flower import apps, grid, identity
from fedplat.flower.app import read_app
from fedplat.model import Parameters
from fedplat_server.flower import protocol

_MAX_TEXT = 1000


class RunState(msgspec.Struct, frozen=True):
    """The state of a run between two sets of messages: that of the app, and the clients that it knew."""

    app: bytes
    clients: tuple[str, ...]


class AppProcess:
    """The app's side of the pipes."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers
        self._todo: queue.SimpleQueue[protocol.StartRun | protocol.AdvanceRun] = queue.SimpleQueue()
        self._listed: queue.SimpleQueue[protocol.ListedClients] = queue.SimpleQueue()
        self._listing, self._writing = threading.Lock(), threading.Lock()
        self._clients: dict[int, str] = {}
        self._known: tuple[str, ...] = ()

    def serve(self) -> None:
        """Run the app until it ends or the daemon does."""
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        start = self._todo.get()
        assert isinstance(start, protocol.StartRun)
        try:
            run = self._start(start)
            while True:
                request = self._todo.get()
                assert isinstance(request, protocol.AdvanceRun)
                if not self._advance(run, request):
                    return
        except errors.FedplatError as exc:
            self._write(protocol.RunFailed(str(exc)))
        except Exception as exc:  # a process boundary: a bug, or no memory
            self._write(protocol.RunFailed(texts.describe(exc)))
            raise

    def _start(self, request: protocol.StartRun) -> apps.ServerAppRun:
        stored = Path(request.state).read_bytes() if request.state else None
        state = None if stored is None else msgspec.msgpack.decode(stored, type=prepare_type(RunState))
        app = read_app(Path(request.folder))
        checkpoint = None
        if state is not None and state.app:
            checkpoint = apps.AppCheckpoint(state.app, Parameters.open(request.message, writable=True))
        run = apps.ServerAppRun(app, self._list_nodes, {**app.run_config, **request.run_config}, checkpoint)
        run.grid.name_node = lambda node: self._clients.get(node, f"node {node}")
        run.grid.max_weight_factor = request.max_weight_factor
        if state is not None:
            self._remember(state.clients)
        self._write(protocol.RunStarted(self._known, checkpoint is not None))
        return run

    def _advance(self, run: apps.ServerAppRun, request: protocol.AdvanceRun) -> bool:
        """Continue the app; return whether it waits for replies."""
        self._remember((*request.replies, *request.failures))
        replies = [_read_reply(client, path) for client, path in request.replies.items()]
        failed = [grid.NodeReply(identity.node_id(client), None, reason) for client, reason in request.failures.items()]
        message = run.advance([*replies, *failed])
        metrics = run.grid.take_metrics()
        unread = {reply.node_id: reply.error for reply in replies if reply.content is None}
        refused = {self._clients[node]: text[:_MAX_TEXT] for node, text in {**run.grid.refused, **unread}.items()}
        if message is None:
            if (model := run.final_model) is not None:
                _write_file(request.message, model.pieces)
            self._write(protocol.RunEnded(metrics, model is not None, refused))
            return False
        _write_file(request.message, message.file.pieces)
        state = RunState(run.state, self._known)
        Path(request.state).write_bytes(msgspec.msgpack.encode(state))
        cohort = tuple(self._clients[node] for node in message.nodes if node in self._clients)
        self._write(protocol.NextMessages(cohort, message.message_type, metrics, refused))
        return True

    def _list_nodes(self) -> Sequence[int]:
        with self._listing:
            self._write(protocol.ListClients())
            clients = self._listed.get().clients
        self._remember(clients)
        self._known = clients
        return [identity.node_id(client) for client in clients]

    def _remember(self, clients: Iterable[str]) -> None:
        for client in clients:
            self._clients[identity.node_id(client)] = client

    def _read(self) -> None:
        while (request := protocol.read_frame(self._requests)) is not None:
            if isinstance(request, protocol.ListedClients):
                self._listed.put(request)
            else:
                self._todo.put(request)
        os._exit(0)  # the daemon has ended; threads of the app may be waiting

    def _write(self, frame: msgspec.Struct) -> None:
        with self._writing:
            protocol.write_frame(self._answers, frame)


def _read_reply(client: str, path: str) -> grid.NodeReply:
    # The app may change arrays in place. Reading into new memory takes much longer than the arithmetic.
    return grid.NodeReply.read(identity.node_id(client), Parameters.open(path, writable=True))


def _write_file(path: str, pieces: Iterable[memoryview]) -> None:
    with Path(path).open("wb") as out:
        for piece in pieces:
            out.write(piece)


def main() -> None:
    """Serve the daemon at the other end of standard input and output, which are not the app's."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    AppProcess(requests, answers).serve()


if __name__ == "__main__":
    main()
