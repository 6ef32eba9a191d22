"""Rank 0's gRPC server: puts the calls of daemons into one queue of events, and streams the responses back."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import grpc
import msgspec

from fedplat.config.decoding import prepare_type
from fedplat_server.workers import broadcast, protocol

CANCEL_S = 5.0
"""How long a cancelled task may keep running; then the process ends, and torchrun restarts the ranks."""
MAX_OPEN_TASKS = 1000
"""Each open task occupies a thread of the server, which waits for its responses."""
_FLUSH_S = 10.0


class Rank0Listener:
    """Serves at a socket that only its user can open. `events` is the queue of the events of all calls."""

    def __init__(self, path: Path, info: protocol.WorkerInfo) -> None:
        self.events: SimpleQueue[broadcast.TaskEvent] = SimpleQueue()
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
        self.events.put(broadcast.TaskEvent(task, "start", start.request, start.name, start.backend))
        receiving = threading.Thread(target=self._receive, args=(task, requests), name=f"messages {task}", daemon=True)
        receiving.start()
        if not context.add_callback(lambda: self._cancel(task)):  # the call has ended already
            self._cancel(task)
        return _respond(responses, receiving)

    def _receive(self, task: int, messages: Iterator[bytes]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the daemon is gone, or has cancelled the task
            for message in messages:
                self.events.put(broadcast.TaskEvent(task, "message", message))
            self.events.put(broadcast.TaskEvent(task, "end"))

    def _cancel(self, task: int) -> None:
        """Cancel a task whose call has ended, if it is not finished."""
        if (responses := self._responses.pop(task, None)) is not None:
            responses.put(None)
            self.events.put(broadcast.TaskEvent(task, "cancel"))
            threading.Timer(CANCEL_S, self._end_if_running, (task,)).start()

    def _end_if_running(self, task: int) -> None:
        if self.running == task:
            os._exit(1)


def _respond(
    responses: SimpleQueue[protocol.Response | None], receiving: threading.Thread
) -> Iterator[protocol.Response]:
    """Yield the responses of a task, and wait until the daemon ends its messages, which it does after the last one.

    A connection that closes while the daemon writes takes with it what the daemon has not read yet.
    """
    yield from iter(responses.get, None)
    receiving.join(_FLUSH_S)
