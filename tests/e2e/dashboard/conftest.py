"""Chromium, and a server with a dashboard, for all tests of the folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest
from playwright.async_api import Browser

from support.dashboard.browser import chromium
from support.dashboard.place import Place, dashboard_server


@pytest.fixture(scope="session")
async def browser() -> AsyncGenerator[Browser]:
    async with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Place]:
    with dashboard_server(tmp_path_factory.mktemp("dashboard")) as made:
        yield made
