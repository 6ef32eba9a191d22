"""Walks through all pages of a dashboard and writes a screenshot of each, light and dark, for docs/dashboard.md.

The address is the one that `fedplat dashboard --no-browser` prints:

PYTHONPATH=tests python -m support.dashboard.screenshots 'http://127.0.0.1:7480/login?code=...' docs/images demo
"""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image

from support.dashboard.browser import Theme, Window, chromium, window

NUM_COLOURS = 64
THEMES: tuple[Theme, ...] = ("light", "dark")


async def list_pages(made: Window) -> list[tuple[str, str]]:
    """Name and path of each page: the first job with its third round, those of the menu, and the first client."""

    async def links(path: str, selector: str) -> list[str]:
        await made.goto(path)
        found = await made.page.locator(selector).all()
        return [urlsplit(str(await link.get_attribute("href"))).path for link in found]

    menu = await links("/", "header nav a")
    job = (await links("/jobs", 'main a[href^="/jobs/"]'))[0]
    rounds = await links(f"{job}/rounds", f'main a[href^="{job}/rounds/"]')
    pages = [("job", job), ("round", rounds[min(2, len(rounds) - 1)]), ("rounds", f"{job}/rounds")]
    pages += [(path.strip("/") or "overview", path) for path in menu]
    if "/fleet" in menu:
        pages += [("clients", "/clients"), ("client", (await links("/clients", 'main a[href^="/clients/"]'))[0])]
    return pages


async def walk(made: Window, folder: Path, prefix: str) -> None:
    """Visits each page and writes its screenshots."""
    for name, path in await list_pages(made):
        await made.goto(path)
        for theme in THEMES:
            await made.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            await made.page.wait_for_function(
                "document.querySelectorAll('figure canvas').length >= document.querySelectorAll('figure').length"
            )
            file = folder / f"dashboard-{prefix}-{name}-{theme}.png"
            shot = await made.page.screenshot(full_page=name in ("round", "client"))
            with Image.open(io.BytesIO(shot)) as image:
                image.quantize(NUM_COLOURS).save(file, optimize=True)
            print(file)


async def main() -> None:
    address, folder, prefix = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    parts = urlsplit(address)
    async with chromium() as browser, window(browser, f"{parts.scheme}://{parts.netloc}") as made:
        await made.page.goto(address)
        await made.page.wait_for_url(made.origin + "/")  # the page submits its code
        await walk(made, folder, prefix)
        for fault in made.faults:
            print(f"fault: {fault}", file=sys.stderr)
        sys.exit(bool(made.faults))


if __name__ == "__main__":
    asyncio.run(main())
