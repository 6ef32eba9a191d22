"""The page of a client's owner in Chromium: `fedplat-client page` as a process, without a server."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from fedplat_client import Client
from fedplat_client._state.approvals import Decision
from support import owners, processes
from support.dashboard.browser import Theme, Window, chromium, window

pytestmark = pytest.mark.slow
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
async def browser() -> AsyncGenerator[Browser]:
    async with chromium() as made:
        yield made


class Place:
    """A client's data directory, and its page as a process."""

    def __init__(self, client: Client, digests: dict[str, str], process: subprocess.Popen[bytes], log: Path) -> None:
        self.client, self.digests = client, digests
        self._process, self._log = process, log
        self._num_codes = 0

    def address(self) -> str:
        """A new address with a code."""
        if self._num_codes:
            self._process.send_signal(signal.SIGUSR1)
        self._num_codes += 1
        processes.until(lambda: len(self._addresses()) >= self._num_codes, "an address")
        return self._addresses()[-1]

    def _addresses(self) -> list[str]:
        return re.findall(r"http://127\.0\.0\.1:\d+/login\?code=\S+", self._log.read_text())

    def decision(self, name: str) -> Decision | None:
        return self.client.open_owner_files().approvals.load().jobs.get(self.digests[name])

    @property
    def paths(self) -> list[str]:
        jobs = [f"/jobs/{self.digests[name]}" for name in ("waiting", "approved", "rejected")]
        return ["/", *jobs, "/approved", "/left", f"/policy?job={self.digests['waiting']}", "/report?from=2026-10-01"]


@pytest.fixture
def place(tmp_path: Path) -> Generator[Place]:
    client, digests = owners.fill(tmp_path / "site")
    options = ("--server", "127.0.0.1:7443", "--population", "hospital", "--data-dir", str(tmp_path / "site"))
    command = [str(processes.BIN / "fedplat-client"), "page", "--listen", "127.0.0.1:0", "--no-browser", *options]
    log = tmp_path / "page.log"
    with processes.processes([command], log) as (process,):
        yield Place(client, digests, process, log)


@contextlib.asynccontextmanager
async def signed_in(
    browser: Browser, place: Place, theme: Theme = "light", width: int = 1280, *, scripts: bool = True
) -> AsyncGenerator[Window]:
    address = place.address()
    async with window(browser, address.partition("/login")[0], theme, width, scripts=scripts) as made:
        await made.page.goto(address)
        if not scripts:
            await made.page.get_by_role("button", name="Sign in").click()
        await expect(made.page.locator("h1")).to_have_text("Jobs that wait for your decision", timeout=PATIENCE_MS)
        yield made


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_page_has_a_barrier_a_foreign_request_or_a_fault(browser: Browser, place: Place, theme: Theme) -> None:
    """Also with names, reasons and settings that are markup: they are text."""
    async with signed_in(browser, place, theme) as made:
        for path in place.paths:
            await made.goto(path)
            await expect(made.page.locator("h1")).to_be_visible()
            await made.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            assert await made.axe() == [], path
            assert await made.page.locator("main script, main img, main b").count() == 0, path
            assert made.num_requests <= 4, path
        assert made.faults == []


@pytest.mark.parametrize("width", [320, 390])
async def test_no_page_is_wider_than_a_phone(browser: Browser, place: Place, width: int) -> None:
    async with signed_in(browser, place, width=width) as made:
        for path in place.paths:
            await made.goto(path)
            await expect(made.page.locator("h1")).to_be_visible()
            assert not await made.is_too_wide(), path


async def tab_to(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus."""
    wanted = page.locator(selector).first
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"no focus on: {selector}")


async def test_the_keyboard_is_enough_to_approve_and_to_revoke(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place) as made:
        page = made.page
        await tab_to(page, "a.button")
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text("waiting")
        await tab_to(page, "input[name=max_rounds]")
        await page.keyboard.type("40")
        await tab_to(page, "form[action$='/approve'] button")
        await page.keyboard.press("Enter")
        await expect(page.locator("main .state").first).to_have_text("approved", timeout=PATIENCE_MS)
        approved = place.decision("waiting")
        assert approved is not None
        assert (approved.verdict, approved.max_rounds) == ("approved", 40)
        await tab_to(page, "form[action$='/revoke'] input[name=reason]")
        await page.keyboard.type("the study has ended")
        await page.keyboard.press("Enter")
        await expect(page.locator("main .state").first).to_have_text("revoked", timeout=PATIENCE_MS)
        revoked = place.decision("waiting")
        assert revoked is not None
        assert (revoked.verdict, revoked.reason) == ("revoked", "the study has ended")
        assert made.faults == []


async def test_a_job_is_rejected_without_scripts(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place, scripts=False) as made:
        await made.goto(f"/jobs/{place.digests['waiting']}")
        await made.page.get_by_label("Reason, for the operator of the job").fill("no <b>purpose</b>")
        await made.page.get_by_role("button", name="Reject").click()
        await expect(made.page.locator("main .state").first).to_have_text("rejected", timeout=PATIENCE_MS)
    decision = place.decision("waiting")
    assert decision is not None
    assert (decision.verdict, decision.reason) == ("rejected", "no <b>purpose</b>")


async def test_of_two_windows_the_second_one_learns_what_the_first_has_decided(browser: Browser, place: Place) -> None:
    job = f"/jobs/{place.digests['waiting']}"
    async with signed_in(browser, place) as made:
        other = await made.context.new_page()
        await made.goto(job)
        await other.goto(made.origin + job)
        await made.page.get_by_role("button", name="Approve").click()
        await expect(made.page.locator("main .state").first).to_have_text("approved", timeout=PATIENCE_MS)
        await other.get_by_label("Reason, for the operator of the job").fill("no")
        await other.get_by_role("button", name="Reject").click()
        await expect(other.locator("main [role=alert]")).to_contain_text(
            "another decision was made, and the job is approved now", timeout=PATIENCE_MS
        )
    decision = place.decision("waiting")
    assert decision is not None
    assert decision.verdict == "approved"


async def test_signing_out_ends_the_session(browser: Browser, place: Place) -> None:
    async with signed_in(browser, place) as made:
        await made.page.get_by_role("button", name="Sign out").click()
        await expect(made.page.locator("h1")).to_have_text("Sign in", timeout=PATIENCE_MS)
        await made.goto("/left")
        await expect(made.page.locator("h1")).to_have_text("Sign in")
