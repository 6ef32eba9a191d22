"""Batching of database calls: calls for single keys during a running call are combined into the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from fedplat_server.errors import LeadershipLostError, StoreUnavailableError

_Value = TypeVar("_Value")


class BatchLoader(Generic[_Value]):
    """A loader of values by key, which combines concurrent calls.

    A transaction takes a millisecond, and hardly more for five hundred clients. So many clients that return after a
    restart are admitted about ten times as fast, and a single one does not wait for others. `fetch` returns the values
    of up to `max_keys` keys and leaves out unknown ones. The keys of one call are distinct: equal keys of several
    callers are fetched in several calls.
    """

    def __init__(self, fetch: Callable[[Sequence[str]], Awaitable[Mapping[str, _Value]]], max_keys: int = 500) -> None:
        self._fetch = fetch
        self._max_keys = max_keys
        self._waiting: list[tuple[str, asyncio.Future[_Value | None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def load(self, key: str) -> _Value | None:
        """Return the value of a key; None if it is unknown. Raises the errors of `fetch`."""
        answer: asyncio.Future[_Value | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="batch loader")
        return await answer

    async def _run(self) -> None:
        try:
            while batch := self._next():
                await self._answer(batch)
        finally:
            self._task = None

    def _next(self) -> dict[str, asyncio.Future[_Value | None]]:
        batch: dict[str, asyncio.Future[_Value | None]] = {}
        later: list[tuple[str, asyncio.Future[_Value | None]]] = []
        for key, answer in self._waiting:
            if answer.cancelled():
                continue
            if key in batch or len(batch) == self._max_keys:
                later.append((key, answer))
            else:
                batch[key] = answer
        self._waiting = later
        return batch

    async def _answer(self, batch: Mapping[str, asyncio.Future[_Value | None]]) -> None:
        try:
            values = await self._fetch(list(batch))
        except Exception as exc:  # a task boundary: each caller gets its own error
            if len(batch) > 1 and not isinstance(exc, StoreUnavailableError | LeadershipLostError):
                # The database answers, so one key is the cause: only its caller may get the error.
                for key, answer in batch.items():
                    await self._answer({key: answer})
                return
            for answer in batch.values():
                if not answer.done():
                    answer.set_exception(type(exc)(*exc.args))
        else:
            for key, answer in batch.items():
                if not answer.done():
                    answer.set_result(values.get(key))
