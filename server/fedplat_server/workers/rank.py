"""One rank: `python -P -m fedplat_server.workers.rank SOCKET BACKEND LEVEL [FOLDER]`, started by torchrun or alone.

All ranks run the same tasks in the same order. A rank that fails reports the reason, and its process ends; torchrun
then ends the others and restarts the group. The daemon receives the reason and runs its tasks again.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import distributed

from fedplat import texts
from fedplat.pytorch.distributed import Backend, Ranks, find_rank, join_group, make_file_store
from fedplat_server import logs
from fedplat_server.workers import protocol, scheduler, tasks
from fedplat_server.workers.broadcast import Broadcast, LostRankError, Rank0Listener, TaskEvent

_REPORT_S = 2.0


class _RankLoop:
    """Runs the tasks of one rank; `listener` is that of rank 0, which decides the order."""

    def __init__(self, ranks: Ranks, events: Broadcast, listener: Rank0Listener | None) -> None:
        self._ranks = ranks
        self._events = events
        self._listener = listener
        self._scheduler = scheduler.TurnScheduler(listener.events) if listener is not None else None
        self._open: dict[int, scheduler.ThreadCoroutine] = {}

    def run(self) -> None:
        """Handle events forever. Raises the errors of tasks."""
        while True:
            event = self._next()
            if self._listener is not None:
                self._listener.running = event.task
            self._handle(event)
            if self._listener is not None:
                self._listener.running = None

    def _next(self) -> TaskEvent:
        if self._scheduler is None:
            return self._events.receive()
        event = self._scheduler.next()
        self._events.publish(event)
        return event

    def _handle(self, event: TaskEvent) -> None:
        if event.kind == "start":
            return self._start(event)
        task = self._open.get(event.task)
        if task is None:
            return None  # it has already ended, or was refused
        match event.kind:
            case "message":
                outcome = task.send(event.content)
            case "end":
                outcome = task.end()
            case "resume":
                outcome = task.resume()
            case "cancel":
                del self._open[event.task]
                return task.cancel()
        return self._record(event.task, outcome)

    def _start(self, event: TaskEvent) -> None:
        function = tasks.TASKS.get(event.name)
        if function is None:
            text = f"this pool has no task {event.name!r}; start it with the same version of fedplat as the server"
            return self._finish(event.task, protocol.TaskRefusal(text))

        def note(content: bytes) -> None:
            if self._listener is not None:
                self._listener.send(event.task, protocol.TaskNote(content))
            task.pause()

        ranks = self._ranks.with_backend(event.backend)

        def run(messages: Iterator[bytes]) -> bytes:
            if ranks.device.type == "cuda":  # PyTorch's current device is per thread
                torch.cuda.set_device(ranks.device)
            return function(ranks, event.content, messages, note)

        task = self._open[event.task] = scheduler.ThreadCoroutine(f"{event.name} {event.task}", run)
        return self._record(event.task, task.start())

    def _record(self, task: int, outcome: bytes | scheduler.Pause) -> None:
        if self._scheduler is not None:
            self._scheduler.record(task, outcome)
        if isinstance(outcome, bytes):
            del self._open[task]
            self._finish(task, protocol.TaskReply(outcome))

    def _finish(self, task: int, response: protocol.Response) -> None:
        if self._listener is not None:
            self._listener.finish(task, response)


def run(socket: Path, backend: Backend, folder: Path | None = None) -> None:
    """Join the other ranks and run tasks forever. `folder` is the rendezvous folder of ranks of one host."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="end with the parent", daemon=True).start()
    place = find_rank()
    has_others = place is not None and place.size > 1
    key = protocol.read_key(socket.parent) if has_others else b""
    store = make_file_store(folder) if has_others and folder is not None else None
    with join_group(backend, store=store, key=key) as ranks:
        events = Broadcast(ranks, key, folder)
        listener = None
        if ranks.is_first:
            listener = Rank0Listener(socket, protocol.WorkerInfo(ranks.size, str(ranks.device)))
        log = logs.get().bind(rank=ranks.rank)
        log.info("rank ready", ranks=ranks.size, device=str(ranks.device))
        if listener is not None and ranks.size > 1:
            threading.Thread(target=_watch_others, args=(events, listener), name="failures", daemon=True).start()
        try:
            _RankLoop(ranks, events, listener).run()
        except BaseException as exc:
            if isinstance(exc, distributed.DistError | LostRankError) or (
                isinstance(exc, RuntimeError) and "gloo" in str(exc)
            ):
                log.error("lost another rank", error=str(exc))
            else:
                log.exception("rank failed")
                text = f"rank {ranks.rank}: {texts.describe(exc)}"
                refusal = protocol.TaskRefusal(text, isinstance(exc, torch.OutOfMemoryError))
                if listener is not None:
                    listener.refuse_all(refusal)
                else:
                    events.report_failure(refusal)
            if ranks.size > 1:  # torchrun ends all ranks once one has ended, but rank 0 must send the reason first
                threading.Event().wait(_REPORT_S)
            raise


def _watch_others(events: Broadcast, listener: Rank0Listener) -> None:
    """Refuse all tasks and end rank 0 when another rank reports a failure."""
    refusal = events.wait_for_failure()
    if refusal is not None:
        listener.refuse_all(refusal)
        os._exit(1)


def _end_with(parent: int) -> None:
    """End this process when its parent ends."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([descriptor], [], [])
    os._exit(1)


def main() -> None:
    """Run the process of a rank."""
    os.umask(0o077)
    socket, backend, level, *folder = sys.argv[1:]
    sink = logs.configure(level)
    status = 1
    try:
        run(Path(socket), cast(Backend, backend), Path(folder[0]) if folder else None)
    except BaseException:  # `run` has logged it
        status = 1
    sink.finish(timeout_s=1.0)
    os._exit(status)  # threads may wait forever


if __name__ == "__main__":
    main()
