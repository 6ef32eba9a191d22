"""Filters, limits and counts of lists, and lists that are watched."""

from __future__ import annotations

from datetime import datetime

import click
import pytest
import typer

from fedplat.cli import formats, lists
from fedplat.cli.lists import Order, Query, QueryRows
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import FEDPLAT, Run, environment, parsed
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import T0, S, State
from support.cli.terminal import Terminal, plain


def add_jobs(state: State, count: int) -> list[str]:
    return [state.add_job(f"job-{number}").job_id for number in range(count)]


def column(text: str, position: int = 1) -> list[str]:
    return [line.split()[position] for line in text.splitlines()[1:]]


def test_a_table_has_fifty_rows_and_counts_the_others(run: Run, state: State):
    ids = add_jobs(state, 53)
    shown = run("job", "list")
    assert column(shown.stdout, 0) == ids[:2:-1]
    assert shown.stderr == "50 of 53; --limit 0 for all\n"
    whole = run("job", "list", "--limit", "0")
    assert (column(whole.stdout, 0), whole.stderr) == (ids[::-1], "")


def test_formats_for_programs_are_whole_and_in_the_order_of_creation(run: Run, state: State):
    ids = add_jobs(state, 53)
    assert [job["job_id"] for job in parsed(run("job", "list", "--json"))] == ids
    latest = run("job", "list", "-o", "name", "--limit", "3")
    assert (latest.stdout.split(), latest.stderr) == (ids[-3:], "")


def test_a_limit_of_a_log_keeps_the_latest_rows_last(run: Run, state: State):
    state.audit = [admin_pb2.AuditEvent(sequence=n, unix_s=T0, actor="anna") for n in range(1, 8)]
    shown = run("audit", "--limit", "3")
    assert column(shown.stdout, 0) == ["5", "6", "7"]
    assert shown.stderr == "3 of 7; --limit 0 for all\n"
    assert column(run("audit", "--limit", "3", "--after", "2").stdout, 0) == ["3", "4", "5"]


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("for_people", [True, False])
@pytest.mark.parametrize("limit", [0, 1, 3, 4, 9])
def test_rows_of_every_order(order: Order, for_people: bool, limit: int):
    """Compared with slices of the list; pages have two rows."""
    stored = [admin_pb2.Job(job_id=str(number)) for number in range(7)]

    def fetch(request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        found = stored[::-1] if request.newest_first else stored
        start = int(request.page_token or 0)
        token = str(start + 2) if start + 2 < len(found) else ""
        return admin_pb2.ListJobsResponse(jobs=found[start : start + 2], next_page_token=token, total=len(found))

    query = Query[admin_pb2.Job](fetch, admin_pb2.ListJobsRequest(), lambda page: page.jobs, "", order)
    rows = QueryRows(query, limit, for_people)
    expected = stored[: limit or None] if order is Order.SERVER else stored[-limit:]
    if order is Order.NEWEST_FIRST and for_people:
        expected = expected[::-1]
    assert [job.job_id for job in rows] == [job.job_id for job in expected]
    assert rows.note() == (f"{limit} of 7; --limit 0 for all" if 0 < limit < 7 else "")
    assert query.request == admin_pb2.ListJobsRequest()


def test_an_older_server_does_not_count(run: Run, state: State):
    add_jobs(state, 5)
    state.counts = False
    assert run("job", "list", "--limit", "3").stderr == "3 rows, and there are more; --limit 0 for all\n"
    assert run("job", "list", "--limit", "5").stderr == ""


def test_filters_of_jobs(run: Run, state: State):
    ids = add_jobs(state, 4)
    state.jobs[ids[1]].status, state.jobs[ids[2]].status = S.JOB_STATUS_PAUSED, S.JOB_STATUS_FAILED
    state.jobs[ids[3]].population = "phones"
    state.jobs[ids[0]].created_unix_s = datetime(2026, 11, 1, 12).timestamp()

    def names(*words: str) -> list[str]:
        return run("job", "list", "-o", "name", *words).stdout.split()

    assert names("--state", "paused", "--status", "FAILED") == ids[1:3]
    assert names("--population", "phones") == [ids[3]]
    assert names("--search", "JOB-2") == [ids[2]]
    assert names("--since", "2026-11-01") == [ids[0]]
    assert names("--since", "2026-11-01T12:01") == []
    assert run("job", "list", "--search", "none").stderr == "no jobs match\n"


def test_filters_of_clients_rounds_and_assignments(run: Run, state: State):
    state.add_job()
    state.clients = [
        admin_pb2.Client(client_id="c-1", state="busy", labels={"region": "eu", "kind": "phone"}),
        admin_pb2.Client(client_id="c-2", state="away", labels={"region": "eu"}),
    ]
    assert run("client", "list", "-o", "name", "--label", "region=eu", "--label", "kind=phone").stdout == "c-1\n"
    assert run("client", "list", "-o", "name", "--state", "away", "--search", "c-").stdout == "c-2\n"
    state.rounds = [
        admin_pb2.Round(round=n, attempt=a, phase=admin_pb2.ATTEMPT_PHASE_ABANDONED) for n in (1, 2) for a in (1, 2)
    ]
    assert len(parsed(run("job", "rounds", "digits", "--round", "2", "--all", "--json"))) == 2
    state.assignments = [
        admin_pb2.AssignmentDetails(job_id=next(iter(state.jobs)), round=n, attempt=1, client_id=f"c-{n}", state=each)
        for n in (1, 2)
        for each in ("FAILED", "MERGED")
    ]
    words = ("job", "assignments", "digits", "--round", "2", "--attempt", "1", "--state", "failed", "--json")
    assert [(one["round"], one["state"]) for one in parsed(run(*words))] == [(2, "FAILED")]
    assert run("client", "assignments", "c-1", "--state", "late").stderr == "there are no such assignments of c-1\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("job", "list", "--state", "x"), "'x' is not one of 'draft', 'running'"),
        (("job", "list", "--since", "7y"), "--since '7y': expected a number and s, m, h, d or w"),
        (("job", "list", "--since", "yesterday"), "expected a duration such as 7d, or a time such as 2026-11-01"),
        (("job", "list", "--limit", "-1"), "-1 is not in the range x>=0"),
        (("client", "list", "--label", "region"), "--label 'region': expected NAME=VALUE"),
        (("client", "list", "--label", "a=1", "--label", "a=2"), "a has two values"),
        (("client", "list", "--state", "asleep"), "'asleep' is not one of 'waiting', 'busy', 'away', 'revoked'"),
        (("job", "rounds", "x", "--round", "0"), "0 is not in the range x>=1"),
        (("job", "list", "--watch"), "--watch needs a terminal as output"),
        (("job", "list", "--watch", "0"), "0 is not in the range"),
        (("job", "list", "--watch", "-o", "json"), "expected --output table or wide, not json"),
    ],
)
def test_wrong_options(words: tuple[str, ...], message: str, run: Run):
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_the_start_of_a_period():
    assert formats.parse_since("") == 0.0
    assert formats.parse_since("90m", now_s=10_000.0) == 10_000.0 - 5400.0
    assert formats.parse_since("1w", now_s=1.0) == 1.0  # 0 would mean all
    assert formats.parse_since("2026-11-01T14:30") == datetime(2026, 11, 1, 14, 30).timestamp()
    with pytest.raises(typer.BadParameter):
        formats.parse_since("0001-01-01")


@pytest.mark.parametrize(
    ("given", "parsed_as"),
    [
        (["--watch"], ["--watch=2"]),
        (["--watch", "digits"], ["--watch=2", "digits"]),
        (["--watch", "5", "digits"], ["--watch", "5", "digits"]),
        (["--watch=7"], ["--watch=7"]),
        (["digits", "--", "--watch"], ["digits", "--", "--watch"]),
    ],
)
def test_the_seconds_of_a_watch_are_optional(given: list[str], parsed_as: list[str]):
    seen: list[list[str]] = []

    class Parent(lists.TyperCommand):
        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            seen.append(list(args))
            return []

    class Command(lists.WatchableCommand, Parent):
        pass

    Command("list").parse_args(typer.Context(Command("list")), given)
    assert seen == [parsed_as]


@pytest.mark.slow
def test_a_watched_list_is_redrawn_and_ctrl_c_leaves_the_last_picture(state: State, server: FakeServer):
    job = state.add_job()
    with Terminal([*FEDPLAT, "job", "list", "--watch", "0.1"], environment(server)) as terminal:
        terminal.read_until(lambda text: "RUNNING" in text)
        job.status = S.JOB_STATUS_PAUSED
        terminal.read_until(lambda text: "PAUSED" in text)
        server.stop()
        terminal.read_until(lambda text: f"waiting for {server.address}: " in text)
        server.restart()
        job.status = S.JOB_STATUS_FAILED
        terminal.read_until(lambda text: "FAILED" in text)
        terminal.interrupt()
        assert terminal.finish() == 130
    last = plain(terminal.text).rstrip().split("JOB ")[-1]
    assert "FAILED" in last
    assert "Traceback" not in terminal.text
