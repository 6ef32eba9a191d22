"""Long lists: commands follow the server's pages, print rows as they come, and stop at `--limit`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest

from fedplat.admin import AdminClient
from fedplat.wire.v1 import admin_pb2, events_pb2
from support.cli.commands import Run, parsed
from support.cli.fake_state import T0, State


def add_rounds(state: State, count: int) -> None:
    state.add_job()
    state.rounds = [
        admin_pb2.Round(round=n, attempt=1, phase=admin_pb2.ATTEMPT_PHASE_COMMITTED, opened_unix_s=T0, seconds=1.0)
        for n in range(1, count + 1)
    ]


@pytest.mark.slow
@pytest.mark.fault("F47")
def test_a_long_table_is_printed_in_parts_with_one_head(run: Run, state: State):
    add_rounds(state, 2_500)
    head, *rows = run("job", "rounds", "digits", "--limit", "0").stdout.splitlines()
    assert head.split()[:2] == ["ROUND", "TRY"]
    assert [int(row.split()[0]) for row in rows] == list(range(1, 2_501))
    assert {row.index(" committed ") for row in rows} == {head.index(" PHASE ")}


@pytest.mark.fault("F47")
def test_json_is_one_list_over_all_pages(run: Run, state: State):
    add_rounds(state, 5)
    shown = run("job", "rounds", "digits", "--json")
    assert [one["round"] for one in parsed(shown)] == [1, 2, 3, 4, 5]
    assert shown.stdout == json.dumps(parsed(shown)) + "\n"
    state.rounds = []
    assert run("job", "rounds", "digits", "--json").stdout == "[]\n"


def test_a_refusal_prints_no_json(run: Run, state: State):
    state.refusal = (grpc.StatusCode.PERMISSION_DENIED, "no")
    refused = run("job", "list", "--json")
    assert (refused.exit_code, refused.stdout) == (1, "")


@pytest.mark.slow
def test_limits(run: Run, state: State):
    add_rounds(state, 5)
    state.clients = [admin_pb2.Client(client_id=f"c-{n}") for n in range(5)]
    state.enrollments = [admin_pb2.Enrollment(enrollment_id=f"e-{n}") for n in range(5)]
    state.audit = [admin_pb2.AuditEvent(sequence=n, actor="a", action="b") for n in range(1, 6)]
    for n in range(5):
        state.add_version(b"x", n)
        state.add_job(f"job-{n}")
    lists = (
        ("job", "rounds", "digits"),
        ("job", "list"),
        ("model", "list", "digits"),
        ("client", "list"),
        ("enrollment", "list"),
    )
    for words in lists:
        for limit in (1, 2, 3):
            assert len(parsed(run(*words, "--json", "--limit", str(limit)))) == limit
        assert len(run(*words, "--limit", "3").stdout.splitlines()) == 4
        assert run(*words, "--limit", "-1").exit_code == 2
    assert len(run("audit", "--limit", "3").stdout.splitlines()) == 4
    assert len(run("audit", "--after", "1").stdout.splitlines()) == 5


def test_a_page_is_not_asked_for_before_it_is_needed(client: AdminClient, state: State):
    add_rounds(state, 5)
    rounds = client.iter_rounds("digits")
    assert not state.tokens
    assert next(rounds).round == 1
    assert len(state.tokens) == 1
    assert len(client.list_rounds("digits")) == 5


def test_deliveries_of_webhooks_are_limited_in_tables_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [events_pb2.Delivery(webhook_id=f"w-{number}", state="delivered") for number in range(120)]

    def iter_deliveries(client: AdminClient, limit: int | None = None, **filters: str) -> Iterator[events_pb2.Delivery]:
        return iter(made[:limit])

    monkeypatch.setattr(AdminClient, "iter_deliveries", iter_deliveries)
    table = run("webhook", "deliveries")
    assert (len(table.stdout.splitlines()), table.stderr) == (51, "50 rows, and there are more; --limit 0 for all\n")
    assert len(parsed(run("webhook", "deliveries", "--json"))) == 120
    assert len(parsed(run("webhook", "deliveries", "--json", "--limit", "7"))) == 7
    everything = run("webhook", "deliveries", "--limit", "0")
    assert (len(everything.stdout.splitlines()), everything.stderr) == (121, "")
