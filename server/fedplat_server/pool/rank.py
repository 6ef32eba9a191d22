"""One rank of the pool: `python -P -m fedplat_server.pool.rank SOCKET BACKEND LEVEL [FOLDER]`, of torchrun, or alone.

All ranks do the same works in the same order. One that fails says why, and its process ends; torchrun then ends the
others, and forms the group anew. Whoever wanted something of the ranks hears that, and sees to it that it is done.
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

from fedplat.backends.ranks import Backend, Ranks, joined, store_of_one_host
from fedplat_server import logs
from fedplat_server.pool import frames, keys
from fedplat_server.pool.events import Event, Events, LostRankError
from fedplat_server.pool.front import Front
from fedplat_server.pool.order import Order
from fedplat_server.pool.tasks import Pause, Task
from fedplat_server.pool.works import WORKS

_LAST_WORDS_S = 2.0


class _Rank:
    """What one rank has open; `front` and `order` are those of rank 0."""

    def __init__(self, ranks: Ranks, events: Events, front: Front | None) -> None:
        self._ranks = ranks
        self._events = events
        self._front = front
        self._order = Order(front.events) if front is not None else None
        self._open: dict[int, Task] = {}

    def serve(self) -> None:
        """Does one thing after the other, for ever. Raises what a work raises."""
        while True:
            event = self._next()
            if self._front is not None:
                self._front.running = event.work
            self._do(event)
            if self._front is not None:
                self._front.running = None

    def _next(self) -> Event:
        if self._order is None:
            return self._events.next()
        event = self._order.next()
        self._events.publish(event)
        return event

    def _do(self, event: Event) -> None:
        if event.kind == "begin":
            return self._begin(event)
        task = self._open.get(event.work)
        if task is None:
            return None  # it has ended before, or has nothing to do on this rank
        match event.kind:
            case "message":
                outcome = task.give(event.content)
            case "end":
                outcome = task.end()
            case "resume":
                outcome = task.resume()
            case "cancel":
                del self._open[event.work]
                return task.cancel()
        return self._went(event.work, outcome)

    def _begin(self, event: Event) -> None:
        work = WORKS.get(event.name)
        if work is None:
            text = f"this pool knows no {event.name!r}; is it of the same version as the server?"
            return self._ended(event.work, frames.Refused(text))

        def note(content: bytes) -> None:
            if self._front is not None:
                self._front.tell(event.work, frames.Note(content))
            task.pause()

        ranks = self._ranks.on(event.backend)

        def run(inbox: Iterator[bytes]) -> bytes:
            if ranks.device.type == "cuda":  # which each thread has to be told
                torch.cuda.set_device(ranks.device)
            return work(ranks, event.content, inbox, note)

        task = self._open[event.work] = Task(f"{event.name} {event.work}", run)
        return self._went(event.work, task.start())

    def _went(self, work: int, outcome: bytes | Pause) -> None:
        if self._order is not None:
            self._order.went(work, outcome)
        if isinstance(outcome, bytes):
            del self._open[work]
            self._ended(work, frames.Reply(outcome))

    def _ended(self, work: int, frame: frames.Frame) -> None:
        if self._front is not None:
            self._front.finish(work, frame)


def run(socket: Path, backend: Backend, folder: Path | None = None) -> None:
    """Joins the other ranks and serves; does not return. `folder` is where ranks of one host meet."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="end with the parent", daemon=True).start()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    key = keys.read(socket.parent) if several else b""
    store = store_of_one_host(folder) if several and folder is not None else None
    with joined(backend, store=store, key=key) as ranks:
        events = Events(ranks, key, folder)
        front = Front(socket, frames.Hello(ranks.size, str(ranks.device))) if ranks.is_first else None
        log = logs.get().bind(rank=ranks.rank)
        log.info("the rank is ready", ranks=ranks.size, device=str(ranks.device))
        if front is not None and ranks.size > 1:
            threading.Thread(target=_hear_failures, args=(events, front), name="failures", daemon=True).start()
        try:
            _Rank(ranks, events, front).serve()
        except BaseException as exc:
            if _is_of_another(exc):
                log.error("the rank has lost the others", error=str(exc))
            else:
                log.exception("the rank fails")
                text = f"rank {ranks.rank}: {type(exc).__name__}: {exc}"
                failure = frames.Refused(text, isinstance(exc, torch.OutOfMemoryError))
                if front is not None:
                    front.refuse_all(failure)
                else:
                    events.tell_failure(failure)
            if ranks.size > 1:  # torchrun ends all when one has ended, so rank 0 shall have told first what was wrong
                threading.Event().wait(_LAST_WORDS_S)
            raise


def _is_of_another(exc: BaseException) -> bool:
    """Whether an operation of the group failed because another rank is gone, which is not this one's failure."""
    return isinstance(exc, distributed.DistError | LostRankError) or (
        isinstance(exc, RuntimeError) and "gloo" in str(exc)
    )


def _hear_failures(events: Events, front: Front) -> None:
    failure = events.wait_for_failure()
    if failure is not None:
        front.refuse_all(failure)
        os._exit(1)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it was killed."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([descriptor], [], [])
    os._exit(1)


def main() -> None:
    """The process of a rank."""
    socket, backend, level, *folder = sys.argv[1:]
    sink = logs.configure(level)
    status = 1
    try:
        run(Path(socket), cast(Backend, backend), Path(folder[0]) if folder else None)
    except BaseException:  # told already
        status = 1
    sink.finish(timeout_s=1.0)
    os._exit(status)  # threads may wait for ever


if __name__ == "__main__":
    main()
