"""The job files that operators send: read, and checked against what this server can run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from fedplat.config.plugins import Plugins
from fedplat.job import JobSpec
from fedplat_server.coordination import job_checks
from fedplat_server.protocols.registry import ServerHalves

_Result = TypeVar("_Result")


class JobFiles:
    """Reads job files of at most `max_bytes`, which may name `plugins`, and these evaluators and trainers."""

    def __init__(
        self,
        plugins: Plugins,
        max_bytes: int,
        evaluators: Sequence[str],
        trainers: Sequence[str],
        halves: ServerHalves,
    ) -> None:
        self._plugins = plugins
        self._max_bytes = max_bytes
        self._evaluators = evaluators
        self._trainers = trainers
        self._halves = halves
        self._parsing = asyncio.Lock()

    async def read(self, text: str) -> JobSpec:
        """Return the job of a new file. Raises `RefusedError` if it is not valid, or this server cannot run it."""
        spec = await self._run_alone(job_checks.parse, text, self._max_bytes, self._plugins)
        job_checks.check_is_runnable(spec, self._evaluators, self._trainers)
        await self._halves.training_of(spec).check_job(spec)
        return spec

    async def change(self, text: str, changes: Sequence[str]) -> tuple[str, JobSpec]:
        """Return a file with other values of keys that may change, and its job. Raises `RefusedError`."""
        return await asyncio.to_thread(job_checks.change, text, changes, self._max_bytes, self._plugins)

    async def _run_alone(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Run a function in a thread, one at a time, also if its call has ended: a thread cannot be cancelled."""
        async with self._parsing:
            running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise
