"""Daemons that lead and daemons that pass calls on."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2
from support import daemons
from support.daemons import Site


async def status(site: Site) -> admin_pb2.GetStatusResponse:
    return await site.operator.operators.GetStatus(admin_pb2.GetStatusRequest())


async def code_of(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """The status that a call fails with, its words, and fedplat's own code."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailing = dict(cast(Any, caught.value.trailing_metadata()) or ())
    return caught.value.code(), caught.value.details() or "", str(trailing.get("fedplat-code", ""))


async def leading(site: Site, term: int) -> None:
    """Returns when a daemon leads."""

    async def there() -> bool:
        with contextlib.suppress(aio.AioRpcError):
            found = await status(site)
            return (found.term, found.gateway, found.leader_address) == (term, "", site.address)
        return False

    await daemons.until(there, f"{site.address} leads")


async def both_agree(one: Site, two: Site) -> tuple[admin_pb2.GetStatusResponse, admin_pb2.GetStatusResponse]:
    """The status of both, when one of them leads in a new term and the other is a gateway to it."""
    found: list[admin_pb2.GetStatusResponse] = []

    async def there() -> bool:
        with contextlib.suppress(aio.AioRpcError):
            found[:] = [await status(one), await status(two)]
            return found[0].term == found[1].term > 1
        return False

    await daemons.until(there, "one leader")
    return found[0], found[1]
