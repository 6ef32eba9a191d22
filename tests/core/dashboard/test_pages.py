"""The pages: what they show, for which role, and that they stay small."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import grpc
import pytest

from fedplat.dashboard import routes
from fedplat.wire.v1 import admin_pb2
from support.dashboard.fake_server import (
    CLIENT_ID,
    ENROLLMENT_ID,
    JOB_ID,
    FakeServer,
    away,
    make_client,
    make_job,
    make_rounds,
    refused,
)
from support.dashboard.visitor import SECRET, Visitor

NAMES = {"job": JOB_ID, "round": "3", "chart": "participation", "client": CLIENT_ID, "enrollment": ENROLLMENT_ID}
PATHS = [re.sub(r"\{(\w+)\}", lambda match: NAMES[match[1]], page.path) for page in routes.PAGES]
VOID = frozenset({"meta", "link", "input", "br", "rect", "polyline", "path", "circle"})


class Elements(HTMLParser):
    """Counts the elements of a page, and notes what a strict policy forbids or what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count = 0
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1
        names = dict(attrs)
        if "style" in names or tag == "style" or (tag == "script" and "src" not in names):
            self.faults.append(f"{tag} {attrs}")
        self.faults += [f"{tag} {name}" for name in names if name.startswith("on")]
        self.faults += [str(names[name]) for name in ("src", "href") if str(names.get(name, "")).startswith("http")]
        if names.get("id"):
            self.ids.append(str(names["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open
        assert self.open[-1] == tag, (self.open, tag)
        self.open.pop()


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_page_is_valid_and_shows_no_secret(
    visitor: Visitor, server: FakeServer, path: str, private: bool
) -> None:
    server.private = private
    response = await visitor.get(path)
    assert response.status_code == 200, response.text
    elements = Elements(response.text)
    assert elements.faults == []
    assert len(elements.ids) == len(set(elements.ids))
    assert SECRET not in response.text
    assert "<b>oops" not in response.text
    assert "<script>alert" not in response.text
    assert "\x1b" not in response.text
    assert response.text.count("<h1>") == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_stays_small_with_a_large_server(visitor: Visitor, server: FakeServer, path: str) -> None:
    server.jobs = [make_job(number) for number in range(1_000)]
    server.rounds = make_rounds(10_000)
    server.num_clients = 100_000
    response = await visitor.get(path)
    elements = Elements(response.text)
    assert len(response.content) <= 200_000
    assert elements.count <= 3_000
    assert response.text.count("<script") + response.text.count("<link") + 2 <= 8  # with the page and its stream


async def test_the_job_shows_last_and_best_values_and_participation(visitor: Visitor, server: FakeServer) -> None:
    server.rounds[4].server_metrics["accuracy"] = 0.99
    text = (await visitor.get(f"/jobs/{JOB_ID}")).text
    assert "accuracy is 0.925 after round 12; the best is 0.99, in round 5." in text
    assert "loss is 0.1667 after round 12; the best is 0.1667, in round 12." in text
    for each in server.rounds:
        each.server_metrics["local_steps"] = 4.0
    text = (await visitor.get(f"/jobs/{JOB_ID}")).text
    assert "local_steps is 4 after round 12.<" in text, "no number of steps is the best"
    assert "Convergence: local_steps" not in text
    assert "77 % of 156 assignments were merged; 15 % late, 8 % failed." in text


async def test_the_chart_over_time_and_its_table(visitor: Visitor) -> None:
    text = (await visitor.get(f"/jobs/{JOB_ID}?axis=time")).text
    assert "Time (UTC)" in text
    table = (await visitor.get(f"/jobs/{JOB_ID}/charts/duration")).text
    assert table.count("<tr>") == 13
    assert (await visitor.get(f"/jobs/{JOB_ID}/charts/none")).status_code == 404


async def test_the_funnel_has_each_known_step(visitor: Visitor) -> None:
    text = (await visitor.get(f"/jobs/{JOB_ID}/rounds/3")).text
    steps = re.findall(r'<th scope="row">([A-Z][a-z ]+)<br>.*?<td class="n">(\d+)</td>', text)
    assert steps == [
        ("Checked in", "40"),
        ("Eligible", "30"),
        ("Selected", "13"),
        ("Downloaded", "13"),
        ("Trained", "11"),
        ("Reported", "10"),
        ("Merged", "10"),
    ]


async def test_a_private_job_shows_no_small_group_and_no_examples_of_a_client(
    visitor: Visitor, server: FakeServer
) -> None:
    path = f"/jobs/{JOB_ID}/rounds/3"
    text = (await visitor.get(path)).text
    assert "Examples" in text
    assert "&lt;5" not in text
    server.private = True
    text = (await visitor.get(path)).text
    assert "Examples" not in text
    assert '<td class="n">&lt;5</td>' in text  # 3 merged clients with region=eu


@pytest.mark.parametrize(
    ("role", "titles"),
    [
        ("viewer", ["Overview", "Jobs", "Fleet", "Privacy", "Alerts"]),
        ("operator", ["Overview", "Jobs", "Fleet", "Privacy", "Alerts", "Audit log", "Enrollments"]),
        ("admin", ["Overview", "Jobs", "Fleet", "Privacy", "Alerts", "Audit log", "Enrollments", "Operators"]),
    ],
)
async def test_the_menu_and_the_forms_depend_on_the_role(
    visitor: Visitor, server: FakeServer, role: str, titles: list[str]
) -> None:
    server.role = role
    text = (await visitor.get(f"/jobs/{JOB_ID}")).text
    menu = text[text.index("live_menu") : text.index("</nav>")]
    assert re.findall(r'<a href="[^"]+"[^>]*>([A-Z][a-z ]+)', menu) == [
        title if title != "Alerts" else "Alerts " for title in titles
    ]
    has_forms = role != "viewer"
    assert ('action="/jobs/' in text) == has_forms
    assert ("revoke" in (await visitor.get(f"/clients/{CLIENT_ID}")).text) == has_forms


async def test_a_client_whose_trainer_does_not_return_is_not_shown_as_working(
    visitor: Visitor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(CLIENT_ID)
    client.state, client.job_id = "away", JOB_ID

    def show_client(_: str) -> admin_pb2.Client:
        return client

    def list_clients(_: admin_pb2.ListClientsRequest) -> admin_pb2.ListClientsResponse:
        return admin_pb2.ListClientsResponse(clients=[client], total=1)

    monkeypatch.setattr(server, "show_client", show_client)
    monkeypatch.setattr(server, "_list_clients", list_clients)
    page, table = (await visitor.get(f"/clients/{CLIENT_ID}")).text, (await visitor.get("/clients")).text
    assert "its trainer has not returned from a task of" in page
    assert "restart its fedplat-client" in page
    assert "works for" not in page
    assert "its trainer has not returned" in table
    client.state = "busy"
    assert "works for" in (await visitor.get(f"/clients/{CLIENT_ID}")).text


async def test_lists_are_filtered_by_the_server_and_paged(visitor: Visitor, server: FakeServer) -> None:
    server.jobs = [make_job(number) for number in range(120)]
    first = (await visitor.get("/jobs?search=digits&status=RUNNING")).text
    assert "1 to 50 of 120 jobs" in first
    following = re.search(r'href="([^"]+)" rel="next"', first)
    assert following is not None
    second = (await visitor.get(following[1].replace("&amp;", "&"))).text
    assert "51 to 100 of 120 jobs" in second
    assert 'value="digits"' in second
    none = (await visitor.get("/jobs?search=nothing")).text
    assert "No job matches these filters." in none


async def test_an_empty_server_says_what_to_do_next(visitor: Visitor, server: FakeServer) -> None:
    server.jobs, server.num_clients = [], 0
    text = (await visitor.get("/")).text
    assert "fedplat job submit job.toml --follow" in text
    assert "fedplat enrollment create" in text
    assert "fedplat enrollment create" in (await visitor.get("/fleet")).text


async def test_what_an_older_server_does_not_have_is_a_sentence(visitor: Visitor, server: FakeServer) -> None:
    server.optional_error = refused(grpc.StatusCode.UNIMPLEMENTED)
    response = await visitor.get("/alerts")
    assert response.status_code == 200
    assert response.text.count("This server does not record them") == 3
    server.optional_error = refused(grpc.StatusCode.PERMISSION_DENIED, "ListDeliveries needs the role operator")
    assert "ListDeliveries needs the role operator." in (await visitor.get("/alerts")).text


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (away(), 503, "No fedplat server answers at fed.example.org:7443"),
        (refused(grpc.StatusCode.NOT_FOUND, "there is no such job"), 404, "There is no such job."),
        (refused(grpc.StatusCode.PERMISSION_DENIED, "too low"), 403, "Too low."),
        (refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many"), 429, "Too many."),
        (refused(grpc.StatusCode.INTERNAL, "it failed"), 502, "It failed."),
    ],
)
async def test_a_failure_is_a_page_with_a_sentence(
    visitor: Visitor, server: FakeServer, error: Exception, status: int, text: str
) -> None:
    server.error = error
    response = await visitor.get(f"/jobs/{JOB_ID}")
    assert response.status_code == status
    assert text in response.text
    assert Elements(response.text).faults == []
    server.error = None
    assert (await visitor.get(f"/jobs/{JOB_ID}")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/nowhere", "/jobs/nothing", f"/jobs/{JOB_ID}/rounds/x", f"/jobs/{JOB_ID}/rounds/99999999999"]
)
async def test_an_address_of_nothing_is_not_found(visitor: Visitor, path: str) -> None:
    response = await visitor.get(path)
    assert response.status_code == 404
    assert ('<a href="/jobs"' in response.text, "Not found" in response.text) == (True, True), "a page with the menu"


async def test_statuses_of_jobs_offer_what_is_possible(visitor: Visitor, server: FakeServer) -> None:
    offered = {
        admin_pb2.JOB_STATUS_DRAFT: {"start", "cancel"},
        admin_pb2.JOB_STATUS_RUNNING: {"pause", "cancel", "rollback"},
        admin_pb2.JOB_STATUS_PAUSED: {"resume", "cancel", "rollback"},
        admin_pb2.JOB_STATUS_COMPLETED: set[str](),
    }
    for status, expected in offered.items():
        server.jobs[0].status = status
        text = (await visitor.get(f"/jobs/{JOB_ID}")).text
        assert set(re.findall(rf'action="/jobs/{JOB_ID}/(\w+)"', text)) == expected
