"""Chromium, driven by Playwright: pages that note errors of the policy, foreign requests and failed scripts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Literal

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from support import programs

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
Theme = Literal["light", "dark"]


@contextlib.asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    path = programs.require("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


class Window:
    """A browser's window with its own cookies. `faults` are errors on the console, and requests to other sites."""

    def __init__(self, context: BrowserContext, page: Page, origin: str) -> None:
        self.context, self.page, self.origin = context, page, origin
        self.faults: list[str] = []
        self.num_requests = 0
        self.watch(page)

    def watch(self, page: Page) -> None:
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: self._on_request(request.url))

    async def goto(self, path: str) -> None:
        self.num_requests = 0
        await self.page.goto(self.origin + path)

    async def axe(self) -> list[str]:
        """What axe finds on the page, as texts."""
        found: Any = await Axe().run(self.page)
        return [
            f"{violation['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
            for violation in found.response["violations"]
            for node in violation["nodes"]
        ]

    async def is_too_wide(self) -> bool:
        """Whether the page scrolls sideways."""
        return await self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")

    def _note(self, text: str) -> None:
        self.faults.append(text)

    def _on_request(self, url: str) -> None:
        self.num_requests += 1
        if not url.startswith((self.origin + "/", "data:")):
            self.faults.append(f"a foreign request: {url}")


@contextlib.asynccontextmanager
async def window(
    browser: Browser, origin: str, theme: Theme = "light", width: int = 1280, *, scripts: bool = True
) -> AsyncGenerator[Window]:
    context = await browser.new_context(
        color_scheme=theme,
        viewport={"width": width, "height": 900},
        ignore_https_errors=True,
        java_script_enabled=scripts,
        reduced_motion="reduce",
    )
    try:
        yield Window(context, await context.new_page(), origin)
    finally:
        await context.close()
