"""`make docs` builds a site that is complete, loads nothing from other hosts, and works in a browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

import pytest
from typing_extensions import override

from support.dashboard.browser import Window, chromium, window
from support.docs.blocks import ROOT

SITE = ROOT / "build" / "site"
ORIGIN = "http://site"
LOADED = {"script", "img", "source", "iframe", "video", "audio", "object", "embed"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest", "modulepreload"}


class Page(HTMLParser):
    """What a page loads, where it links to, and its ids."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text("utf-8"))

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        is_loaded = tag in LOADED or (tag == "link" and LOADED_LINKS & {*values.get("rel", "").split()})
        if is_loaded:
            self.loads += [values[name] for name in ("src", "href", "srcset", "data", "poster") if name in values]
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def build() -> str:
    variables = {name: value for name, value in os.environ.items() if name != "DOCS_REPOSITORY"}
    command = [sys.executable, str(ROOT / "docs/site/build_site.py")]
    done = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_pages() -> dict[str, Page]:
    """Reads all pages by their address."""
    found = {path.relative_to(SITE).as_posix().removesuffix("index.html"): path for path in SITE.rglob("*.html")}
    return {f"/{name}": Page(path) for name, path in found.items()}


def check_loads(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        for address in page.loads:
            assert not urlparse(address).netloc, f"{name} loads {address}"
            assert (SITE / urlparse(urljoin(ORIGIN + name, address)).path.lstrip("/")).is_file(), f"{name}: {address}"
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text("utf-8")), sheet.name


def check_links(pages: dict[str, Page]) -> None:
    """Every link of the site leads to a page and an anchor, and the links of the start lead to every page."""
    reached, pending = {"/"}, ["/"]
    while pending:
        name = pending.pop()
        for link in pages[name].links:
            address = urlparse(urljoin(ORIGIN + name, link))
            if address.netloc != "site":
                continue
            assert address.path in pages or (SITE / address.path.lstrip("/")).is_file(), f"{name} links to {link}"
            if address.path not in pages:
                continue
            if address.fragment:
                assert unquote(address.fragment) in pages[address.path].ids, f"{name} links to {link}"
            if address.path not in reached:
                reached.add(address.path)
                pending.append(address.path)
    assert set(pages) - reached == {"/404.html"}


def check_text() -> None:
    """No page shows the marks of a list, a table or a block as text."""
    for path in SITE.rglob("*.html"):
        text = re.sub(r"<(pre|script|code|style)\b.*?</\1>", "", path.read_text("utf-8"), flags=re.DOTALL)
        marks = re.findall(r"^(?:<p>)?(?:[-*] |\d+\. |\||```).*", text, flags=re.MULTILINE)
        assert not marks, f"{path.relative_to(SITE)}: {marks[0]}"


def check_files() -> None:
    for path in (ROOT / "docs").rglob("*"):
        if path.is_file() and path.parent.name in ("images", "schema"):
            assert (SITE / path.relative_to(ROOT / "docs")).read_bytes() == path.read_bytes()


def check_reference() -> None:
    """Signatures with types, and docstrings with errors, of functions, classes and records."""
    client = (SITE / "reference/fedplat_client/index.html").read_text("utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", client))
    assert re.search(r"TrainResult\( \*, parameters: Parameters .{0,80}num_examples: float", text)
    assert "Raises ValueError for a number that is not usable" in text
    assert 'id="fedplat_client.Client.from_ticket"' in client
    assert "_state" not in re.findall(r'id="fedplat_client\.([\w.]+)"', client)
    assert (SITE / "reference/fedplat.model/index.html").read_text("utf-8").count("&gt;&gt;&gt;") > 3


def check_texts_for_language_models(pages: dict[str, Page]) -> None:
    """Every page of the navigation is in llms.txt, whose links lead to pages."""
    text = (SITE / "llms.txt").read_text("utf-8")
    rows = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.*)$", text, flags=re.MULTILINE)
    assert {address for _, address, _ in rows} <= set(pages)
    assert all(title and len(summary) > 10 for title, _, summary in rows), rows
    assert len(rows) > 40
    assert (SITE / "llms-full.txt").stat().st_size > 500_000


class _Handler(http.server.SimpleHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def served() -> Generator[str]:
    handler = functools.partial(_Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def check_search(view: Window) -> None:
    await view.goto("/")
    field = view.page.locator("input:focus")
    while not await field.count():  # the key has an effect when the page's script runs
        await view.page.keyboard.press("Control+k")
        await view.page.wait_for_timeout(200)
    await field.fill("rotate-ca")
    found = view.page.locator("a[href*='security/']", has_text="TLS").last
    await found.click()
    await view.page.wait_for_url("**/security/**")


async def check_themes(view: Window) -> None:
    """Pages follow the system's theme; the button chooses one."""
    background = "getComputedStyle(document.body).backgroundColor"
    await view.page.emulate_media(color_scheme="light")
    await view.goto("/")
    light = await view.page.evaluate(background)
    await view.page.emulate_media(color_scheme="dark")
    await view.goto("/")
    assert await view.page.evaluate(background) != light
    await view.page.locator("label[title='Switch to light mode']").click()
    await view.page.wait_for_function(f"{background} == {light!r}")


async def check_phone(view: Window) -> None:
    await view.page.set_viewport_size({"width": 320, "height": 640})
    for path in (
        "/",
        "/start/",
        "/compare/",
        "/gallery/",
        "/runbook/",
        "/operations/",
        "/job-reference/",
        "/performance/",
        "/reference/fedplat.simulation/",
    ):
        await view.goto(path)
        width = await view.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 320, f"{path} is {width} px wide"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_site() -> None:
    """One test, because all parts need the same folder, which the build writes."""
    assert "No issues found" in build()
    pages = read_pages()
    check_loads(pages)
    check_links(pages)
    check_text()
    check_files()
    check_reference()
    check_texts_for_language_models(pages)
    with served() as origin:
        async with chromium() as browser, window(browser, origin) as view:
            await check_search(view)
            await check_themes(view)
            await check_phone(view)
            assert view.faults == []
