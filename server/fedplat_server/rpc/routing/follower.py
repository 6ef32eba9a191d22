"""A daemon that is not the leader: a gateway to the leader while that is reachable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fedplat_server import logs
from fedplat_server.records.lease import Lease
from fedplat_server.rpc.routing.gateway import Gateway, GatewayOptions
from fedplat_server.rpc.routing.router import Router


class Follower:
    """Routes the calls of this daemon to the leader; calls `set_ready` with whether they can be served."""

    def __init__(
        self,
        name: str,
        router: Router,
        set_ready: Callable[[bool], Awaitable[None]],
        options: GatewayOptions,
    ) -> None:
        self._name = name
        self._options = options
        self._router = router
        self._set_ready = set_ready
        self._gateway: Gateway | None = None
        self._watch: asyncio.Task[None] | None = None

    async def follow(self, lease: Lease) -> None:
        """Forward calls to this leader. Ends open calls to an earlier leader."""
        previous = self._gateway
        if previous is not None and previous.lease.term == lease.term:
            return
        logs.get().info("another daemon leads; this one is a gateway to it", term=lease.term, leader=lease.address)
        gateway = Gateway(lease, self._name, self._options)
        self._router.set_route(gateway)
        await self._close_gateway()
        self._gateway = gateway
        self._watch = asyncio.create_task(gateway.watch(self._set_ready), name="leader watch")

    async def close(self) -> None:
        """Stop forwarding calls, and refuse them."""
        if self._gateway is not None:
            self._router.end_route()
            await self._close_gateway()

    async def _close_gateway(self) -> None:
        gateway, watch = self._gateway, self._watch
        self._gateway = self._watch = None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if gateway is not None:
            await gateway.close()
