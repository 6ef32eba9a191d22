"""A dashboard on a fake server, and a client of its pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx
import pytest

from fedplat.dashboard.app import Dashboard
from support.dashboard.fake_server import FakeServer
from support.dashboard.visitor import ORIGIN, FakeClock, FakeLogin, Visitor


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def dashboard(server: FakeServer, clock: FakeClock) -> Dashboard:
    return Dashboard(FakeLogin(server), frozenset({"fed.example.org"}), clock)


@pytest.fixture
async def stranger(dashboard: Dashboard) -> AsyncGenerator[Visitor]:
    """A browser that has not signed in."""
    transport = httpx.ASGITransport(dashboard.app)
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        yield Visitor(client)


@pytest.fixture
async def visitor(stranger: Visitor) -> Visitor:
    """A browser that has signed in."""
    assert (await stranger.sign_in()).status_code == 303
    return stranger
