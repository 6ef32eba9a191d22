"""An event loop whose time is simulated, and the processes on it, which may die and be suspended at any instruction.

Each handle of the loop belongs to the process that is in its context. A process that dies is not unwound: no `finally`
of it runs. Its stack is frozen in a greenlet, and its handles are never run again. Calls that block, which are in
threads otherwise, are greenlets, too: they give way at `VirtualLoop.block`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import heapq
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet
from typing_extensions import override

_T = TypeVar("_T")


class SimulatedProcess:
    """A process from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.paused_until = 0.0
        self.held: list[asyncio.Handle] = []
        self.on_death: list[Callable[[], None]] = []
        self.on_pause: list[Callable[[float], None]] = []
        self.kept: list[object] = []  # what must not be collected, since that would run `finally` blocks


PROCESS: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    number = 0

    @override
    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    number = 0

    @override
    def __hash__(self) -> int:
        return self.number


class _Blocking(greenlet):
    """A call that blocks. It is `abandoned` if the database has ended its transaction meanwhile."""

    num_locks = 0
    abandoned: Exception | None = None


class _CountedLock:
    """A lock whose holder does not give way: what blocks waits for nothing then."""

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        del timeout
        if self._is_held:
            assert not blocking, "a lock would be waited for, and its holder never runs"
            return False
        self._is_held = True
        if isinstance(current := getcurrent(), _Blocking):
            current.num_locks += 1
        return True

    def release(self) -> None:
        self._is_held = False
        if isinstance(current := getcurrent(), _Blocking):
            current.num_locks -= 1

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _submit(_: object, function: Callable[..., _T], /, *args: Any, **named: Any) -> concurrent.futures.Future[_T]:
    """Stands in for `ThreadPoolExecutor.submit`."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    try:
        future.set_result(function(*args, **named))
    except Exception as exc:
        future.set_exception(exc)
    return future


@contextlib.contextmanager
def without_threads() -> Generator[None]:
    """Replaces threads and their locks in this process."""
    pool: Any = concurrent.futures.ThreadPoolExecutor
    replaced: Any = (threading.Lock, pool.submit)
    cast(Any, threading).Lock, pool.submit = _CountedLock, _submit
    try:
        yield
    finally:
        cast(Any, threading).Lock, pool.submit = replaced


class _Internals(asyncio.BaseEventLoop):
    """The parts of asyncio's loop that a loop with another clock needs."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _asyncgen_firstiter_hook: Callable[[Any], None]
    _asyncgen_finalizer_hook: Callable[[Any], None]


class VirtualLoop(_Internals):
    """The loop. `trace` is called with what happens; `latency_s` draws how long a thread takes to begin or to end."""

    def __init__(self, seed: int, trace: Callable[[str], None]) -> None:
        super().__init__()
        self._now = 0.0
        self._rng = random.Random(f"threads {seed}")
        self._trace = trace
        self._main: greenlet | None = None
        self._worker: greenlet | None = None
        self._numbers = 0
        self._is_over: Callable[[], bool] = bool
        self.frozen: list[greenlet] = []
        self.slow = 0.01
        """How often a thread is slow."""
        self.num_steps = 0
        self.set_task_factory(self._make_task)

    # --- asyncio ---

    @override
    def time(self) -> float:
        return self._now

    @override
    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.number = self._next_number()
        return future

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **how: Any
    ) -> asyncio.Task[_T]:
        task = _Task(coroutine, loop=loop, **how)
        task.number = self._next_number()
        process = (how.get("context") or contextvars.copy_context()).get(PROCESS)
        if process is not None:
            process.kept.append(task)
        return task

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    @override
    def run_in_executor(self, executor: object, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:
        del executor
        future: asyncio.Future[_T] = self.create_future()

        def run() -> None:
            try:
                finish, value = future.set_result, func(*args)
            except Exception as exc:
                finish, value = future.set_exception, exc
            self.call_later(self.latency_s(), lambda: None if future.done() else finish(value))  # pyright: ignore

        blocking = _Blocking(run)
        blocking.gr_context = contextvars.copy_context()
        self.call_later(self.latency_s(), self._resume, blocking)
        if (process := PROCESS.get()) is not None:
            process.kept.append(blocking)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # --- time ---

    def latency_s(self) -> float:
        chance = self._rng.random()
        if chance < self.slow:
            return self._rng.uniform(0.0, 1.0)
        return self._rng.uniform(0.0001, 0.002)

    def block(self, seconds: float | None = None) -> None:
        """Lets a call that blocks wait, as a thread that the system suspends. Does nothing elsewhere, or in a lock."""
        current = getcurrent()
        if not isinstance(current, _Blocking) or current.num_locks:
            return
        self.call_later(self.latency_s() if seconds is None else seconds, self._resume, current)
        assert self._worker is not None
        self._worker.switch()
        if current.abandoned is not None:
            raise current.abandoned

    def _resume(self, blocking: _Blocking) -> None:
        blocking.parent = getcurrent()
        blocking.switch()

    # --- processes ---

    def kill(self, process: SimulatedProcess, then: Callable[[], None] = lambda: None) -> None:
        """Ends a process where it is, and calls `then`; returns only to a caller that is not this process."""
        if not process.is_alive:
            return
        process.is_alive = False
        for callback in process.on_death:
            callback()
        then()
        if PROCESS.get() is not process:
            return
        current = getcurrent()
        self.frozen.append(current)
        if isinstance(current, _Blocking):
            assert self._worker is not None
            self._worker.switch()
        else:
            if (task := asyncio.current_task(self)) is not None:
                asyncio.tasks._leave_task(self, task)  # pyright: ignore[reportAttributeAccessIssue]
            assert self._main is not None
            self._main.switch()
        raise AssertionError("a dead process runs")

    def pause(self, process: SimulatedProcess, seconds: float) -> None:
        """Suspends a process: it runs on when the time is over."""
        process.paused_until = max(process.paused_until, self._now + seconds)
        for callback in process.on_pause:
            callback(process.paused_until)

    # --- running ---

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Runs handles until a condition holds. Raises `TimeoutError` if nothing will ever happen again."""
        self._is_over, self._main = is_over, getcurrent()
        self._thread_id = threading.get_ident()
        asyncio._set_running_loop(self)  # pyright: ignore[reportAttributeAccessIssue]
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)
        try:
            while not is_over():
                self._worker = greenlet(self._work, self._main)
                self._worker.switch()
        finally:
            asyncio._set_running_loop(None)  # pyright: ignore[reportAttributeAccessIssue]
            self._thread_id = None

    def _work(self) -> None:
        while not self._is_over():
            if not self._ready:
                self._advance()
            self._run(self._ready.popleft())

    def _advance(self) -> None:
        """Makes the timers of the next time ready."""
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not scheduled:
            raise TimeoutError("nothing is left that could happen")
        self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            self._ready.append(timer)

    def _run(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        process = handle._context.get(PROCESS)
        if process is not None and not process.is_alive:
            process.kept.append(handle)
        elif process is not None and (process.held or process.paused_until > self._now):
            if not process.held:
                self.call_at(process.paused_until, self._go_on, process, context=contextvars.Context())
            process.held.append(handle)
        else:
            self.num_steps += 1
            handle._run()

    def _go_on(self, process: SimulatedProcess) -> None:
        """Makes what was held back during a pause ready, in its order."""
        if process.paused_until > self._now:
            self.call_at(process.paused_until, self._go_on, process)
        else:
            held, process.held = process.held, []
            self._ready.extendleft(reversed(held))
