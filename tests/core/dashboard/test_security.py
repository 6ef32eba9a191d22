"""Sessions, logins, cross-site requests, headers and bounds."""

from __future__ import annotations

import asyncio
import logging
import threading

import grpc
import pytest
from starlette.routing import Route

from fedplat.dashboard import routes
from fedplat.dashboard.app import COOKIE, Dashboard
from fedplat.dashboard.source import PageSource
from fedplat.web import sessions
from fedplat.web.guard import HEADERS, MAX_BODY_BYTES, TLS_HEADERS
from fedplat_server.rpc import operator_access
from support.dashboard.fake_server import CLIENT_ID, ENROLLMENT_ID, JOB_ID, FakeServer, away, refused
from support.dashboard.visitor import ORIGIN, SECRET, FakeClock, FakeLogin, Visitor

ACTIONS = {
    f"/jobs/{JOB_ID}/start": ({}, f"start {JOB_ID}"),
    f"/jobs/{JOB_ID}/pause": ({}, f"pause {JOB_ID}"),
    f"/jobs/{JOB_ID}/resume": ({}, f"resume {JOB_ID}"),
    f"/jobs/{JOB_ID}/cancel": ({"name": "digits"}, f"cancel {JOB_ID}"),
    f"/jobs/{JOB_ID}/rollback": ({"name": "digits", "version": "3"}, f"rollback {JOB_ID} 3"),
    f"/clients/{CLIENT_ID}/revoke": ({"name": CLIENT_ID}, f"revoke {CLIENT_ID}"),
    f"/enrollments/{ENROLLMENT_ID}/revoke": ({"name": ENROLLMENT_ID}, f"revoke {ENROLLMENT_ID}"),
}
"""Every action: its form, and the call that it makes."""
PAGES = [
    page.path.replace("{job}", JOB_ID)
    .replace("{round}", "3")
    .replace("{chart}", "duration")
    .replace("{client}", CLIENT_ID)
    for page in routes.PAGES
]
SAME = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded"}
UNSAFE = ("POST", "PUT", "PATCH", "DELETE")
FOREIGN = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://fed.example.org"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Origin": ORIGIN},
    {},
]


def made(server: FakeServer) -> list[str]:
    """The calls that change something."""
    return [call for call in server.calls if " " in call]


def test_every_action_is_tested() -> None:
    assert len(ACTIONS) == len(routes.ACTIONS)


async def test_each_route_has_the_methods_of_the_table(dashboard: Dashboard) -> None:
    expected: dict[str, set[str]] = {"/static/{digest}/{name}": {"GET", "HEAD"}, "/logout": {"POST"}}
    expected |= {page.path: {"GET", "HEAD"} for page in routes.PAGES} | {path: {"POST"} for path in routes.ACTIONS}
    found: dict[str, set[str]] = {}
    for route in dashboard.app.routes:
        if isinstance(route, Route):
            found[route.path] = found.get(route.path, set()) | set(route.methods or ())
    assert found == expected | {"/login": {"GET", "HEAD", "POST"}}


async def test_nothing_is_shown_or_done_without_a_session(stranger: Visitor, server: FakeServer) -> None:
    for path in (*PAGES, *ACTIONS):
        method = "POST" if path in ACTIONS else "GET"
        response = await stranger.client.request(method, path, data={"name": "digits"}, headers=SAME)
        assert response.status_code == 303, path
        assert response.headers["location"].startswith("/login")
    assert server.calls == []


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
async def test_an_action_needs_the_role(visitor: Visitor, server: FakeServer, role: str) -> None:
    server.role = role
    for path, (form, _) in ACTIONS.items():
        response = await visitor.post(path, form)
        assert response.status_code == (403 if role == "viewer" else 303), path
        assert ("The call needs the role operator." in response.text) == (role == "viewer")
    assert made(server) == ([] if role == "viewer" else [call for _, call in ACTIONS.values()])


@pytest.mark.parametrize("headers", FOREIGN)
async def test_a_cross_site_write_is_refused(visitor: Visitor, server: FakeServer, headers: dict[str, str]) -> None:
    for path in (*ACTIONS, "/login", "/logout", "/", "/nothing"):
        for method in UNSAFE:
            form = ACTIONS.get(path, ({}, ""))[0]
            response = await visitor.client.request(method, path, data=form or {"": ""}, headers=headers)
            assert response.status_code == 403, (method, path)
    assert made(server) == []
    assert (await visitor.get("/")).status_code == 200  # still signed in


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "same-origin"}, {"Origin": ORIGIN}])
async def test_a_form_of_the_dashboard_is_accepted(
    visitor: Visitor, server: FakeServer, headers: dict[str, str]
) -> None:
    assert (await visitor.post(f"/jobs/{JOB_ID}/pause", headers=headers)).status_code == 303
    assert made(server) == [f"pause {JOB_ID}"]


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
async def test_other_methods_do_nothing(visitor: Visitor, server: FakeServer, method: str) -> None:
    for path in ACTIONS:
        response = await visitor.client.request(method, path, data={"name": "digits"}, headers=SAME)
        assert response.status_code == 405
    assert made(server) == []


@pytest.mark.parametrize(
    "host",
    ["evil.example", "fed.example.org.evil.example", "127.0.0.1", "", "fed.example.org@x", "fed.example.org#@x", "["],
)
async def test_an_unknown_host_is_refused(visitor: Visitor, host: str) -> None:
    response = await visitor.get("/", {"Host": host})
    assert response.status_code == 421
    assert "fed.example.org" in response.text


async def test_a_known_host_may_have_any_port_and_case(visitor: Visitor) -> None:
    assert (await visitor.get("/", {"Host": "FED.example.org:8443"})).status_code == 200


@pytest.mark.parametrize("path", ["/", "/login", "/jobs/none", "/nothing", f"/jobs/{JOB_ID}"])
async def test_the_headers_are_strict(visitor: Visitor, path: str) -> None:
    response = await visitor.get(path)
    expected = {**HEADERS, **TLS_HEADERS}
    assert {name: response.headers.get(name) for name in expected} == expected
    assert response.headers["cache-control"] == "no-store"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert "server" not in response.headers


async def test_the_cookie_is_closed_to_scripts_and_other_sites(stranger: Visitor) -> None:
    response = await stranger.sign_in()
    cookie = response.headers["set-cookie"]
    name, _, rest = cookie.partition("=")
    assert name == COOKIE == "__Host-fedplat-session"
    assert {part.strip().lower() for part in rest.split(";")[1:]} == {
        "httponly", "secure", "samesite=strict", "path=/", "max-age=43200",
    }  # fmt: skip
    assert len(rest.partition(";")[0]) == 43  # 256 bits as base64


async def test_a_session_ends_after_an_idle_hour(visitor: Visitor, server: FakeServer, clock: FakeClock) -> None:
    clock.now += sessions.IDLE_S - 1
    assert (await visitor.get("/")).status_code == 200
    clock.now += sessions.IDLE_S + 1
    assert (await visitor.get("/")).status_code == 303
    assert server.is_closed


async def test_a_session_in_use_ends_after_twelve_hours(visitor: Visitor, clock: FakeClock) -> None:
    for _ in range(24):
        assert (await visitor.get("/")).status_code == 200
        clock.now += 1800.0
    clock.now += 1.0
    assert (await visitor.get("/")).status_code == 303


async def test_signing_out_ends_the_session(visitor: Visitor, server: FakeServer, dashboard: Dashboard) -> None:
    cookie = visitor.client.cookies[COOKIE]
    assert (await visitor.post("/logout")).status_code == 303
    assert len(dashboard.sessions) == 0
    assert server.is_closed
    visitor.client.cookies.set(COOKIE, cookie, domain="fed.example.org")
    assert (await visitor.get("/")).status_code == 303


async def test_a_removed_operator_is_out_at_the_next_click(visitor: Visitor, server: FakeServer) -> None:
    server.error = refused(grpc.StatusCode.UNAUTHENTICATED, "the token is unknown, or its operator was removed")
    assert (await visitor.get("/jobs")).headers["location"] == "/login?next=%2Fjobs"
    server.error = None
    assert (await visitor.get("/jobs")).status_code == 303
    server.error = refused(grpc.StatusCode.UNAUTHENTICATED)
    assert (await visitor.sign_in()).status_code == 303
    assert (await visitor.post(f"/jobs/{JOB_ID}/pause")).headers["location"] == "/login"


async def test_a_used_code_leads_a_browser_that_has_signed_in_to_the_pages(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its printed address was opened again. A wrong token never leads to the pages of another operator."""
    assert (await visitor.sign_in("wrong")).status_code == 403
    monkeypatch.setattr(FakeLogin, "field", "code")
    for path in ("", "/jobs"):
        response = await visitor.post("/login", {"code": "used", "next": path})
        assert (response.status_code, response.headers["location"]) == (303, path or "/")
    visitor.client.cookies.clear()
    assert (await visitor.post("/login", {"code": "used"})).status_code == 403


async def test_wrong_tokens_keep_no_operator_out(stranger: Visitor) -> None:
    """Neither texts that are not tokens nor unknown tokens count: the next valid one signs in, from any address."""
    for secret in ("x", "fedplat_op_" + "x" * 43) * 40:
        response = await stranger.sign_in(secret)
        assert response.status_code == 403
        assert "The server did not accept the token." in response.text
    assert (await stranger.sign_in()).status_code == 303


async def test_wrong_tokens_that_are_being_checked_keep_no_operator_out(
    stranger: Visitor, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server delays as many refusals as it ever does, and more wrong tokens wait in line."""
    answered, login = threading.Event(), FakeLogin(FakeServer())
    delayed = threading.Semaphore(operator_access.MAX_PENDING)

    def sign_in(secret: str) -> PageSource:
        if secret != SECRET and delayed.acquire(blocking=False):
            answered.wait()
        return login.sign_in(secret)

    monkeypatch.setattr(
        dashboard.signing, "login", type("Slow", (FakeLogin,), {"sign_in": staticmethod(sign_in)})(login.source)
    )
    wrong = [asyncio.ensure_future(stranger.sign_in("fedplat_op_" + "x" * 43)) for _ in range(60)]
    try:
        await asyncio.sleep(0)
        assert (await stranger.sign_in()).status_code == 303
    finally:
        answered.set()
    assert {response.status_code for response in await asyncio.gather(*wrong)} == {403}


@pytest.mark.parametrize("path", ["https://evil.example", "//evil.example", "/\\evil.example", "/login", "x", "/a\nb"])
async def test_a_login_continues_on_this_site_only(stranger: Visitor, path: str) -> None:
    assert (await stranger.sign_in(next_path=path)).headers["location"] == "/"


async def test_a_login_continues_where_it_began(stranger: Visitor) -> None:
    location = (await stranger.get("/jobs?search=a%26b")).headers["location"]
    form = (await stranger.get(location)).text
    assert 'value="/jobs?search=a%26b"' in form
    assert (await stranger.sign_in(next_path="/jobs?search=a%26b")).headers["location"] == "/jobs?search=a%26b"


async def test_the_number_of_sessions_is_bounded(stranger: Visitor, dashboard: Dashboard) -> None:
    source = FakeServer()
    oldest = dashboard.sessions.open(source)
    for _ in range(sessions.MAX_SESSIONS):
        dashboard.sessions.open(FakeServer())
    assert len(dashboard.sessions) == sessions.MAX_SESSIONS
    assert source.is_closed
    assert dashboard.sessions.find(oldest) is None


async def test_a_code_is_valid_once_and_for_a_minute(clock: FakeClock) -> None:
    codes = sessions.LoginCodes(clock)
    assert not codes.use("")
    first, second = codes.make(), codes.make()
    assert not codes.use(first)
    assert codes.use(second)
    assert not codes.use(second)
    third = codes.make()
    clock.now += sessions.CODE_S + 0.1
    assert not codes.use(third)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"name=" + b"x" * MAX_BODY_BYTES, {}, 413),
        (b"name=x", {"Content-Length": "9" * 30}, 413),
        (b"&".join(b"a=%d" % number for number in range(30)), {}, 400),
        (b"name=\xff", {}, 400),
        (b"{}", {"Content-Type": "application/json"}, 415),
    ],
)
async def test_forms_are_bounded(
    visitor: Visitor, server: FakeServer, content: bytes, headers: dict[str, str], status: int
) -> None:
    response = await visitor.client.post(f"/jobs/{JOB_ID}/cancel", content=content, headers=SAME | headers)
    assert response.status_code == status
    assert made(server) == []


@pytest.mark.parametrize(
    ("path", "form", "text"),
    [
        (f"/jobs/{JOB_ID}/cancel", {"name": "other"}, "you entered &#39;other&#39;, but the job is &#39;digits&#39;"),
        (f"/jobs/{JOB_ID}/cancel", {"x": ""}, "Nothing was changed"),
        (f"/jobs/{JOB_ID}/rollback", {"name": "digits", "version": "-1"}, "The version is not a number"),
        (f"/clients/{CLIENT_ID}/revoke", {"name": "all"}, "Nothing was changed"),
        (f"/enrollments/{ENROLLMENT_ID}/revoke", {"name": "all"}, "Nothing was changed"),
    ],
)
async def test_what_cannot_be_undone_asks_for_the_name(
    visitor: Visitor, server: FakeServer, path: str, form: dict[str, str], text: str
) -> None:
    response = await visitor.post(path, form)
    assert response.status_code == 422
    assert text in response.text
    assert made(server) == []


async def test_a_server_that_is_away_is_named_at_the_login_and_at_an_action(
    visitor: Visitor, server: FakeServer
) -> None:
    server.error = away()
    response = await visitor.post(f"/jobs/{JOB_ID}/pause")
    assert response.status_code == 503
    assert "No fedplat server answers" in response.text


async def test_no_token_is_logged(visitor: Visitor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await visitor.sign_in()
    await visitor.get("/")
    assert SECRET not in caplog.text
    assert visitor.client.cookies[COOKIE] not in caplog.text
