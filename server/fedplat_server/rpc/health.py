"""The health service: readiness under the empty name and the names of the services, liveness under `liveness`.

Ready means that the database answers or, at a gateway, that the leader is reachable: load balancers send no calls to a
daemon that is not ready. Alive means that the process serves its port. Restart policies must use liveness: a restart
does not bring back a database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from grpc_health.v1 import health, health_pb2

from fedplat_server import logs
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.store import Store
from fedplat_server.errors import StoreError

LIVENESS = "liveness"
CHECK_S = 1.0
"""How often the database is pinged."""
PING_TIMEOUT_S = 5.0
"""A database that has not answered a ping for this long counts as unavailable."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """The state that the health service reports; `watch` updates it."""

    def __init__(self, services: Iterable[str]) -> None:
        self.servicer: Any = cast(Any, health).aio.HealthServicer()
        self._names = ("", *services)
        self._ready: bool | None = None
        self._stopped = False

    async def start(self) -> None:
        """Report alive, and ready if `set_ready(True)` was called before."""
        await self.servicer.set(LIVENESS, _Status.SERVING)
        await self.set_ready(self._ready or False)

    async def stop(self) -> None:
        """Report not ready from now on; stay alive."""
        await self.set_ready(False)
        self._stopped = True

    async def watch(self, store: Store, runner: Runner) -> None:
        """Ping the database and report readiness, until cancelled."""
        ping: asyncio.Task[None] | None = None
        try:
            while True:
                ping = ping or asyncio.create_task(store.ping(), name="ping")
                # A slow ping is not cancelled, which would cost a connection: the next iteration waits for it again.
                await asyncio.wait([ping], timeout=PING_TIMEOUT_S)
                is_available = False
                if ping.done():
                    is_available, ping = _check_ping(ping), None
                before = self._ready
                await self.set_ready(is_available and not runner.in_doubt)
                if self._ready != before:
                    logs.get().info("the server is ready again" if self._ready else "the server is not ready")
                await asyncio.sleep(CHECK_S)
        finally:
            if ping is not None:
                ping.cancel()

    async def set_ready(self, ready: bool) -> None:
        """Report ready or not ready from now on."""
        if self._stopped or ready == self._ready:
            return
        self._ready = ready
        for name in self._names:
            await self.servicer.set(name, _Status.SERVING if ready else _Status.NOT_SERVING)


def _check_ping(ping: asyncio.Task[None]) -> bool:
    error = ping.exception()
    if error is not None and not isinstance(error, StoreError):
        logs.get().error("pinging the database failed", exc_info=error)
    return error is None
