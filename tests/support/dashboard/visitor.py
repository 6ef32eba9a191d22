"""A browser without a screen: its requests have the headers that browsers send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

import httpx

from fedplat.dashboard.source import PageSource
from fedplat.web.sessions import LoginError

ORIGIN = "https://fed.example.org"
SECRET = "fedplat_op_" + "s" * 43


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another task or thread does; a bound, not an expectation of speed."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"gave up waiting for: {what}")


class FakeClock:
    """Time that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLogin:
    """Accepts one token; all sessions share a source."""

    field: Literal["token", "code"] = "token"
    owns_sources = True
    name = "fed.example.org:7443"

    def __init__(self, source: PageSource) -> None:
        self.source = source

    def sign_in(self, secret: str) -> PageSource:
        if secret != SECRET:
            raise LoginError("The server did not accept the token.")
        return self.source


class Visitor:
    """Requests of one browser."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    async def post(
        self, path: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return await self.client.post(path, data=form or {"": ""}, headers=headers or {"Sec-Fetch-Site": "same-origin"})

    async def sign_in(self, secret: str = SECRET, next_path: str = "") -> httpx.Response:
        return await self.post("/login", {"token": secret, "next": next_path})
