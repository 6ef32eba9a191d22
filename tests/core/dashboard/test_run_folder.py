"""The pages of a run folder: of a run in progress, a resumed one and a finished one."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from fedplat.dashboard.app import Dashboard
from fedplat.dashboard.run_source import RunFolderSource
from fedplat.errors import DataError
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.wire.v1 import admin_pb2
from support.dashboard.visitor import ORIGIN, FakeClock, FakeLogin, Visitor

INPUTS = {"simulation": {"name": "digits", "population": "demo", "rounds": 4}}


def attempt(round_: int, number: int = 1, phase: str = "COMMITTED", accuracy: float = 0.5) -> AttemptResult:
    return AttemptResult(
        round=round_,
        attempt=number,
        kind="TRAIN",
        phase=phase,
        opened_at=100.0 * round_,
        collecting_at=100.0 * round_ + 1,
        ended_at=100.0 * round_ + 40.0,
        version=round_,
        counts={"MERGED": 6, "LATE": 3, "FAILED": 1},
        evaluation={"accuracy": accuracy},
        staleness={0: 4, 3: 2},
        num_updates=6,
        bytes_up=1e6,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in progress, with two rounds; round 2 needed two attempts."""
    folders.begin(tmp_path / "digits", INPUTS)
    with folders.Lines(tmp_path / "digits") as lines:
        for each in (attempt(1), attempt(2, phase="ABANDONED"), attempt(2, 2, accuracy=float("nan"))):
            lines.add(each)
    return tmp_path / "digits"


@pytest.fixture
async def pages(run: Path, clock: FakeClock) -> AsyncGenerator[Visitor]:
    app = Dashboard(FakeLogin(RunFolderSource(run)), frozenset({"fed.example.org"}), clock).app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN) as client:
        visitor = Visitor(client)
        await visitor.sign_in()
        yield visitor


def finish(run: Path) -> None:
    (run / folders.RESULTS).write_text(json.dumps({"job": "digits", "status": "COMPLETED", "attempts": []}))


def add_line(run: Path, text: str) -> None:
    with (run / folders.ROUNDS).open("a") as file:
        file.write(text)


async def test_the_first_page_is_that_of_the_job(run: Path, clock: FakeClock) -> None:
    finish(run)
    app = Dashboard(FakeLogin(RunFolderSource(run)), frozenset({"fed.example.org"}), clock).app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN) as client:
        visitor = Visitor(client)
        assert (await visitor.sign_in()).headers["location"] == "/jobs/run"
        assert (await visitor.sign_in(next_path="/jobs/run/rounds")).headers["location"] == "/jobs/run/rounds"


@pytest.mark.parametrize(
    "path", ["/", "/jobs", "/jobs/run", "/jobs/run?axis=time", "/jobs/run/rounds", "/jobs/run/rounds/2"]
)
async def test_a_page_of_a_run_has_no_form_and_no_page_of_a_server(pages: Visitor, path: str) -> None:
    response = await pages.get(path)
    assert response.status_code == 200, response.text
    assert "simulation" in response.text
    assert 'action="/jobs/' not in response.text
    for absent in ("/audit", "/operators", "/fleet", "/enrollments", "/alerts", "/privacy"):
        assert f'href="{absent}"' not in response.text
        assert (await pages.get(absent)).status_code == 404


async def test_the_round_has_its_attempts_and_outcomes(pages: Visitor) -> None:
    text = (await pages.get("/jobs/run/rounds/2")).text
    assert "Round 2, attempt 2" in text
    assert '<th scope="row">Selected' in text
    assert '<td class="n">10</td>' in text
    assert (await pages.get("/jobs/run/rounds/2?attempt=1")).text.count("abandoned") >= 1
    for path in ("/jobs/run/rounds/3", "/jobs/run/rounds/2?attempt=9", "/jobs/other"):
        assert (await pages.get(path)).status_code == 404


async def test_an_action_is_refused(pages: Visitor) -> None:
    assert (await pages.post("/jobs/run/pause")).status_code == 404


def test_the_files_are_read_as_they_grow(run: Path) -> None:
    source = RunFolderSource(run)
    request = admin_pb2.ListRoundsRequest(all_attempts=True)
    assert [(each.round, each.attempt) for each in source.page(request).rounds] == [(1, 1), (2, 1), (2, 2)]
    assert source.page(request).rounds[2].mean_staleness == 1.0
    assert dict(source.page(request).rounds[2].server_metrics) == {}  # it was not finite
    line = folders.format_line(attempt(3))
    add_line(run, line[:40])
    assert len(source.page(request).rounds) == 3
    add_line(run, line[40:])
    assert len(source.page(request).rounds) == 4
    with folders.Lines(run) as lines:  # a resumed run begins again
        lines.add(attempt(1))
    assert len(source.page(request).rounds) == 1
    assert source.show_job("run").status == admin_pb2.JOB_STATUS_RUNNING
    finish(run)
    assert source.show_job("digits").status == admin_pb2.JOB_STATUS_COMPLETED


async def test_the_overview_of_a_run_that_has_ended_shows_its_job(run: Path, pages: Visitor) -> None:
    finish(run)
    page = (await pages.get("/")).text
    assert 'href="/jobs/run"' in page
    assert "completed" in page.lower()


def test_lists_have_pages_and_samples(run: Path) -> None:
    with folders.Lines(run) as lines:
        for number in range(1, 601):
            lines.add(attempt(number))
    source = RunFolderSource(run)
    request = admin_pb2.ListRoundsRequest(newest_first=True)
    seen: list[int] = []
    while True:
        page = source.page(request)
        assert page.total == 600
        seen += [each.round for each in page.rounds]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert seen == list(range(600, 0, -1))
    sample = source.page(admin_pb2.ListRoundsRequest(num_samples=10))
    assert (len(sample.rounds), sample.rounds[0].round, sample.rounds[-1].round) == (10, 1, 600)
    assert [each.round for each in source.list_latest_versions("run", 3)] == [600, 599, 598]


def test_a_watch_reports_a_change_and_ends(run: Path) -> None:
    watch = RunFolderSource(run).watch("run")
    add_line(run, folders.format_line(attempt(3)))
    changes = watch.changes()
    next(changes)  # a watch that misses the change would wait until the test's time is over
    watch.close()
    assert list(changes) == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no run in .*; expected the folder of a simulation"):
        RunFolderSource(tmp_path)


def test_a_damaged_file_is_named(run: Path) -> None:
    add_line(run, "{}\n")
    with pytest.raises(DataError, match=r"rounds\.jsonl is not the file of a run"):
        RunFolderSource(run).page(admin_pb2.ListRoundsRequest())


DEEP = "[" * 100_000 + "]" * 100_000


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


FOREIGN: dict[str, dict[str, object]] = {
    "FIFO": {"rounds.jsonl": os.mkfifo},
    "device": {"rounds.jsonl": link_to_zeros},
    "sparse": {"rounds.jsonl": make_sparse},
    "deep rounds": {"rounds.jsonl": '{"x": ' + DEEP + ', "metrics": null}\n'},
    "odd rounds": {"rounds.jsonl": '{"metrics": null, "evaluation": 7}\n'},
    "huge numbers": {"rounds.jsonl": folders.format_line(attempt(2**70))},
    "odd inputs": {"run.json": '{"simulation": [1]}'},
    "odd rounds of inputs": {"run.json": '{"simulation": {"rounds": "many"}}'},
    "deep inputs": {"run.json": '{"simulation": {"a": ' + DEEP + "}}"},
    "no table": {"run.json": "[]"},
    "odd status": {"results.json": '{"status": "\\ud800"}'},
    "deep results": {"results.json": DEEP},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_folder_of_a_stranger_gives_one_error(run: Path, kind: str) -> None:
    """It neither hangs nor fills memory, and its error is a sentence."""
    for name, content in FOREIGN[kind].items():
        (run / name).unlink(missing_ok=True)
        if callable(content):
            content(run / name)
        else:
            (run / name).write_text(str(content))

    def show() -> None:
        source = RunFolderSource(run)
        source.page(admin_pb2.ListRoundsRequest(all_attempts=True))
        source.show_job("run")
        source.page(admin_pb2.ListJobsRequest())

    with pytest.raises(DataError, match=str(run)):
        show()
