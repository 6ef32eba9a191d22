"""The dashboard in Chromium, on a real server with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import psutil
import pytest
from playwright.async_api import Browser, expect

from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.wire.v1 import admin_pb2
from support import processes
from support.dashboard.browser import Theme, Window, window
from support.dashboard.place import Place

pytestmark = pytest.mark.slow
PATIENCE_MS = 60_000


@contextlib.asynccontextmanager
async def signed_in(
    browser: Browser, place: Place, theme: Theme = "light", width: int = 1280, token: str = ""
) -> AsyncGenerator[Window]:
    async with window(browser, place.origin, theme, width) as made:
        await made.goto("/")
        await made.page.fill("#token", token or place.server.profile.token)
        await made.page.click("main button")
        await expect(made.page.locator("h1")).to_have_text("Overview", timeout=PATIENCE_MS)
        yield made


def children(place: Place) -> list[psutil.Process]:
    found = psutil.Process(place.server.pid).children()
    return [child for child in found if "fedplat.dashboard.serving" in child.cmdline()]


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_page_has_a_barrier_a_foreign_request_or_a_fault(browser: Browser, place: Place, theme: Theme) -> None:
    async with signed_in(browser, place, theme) as made:
        for name, path in place.paths.items():
            await made.goto(path)
            await expect(made.page.locator("h1")).to_be_visible()
            await made.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            assert await made.axe() == [], name
            assert made.num_requests <= 8, name
            assert not await made.is_too_wide(), name
        assert made.faults == []
    async with window(browser, place.origin, theme) as made:
        await made.goto("/login")
        assert await made.axe() == []


async def test_no_page_is_wider_than_320_pixels(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place, width=320) as made:
        for name, path in place.paths.items():
            await made.goto(path)
            await expect(made.page.locator("h1")).to_be_visible()
            assert not await made.is_too_wide(), name


async def test_the_charts_are_drawn_and_have_tables(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place) as made:
        await made.goto(f"/jobs/{place.job}")
        figures = made.page.locator("figure")
        await expect(made.page.locator("figure canvas")).to_have_count(await figures.count(), timeout=PATIENCE_MS)
        await made.page.locator("figure summary").first.press("Enter")
        await expect(figures.first.locator("tbody tr").first).to_be_visible()


async def test_the_keyboard_is_enough(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place) as made:
        await made.goto("/")
        await made.page.keyboard.press("Tab")
        await expect(made.page.locator(".skip")).to_be_focused()
        await made.page.keyboard.press("Enter")
        await expect(made.page.locator("main")).to_be_focused()
        link = made.page.locator("#live_jobs a").first
        for _ in range(30):
            await made.page.keyboard.press("Tab")
            if await link.evaluate("element => element === document.activeElement"):
                break
        await made.page.keyboard.press("Enter")
        await expect(made.page.locator("h1")).to_have_text("digits")


def rounds_of(place: Place) -> re.Pattern[str]:
    """What a page shows of the job's committed rounds, or of later ones, which may end before the page is read."""
    job = place.admin.show_job(place.job)
    return re.compile(rf"Rounds({'|'.join(map(str, range(job.round, job.num_rounds + 1)))}) of {job.num_rounds}")


async def test_a_committed_round_appears_on_all_open_pages(browser: Browser, place: Place) -> None:
    async with contextlib.AsyncExitStack() as stack:
        windows = [await stack.enter_async_context(signed_in(browser, place)) for _ in range(3)]
        pages = [made.page for made in windows]
        for page in pages:
            await page.goto(f"{place.origin}/jobs/{place.job}")
        details = pages[0].locator("figure details").first
        await details.locator("summary").click()
        await asyncio.to_thread(place.complete_round)
        committed = rounds_of(place)
        for page in pages:
            await expect(page.locator("#live_state .tile").nth(1)).to_contain_text(committed, timeout=PATIENCE_MS)
        await expect(details).to_have_attribute("open", "")
        assert [made.faults for made in windows] == [[]] * 3


async def test_a_form_pauses_and_resumes_the_job_and_the_audit_log_names_the_operator(
    browser: Browser, place: Place
) -> None:
    async with signed_in(browser, place) as made:
        await made.goto(f"/jobs/{place.job}")
        await made.page.get_by_role("button", name="Pause job").click()
        await expect(made.page.locator("#live_state .state").first).to_have_text("paused", timeout=PATIENCE_MS)
        assert place.admin.show_job(place.job).status == admin_pb2.JOB_STATUS_PAUSED
        await made.page.get_by_role("button", name="Resume job").click()
        await expect(made.page.locator("#live_state .state").first).to_have_text("running", timeout=PATIENCE_MS)
        await made.goto("/audit?action=job%20paused")
        await expect(made.page.locator("tbody tr").first).to_contain_text("admin")


async def test_a_removed_operator_is_out_at_the_next_click(browser: Browser, place: Place) -> None:
    token = place.admin.add_operator("eve", "viewer").token
    async with signed_in(browser, place, token=token) as made:
        await made.goto(f"/jobs/{place.job}")
        await expect(made.page.locator(".actions")).to_have_count(0)
        place.admin.remove_operator("eve")
        await expect(made.page.locator("h1")).to_have_text("Sign in", timeout=PATIENCE_MS)  # by its open stream
        await made.goto("/jobs")
        await expect(made.page.locator("h1")).to_have_text("Sign in")
        assert token not in place.server.log_text()


async def test_the_death_of_the_dashboard_leaves_the_daemon_and_it_returns(browser: Browser, place: Place) -> None:
    (child,) = children(place)
    child.kill()
    place.complete_round()  # the daemon serves
    assert place.server.log_text().count("the dashboard has ended and will be started again") >= 1
    processes.until(lambda: bool(children(place)) and children(place)[0].pid != child.pid, "another dashboard")
    processes.until(lambda: place.server.log_text().count("the dashboard is ready") >= 2, "its port")
    async with signed_in(browser, place) as made:
        assert made.faults == []


async def test_pages_continue_after_the_server_has_returned(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place) as made:
        await made.goto(f"/jobs/{place.job}")
        before = place.server.log_text().count("the dashboard is ready")
        place.server.kill()
        place.server.start()
        processes.until(lambda: place.server.log_text().count("the dashboard is ready") > before, "a dashboard")
        assert len(children(place)) == 1
    async with signed_in(browser, place) as made:  # sessions are in memory only
        await made.goto(f"/jobs/{place.job}")
        await asyncio.to_thread(place.complete_round)
        committed = rounds_of(place)
        await expect(made.page.locator("#live_state .tile").nth(1)).to_contain_text(committed, timeout=PATIENCE_MS)


@contextlib.contextmanager
def local_dashboard(folder: Path, *arguments: str) -> Generator[tuple[str, subprocess.Popen[bytes], Path]]:
    """`fedplat dashboard` as a process; yields its address with a code, and the process."""
    command = [str(processes.BIN / "fedplat"), *arguments, "--listen", "127.0.0.1:0", "--no-browser"]
    log = folder / "dashboard.log"
    with processes.processes([command], log) as (process,):
        found: list[str] = []

        def is_ready() -> bool:
            found.extend(re.findall(r"http://127\.0\.0\.1:\d+/login\?code=\S+", log.read_text()))
            return bool(found)

        processes.until(is_ready, "the address")
        yield found[-1], process, log


async def test_the_local_dashboard_signs_in_once_by_its_code_and_shows_when_the_server_is_away(
    browser: Browser, place: Place, tmp_path: Path
) -> None:
    profile = str(place.server.profile_path)
    with local_dashboard(tmp_path, "--profile", profile, "dashboard") as (address, process, log):
        origin = address.partition("/login")[0]
        async with window(browser, origin) as made:
            await made.page.goto(address)
            await expect(made.page.locator("h1")).to_have_text("Overview", timeout=PATIENCE_MS)
            job = f"/jobs/{place.job}"
            await made.goto(job)
            os.kill(place.server.pid, signal.SIGSTOP)  # it neither answers nor closes its connections
            try:
                banner = made.page.locator("#live_banner .banner")
                await expect(banner).to_contain_text("The server does not answer", timeout=PATIENCE_MS)
            finally:
                os.kill(place.server.pid, signal.SIGCONT)
            await expect(banner).to_have_count(0, timeout=PATIENCE_MS)
            assert made.faults == []
        async with window(browser, origin) as other:
            await other.page.goto(address)
            await expect(other.page.locator("[role=alert]")).to_contain_text("not valid any more", timeout=PATIENCE_MS)
        os.kill(process.pid, signal.SIGUSR1)
        processes.until(lambda: len(re.findall(r"code=", log.read_text())) == 2, "a new code")
        process.terminate()
        assert process.wait(processes.PATIENCE_S) == 0
        assert place.server.profile.token not in log.read_text()


async def test_a_run_folder_opens_in_the_same_pages(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "digits"
    folders.begin(run, {"simulation": {"name": "digits", "rounds": 9}})

    def attempt(number: int) -> AttemptResult:
        return AttemptResult(
            round=number,
            attempt=1,
            kind="TRAIN",
            phase="COMMITTED",
            opened_at=9.0 * number,
            collecting_at=9.0 * number + 1.0,
            ended_at=9.0 * number + 5.0,
            version=number,
            counts={"MERGED": 8, "LATE": 2},
            evaluation={"accuracy": 1.0 - 0.5 / number},
        )

    with folders.Lines(run) as lines:
        for number in range(1, 6):
            lines.add(attempt(number))
        with local_dashboard(tmp_path, "dashboard", str(run)) as (address, _, _):
            async with window(browser, address.partition("/login")[0]) as made:
                await made.page.goto(address)
                await expect(made.page.locator("h1")).to_have_text("digits", timeout=PATIENCE_MS)
                for path in ("/", "/jobs", "/jobs/run?axis=time", "/jobs/run/rounds/3", "/jobs/run"):
                    await made.goto(path)
                    assert await made.axe() == [], path
                    assert not await made.is_too_wide()
                lines.add(attempt(6))
                await expect(made.page.locator("#live_state .tile").nth(1)).to_contain_text("6", timeout=PATIENCE_MS)
                assert made.faults == []
