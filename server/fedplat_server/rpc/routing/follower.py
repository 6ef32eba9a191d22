"""A daemon that does not lead: a gateway to the one that does, as long as it is reachable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fedplat_server import logs
from fedplat_server.records.lease import Lease
from fedplat_server.rpc.routing.gateway import ForwardingRoute, Gateway
from fedplat_server.rpc.routing.router import NoLeader, Router


class Follower:
    """Turn the switch to the daemon that leads, and tell `tell` whether callers can be served."""

    def __init__(
        self,
        name: str,
        switch: Router,
        tell: Callable[[bool], Awaitable[None]],
        entrance: ForwardingRoute,
    ) -> None:
        self._name = name
        self._entrance = entrance
        self._switch = switch
        self._tell = tell
        self._gateway: Gateway | None = None
        self._watch: asyncio.Task[None] | None = None

    async def follow(self, lease: Lease) -> None:
        """Passes calls on to this leader. Calls on their way to an earlier one are ended."""
        earlier = self._gateway
        if earlier is not None and earlier.lease.term == lease.term:
            return
        logs.get().info("another daemon leads; this one is a gateway to it", term=lease.term, leader=lease.address)
        gateway = Gateway(lease, self._name, self._entrance)
        self._switch.set_route(gateway)
        await self._leave()
        self._gateway = gateway
        self._watch = asyncio.create_task(gateway.watch(self._tell), name="leader watch")

    async def close(self) -> None:
        """Follows nobody."""
        if self._gateway is not None:
            self._switch.set_route(NoLeader())
            await self._leave()

    async def _leave(self) -> None:
        gateway, watch = self._gateway, self._watch
        self._gateway = self._watch = None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if gateway is not None:
            await gateway.close()
