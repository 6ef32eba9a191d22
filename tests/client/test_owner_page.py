"""The page of a client's owner, without a browser's window: who may see it, what it does, and what it shows."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import re
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from fedplat.job import canonical_text, digest_job, parse_job
from fedplat.web.guard import HEADERS
from fedplat.web.sessions import CodeLogin, LoginCodes
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import Client
from fedplat_client._page import app, views
from fedplat_client._page.app import StewardApp
from fedplat_client._page.steward import Steward
from fedplat_client._state.approvals import Decision
from fedplat_client._state.released import ReleaseRecord
from support import owners
from support.dashboard.visitor import Visitor
from support.fake_fleet import FakeFleet
from support.owners import HOSTILE

pytestmark = pytest.mark.slow
ORIGIN = "https://127.0.0.1:7490"
"""httpx keeps no secure cookies for HTTP; browsers do, on loopback."""


@dataclasses.dataclass
class Place:
    """A client with offers, decisions and a record, and the page of its owner."""

    client: Client
    digests: dict[str, str]
    app: StewardApp
    codes: LoginCodes
    fetched: list[str]
    visitor: Visitor

    def decision(self, name: str) -> Decision | None:
        return self.client.open_owner_files().approvals.load().jobs.get(self.digests[name])

    def job(self, name: str) -> str:
        return f"/jobs/{self.digests[name]}"

    async def decide(self, name: str, action: str, **fields: str) -> httpx.Response:
        """Fill in the form of a job's page."""
        page = (await self.visitor.get(self.job(name))).text
        return await self.visitor.post(f"{self.job(name)}/{action}", {"seen": seen(page), **fields})

    async def sign_in(self) -> None:
        assert (await self.visitor.post("/login", {"code": self.codes.make()})).status_code == 303


def seen(page: str) -> str:
    found = re.findall(r'name="seen" value="([^"]*)"', page)
    assert len(set(found)) == 1
    return html.unescape(found[0])


def open_page(client: Client, fetch: Callable[[], None] | None = None) -> tuple[StewardApp, LoginCodes]:
    steward = Steward(client.site, client.open_owner_files(), client.decide, fetch or client.fetch_offers)
    codes = LoginCodes(time.monotonic)
    return StewardApp(CodeLogin(steward, codes), frozenset({"127.0.0.1", "localhost"}), 7490), codes


@contextlib.asynccontextmanager
async def browse(made: StewardApp) -> AsyncGenerator[Visitor]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made.app), base_url=ORIGIN) as browser:
        yield Visitor(browser)


@pytest.fixture
async def stranger(tmp_path: Path) -> AsyncGenerator[Place]:
    """A place whose visitor has not signed in."""
    client, digests = owners.fill(tmp_path)
    fetched: list[str] = []
    made, codes = open_page(client, lambda: fetched.append("offers"))
    async with browse(made) as visitor:
        yield Place(client, digests, made, codes, fetched, visitor)
    made.stop()


@pytest.fixture
async def place(stranger: Place) -> Place:
    await stranger.sign_in()
    return stranger


def pages_of(place: Place) -> list[str]:
    paths = [path.replace("{digest}", place.digests["waiting"]) for path in views.PAGES]
    return [*paths, "/left.csv", "/report.md", "/report.json"]


def actions_of(place: Place) -> list[str]:
    return [path.replace("{digest}", place.digests["waiting"]) for path in app.ACTIONS]


async def test_nothing_is_shown_or_done_without_a_session(stranger: Place) -> None:
    for path in pages_of(stranger):
        response = await stranger.visitor.get(path)
        assert (response.status_code, response.headers["location"][:6]) == (303, "/login"), path
    for path in actions_of(stranger):
        response = await stranger.visitor.post(path, {"seen": "", "reason": "x"})
        assert (response.status_code, response.headers["location"]) == (303, "/login"), path
    assert stranger.decision("waiting") is None
    assert not stranger.fetched


async def test_each_route_has_the_methods_that_it_needs(stranger: Place) -> None:
    found: dict[str, set[str]] = {}
    for route in stranger.app.app.routes:
        if isinstance(route, Route):
            found[route.path] = found.get(route.path, set()) | set(route.methods or ())
    shown = (*views.PAGES, "/left.csv", "/report.md", "/report.json", "/static/{digest}/{name}")
    expected = {path: {"GET", "HEAD"} for path in shown} | {path: {"POST"} for path in (*app.ACTIONS, "/logout")}
    assert found == expected | {"/login": {"GET", "HEAD", "POST"}}


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://127.0.0.1:7480"},
        {"Origin": "null"},
        {},
    ],
)
async def test_a_form_of_another_site_does_nothing(place: Place, headers: dict[str, str]) -> None:
    """Also of another port of this machine, to which browsers send the cookies of this one."""
    for path in actions_of(place):
        response = await place.visitor.client.post(path, data={"seen": "", "reason": "x"}, headers=headers)
        assert response.status_code == 403
    assert place.decision("waiting") is None
    assert not place.fetched


async def test_a_code_signs_in_once_and_the_headers_are_strict(stranger: Place) -> None:
    code = stranger.codes.make()
    assert 'value="' + code in (await stranger.visitor.get(f"/login?code={code}")).text
    response = await stranger.visitor.post("/login", {"code": code})
    assert response.headers["set-cookie"].startswith("__Host-fedplat-client-7490=")
    stranger.visitor.client.cookies.clear()
    response = await stranger.visitor.post("/login", {"code": code})
    assert response.status_code == 403
    assert {name: response.headers[name] for name in HEADERS} == dict(HEADERS)
    assert (await stranger.visitor.get("/", {"Host": "evil.example"})).status_code == 421


async def test_an_approval_has_the_limits_of_the_form(place: Place) -> None:
    response = await place.decide("waiting", "approve", max_rounds="40", until="2999-01-01", max_epsilon="")
    assert (response.status_code, response.headers["location"]) == (303, place.job("waiting"))
    decision = place.decision("waiting")
    assert decision is not None
    assert (decision.verdict, decision.max_rounds, decision.until) == ("approved", 40, "2999-01-01")
    assert decision.max_epsilon is None
    assert "No job waits." in (await place.visitor.get("/")).text
    assert "at most 40 rounds, until 2999-01-01" in (await place.visitor.get("/approved")).text


async def test_a_job_is_rejected_and_an_approval_revoked_with_a_reason(place: Place) -> None:
    assert (await place.decide("waiting", "reject", reason=HOSTILE[:52])).status_code == 303
    assert (await place.decide("approved", "revoke", reason="the study has ended")).status_code == 303
    rejected, revoked = place.decision("waiting"), place.decision("approved")
    assert rejected is not None
    assert revoked is not None
    assert (rejected.verdict, rejected.reason) == ("rejected", HOSTILE[:52])
    assert (revoked.verdict, revoked.reason) == ("revoked", "the study has ended")


@pytest.mark.parametrize(
    ("name", "action", "fields", "problem"),
    [
        ("waiting", "approve", {"max_rounds": "many"}, "no number of rounds"),
        ("waiting", "approve", {"until": "2020-01-01"}, "2020-01-01 has passed"),
        ("waiting", "approve", {"max_epsilon": "-1"}, "no epsilon"),
        ("waiting", "reject", {"reason": " "}, "a rejection needs a reason"),
        ("waiting", "reject", {"reason": "x" * 501}, "at most 500 bytes"),
        ("approved", "revoke", {"reason": "\x1b[2J"}, "printable text"),
    ],
)
async def test_a_form_with_a_mistake_changes_nothing(
    place: Place, name: str, action: str, fields: dict[str, str], problem: str
) -> None:
    before = place.decision(name)
    response = await place.decide(name, action, **fields)
    assert response.status_code == 422
    assert "Nothing was changed" in response.text
    assert problem in response.text
    assert place.decision(name) == before


async def test_a_window_that_shows_an_older_decision_changes_nothing(place: Place) -> None:
    page = (await place.visitor.get(place.job("waiting"))).text
    assert (await place.decide("waiting", "reject", reason="no")).status_code == 303
    response = await place.visitor.post(f"{place.job('waiting')}/approve", {"seen": seen(page)})
    assert response.status_code == 422
    assert "another decision was made, and the job is rejected now" in response.text
    decision = place.decision("waiting")
    assert decision is not None
    assert decision.verdict == "rejected"


@pytest.mark.parametrize("digest", ["cd" * 32, "x", "..%2f..", "AB" * 32])
async def test_an_unknown_job_is_not_found(place: Place, digest: str) -> None:
    assert (await place.visitor.get(f"/jobs/{digest}")).status_code == 404
    for action in ("approve", "reject", "revoke"):
        response = await place.visitor.post(f"/jobs/{digest}/{action}", {"seen": "", "reason": "x"})
        assert response.status_code == 404


async def test_what_others_have_written_is_text(place: Place) -> None:
    for path in pages_of(place)[:-3]:
        page = (await place.visitor.get(path)).text
        assert "<script>alert" not in page, path
        assert "<img" not in page, path
        assert "<b>" not in page, path
        assert not any(char in page for char in "\x1b\u202e"), path
        assert "&lt;script&gt;alert(1)" in page or path in ("/approved", "/policy"), path


async def test_a_job_is_compared_with_the_last_approved_one(place: Place) -> None:
    page = (await place.visitor.get(place.job("waiting"))).text
    assert f'Compared with <a href="{place.job("approved")}">approved</a>' in page
    assert '<span class="removed">-rounds = 3' in page
    assert '<span class="added">+rounds = 40' in page
    page = (await place.visitor.get(place.job("approved"))).text
    assert "No other job is approved." in page


async def test_the_policy_says_of_each_rule_whether_it_applies(place: Place) -> None:
    def cells(page: str) -> list[str]:
        return [re.sub("<[^>]*>", " ", cell) for cell in re.findall('<td class="text">(.*?)</td>', page)][1::2]

    waiting, masked, denied = [
        cells((await place.visitor.get(f"/policy?job={place.digests[name]}")).text)
        for name in ("waiting", "masked", "experiment")
    ]
    assert [each.split()[0] for each in waiting] == ["no", "no", "no"]
    assert "secure_aggregation: the job has none" in waiting[1]
    assert [each.split()[0] for each in masked] == ["no", "yes", "not"]
    assert [each.split()[0] for each in denied] == ["yes", "not", "not"]
    place.client.open_owner_files().policy.path.write_text("[[allow]]\nkind = 3\n")
    page = (await place.visitor.get("/policy")).text
    assert "The policy has a mistake" in page
    assert "No job waits." in (await place.visitor.get("/")).text


async def test_the_report_and_the_record_can_be_kept(place: Place) -> None:
    period = "?from=2026-10-01&to=2026-11-30"
    text = (await place.visitor.get(f"/report.md{period}")).text
    assert place.digests["masked"] in text
    report = (await place.visitor.get(f"/report.json{period}")).json()
    assert (report["since"], len(report["months"])) == ("2026-10-01", 3)
    table = await place.visitor.get("/left.csv")
    assert table.headers["content-disposition"] == 'attachment; filename="released.csv"'
    assert table.text.count("\r\n") == 11
    for query in ("from=x", "from=2026-05-02&to=2026-05-01"):
        for path in ("/report", "/report.md", "/report.json"):
            assert (await place.visitor.get(f"{path}?{query}")).status_code == 422


async def test_a_changed_record_is_shown_with_a_warning_and_another_file_with_a_sentence(place: Place) -> None:
    path = place.client.released
    text = path.read_text()
    path.write_text(text.replace('"round":602', '"round":9', 1))
    page = (await place.visitor.get("/left")).text
    assert re.search(r'<p class="banner" role="alert">Line \d+ of the record is not as it was written', page)
    path.write_text("something else\n")
    response = await place.visitor.get("/left")
    assert response.status_code == 500
    assert "The record cannot be read" in response.text


async def test_the_page_asks_the_server_for_jobs(fleet: FakeFleet, make_client: Callable[..., Client]) -> None:
    """A client that runs asks by itself, so the form then changes nothing."""
    spec, model = parse_job(owners.plain_job()), owners.INITIAL
    digest = digest_job(spec, model)
    job = fleet_pb2.ReviewedJob(
        digest=digest, job_id="j-1", name="digits", job_file=canonical_text(spec), initial_digest=model
    )
    fleet.jobs.append(job)
    client = make_client(require_approval=True)
    made, codes = open_page(client)
    async with browse(made) as visitor:
        assert (await visitor.post("/login", {"code": codes.make()})).status_code == 303
        assert "No job waits." in (await visitor.get("/")).text
        for _ in range(2):
            assert (await visitor.post("/refresh")).status_code == 303
            assert f"/jobs/{digest}" in (await visitor.get("/")).text
        with client._directory.lock():  # pyright: ignore[reportPrivateUsage]
            assert (await visitor.post("/refresh")).status_code == 303
    made.stop()


async def test_offers_that_cannot_be_read_are_named(place: Place) -> None:
    offers = next(place.client.released.parent.glob(f"offers/{place.digests['waiting']}.json"))
    offers.write_text(offers.read_text().replace("rounds = 40", "rounds = 41"))
    steward = Steward(place.client.site, place.client.open_owner_files(), place.client.decide, lambda: None)
    found = steward.find(place.digests["waiting"])
    assert found.job is None
    assert "another job" in found.problem
    assert [each.digest for each in steward.list_offers() if each.problem] == [found.digest]


async def test_a_page_of_ten_thousand_records_costs_less_than_half_a_second(place: Place) -> None:
    record = ReleaseRecord(place.client.released)
    for number in range(10_000):
        record.add(owners.line(number, f"job-{number % 7}"))
    (await place.visitor.get("/left")).raise_for_status()  # compiles templates
    record.add(owners.line(10_000))
    began = time.process_time()
    page = (await place.visitor.get("/left")).text
    spent = time.process_time() - began
    print(f"{spent:.3f} CPU seconds")
    assert "1 to 50 of 10,011 lines" in page
    assert spent < 5.0, f"{spent:.3f} CPU seconds; ten times the aim, for slow machines"
    last = (await place.visitor.get("/left?from=10001")).text
    assert "10,001 to 10,011 of 10,011 lines" in last
