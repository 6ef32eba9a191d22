"""The health service: readiness under the empty name and those of the services, liveness under the name `liveness`.

Ready means that the database answers, or at a gateway that the leader can be reached: who balances load sends nobody
here meanwhile. Alive means that the process and its port are there: who restarts what is dead has no business here,
because a restart brings no database back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from grpc_health.v1 import health, health_pb2

from fedplat_server import logs
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.ports import Store
from fedplat_server.errors import StoreError

LIVENESS = "liveness"
CHECK_S = 1.0
"""How often the database is asked whether it is there."""
PATIENCE_S = 5.0
"""A database that has not answered for so long is away."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """Says how the server is; `watch` keeps it true."""

    def __init__(self, services: Iterable[str]) -> None:
        self.servicer: Any = cast(Any, health).aio.HealthServicer()
        self._names = ("", *services)
        self._ready: bool | None = None
        self._stopped = False

    async def start(self) -> None:
        """Alive; ready, if that was told before."""
        await self.servicer.set(LIVENESS, _Status.SERVING)
        await self.tell(self._ready or False)

    async def stop(self) -> None:
        """Alive, and never ready again."""
        await self.tell(False)
        self._stopped = True

    async def watch(self, store: Store, runner: Runner) -> None:
        """Asks the database again and again; runs until it is cancelled."""
        ping: asyncio.Task[None] | None = None
        try:
            while True:
                ping = ping or asyncio.create_task(store.ping(), name="ping")
                # A ping is not cut off, which would cost a connection: it is waited for again.
                await asyncio.wait([ping], timeout=PATIENCE_S)
                answers = False
                if ping.done():
                    answers, ping = _check_ping(ping), None
                before = self._ready
                await self.tell(answers and not runner.in_doubt)
                if self._ready != before:
                    logs.get().info("the server is ready again" if self._ready else "the server is not ready")
                await asyncio.sleep(CHECK_S)
        finally:
            if ping is not None:
                ping.cancel()

    async def tell(self, ready: bool) -> None:
        """Ready or not, from now on."""
        if self._stopped or ready == self._ready:
            return
        self._ready = ready
        for name in self._names:
            await self.servicer.set(name, _Status.SERVING if ready else _Status.NOT_SERVING)


def _check_ping(ping: asyncio.Task[None]) -> bool:
    error = ping.exception()
    if error is not None and not isinstance(error, StoreError):
        logs.get().error("the database could not be asked", exc_info=error)
    return error is None
