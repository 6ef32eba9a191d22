"""`fedplat enrollment ...` and `fedplat client revoke`."""

from __future__ import annotations

import pytest

from support.cli.commands import Run, parsed
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State


def test_create_prints_the_ticket_and_nothing_else(run: Run, state: State, server: FakeServer) -> None:
    result = run("enrollment", "create", "--population", "demo", "--uses", "3", "--expires", "90m")
    assert result.stdout == "fpt1.secret\n"
    assert "for 3 clients, valid for 90m" in result.stderr
    assert "fedplat enrollment revoke e-1" in result.stderr
    assert state.asked is not None
    assert (state.asked.population, state.asked.num_uses, state.asked.expires_s) == ("demo", 3, 5400.0)
    assert state.asked.address == server.address
    made = parsed(run("enrollment", "create", "--population", "p", "--address", "fed.example.org:443", "--json"))
    assert (made["ticket"], made["enrollment"]["num_left"]) == ("fpt1.secret", 1)
    assert (state.asked.address, state.asked.expires_s) == ("fed.example.org:443", 86_400.0)


@pytest.mark.parametrize("given", ["", "24", "h", "-1h", "0h", "1h30", "9999999h"])
def test_a_duration_that_cannot_be_read_is_named(run: Run, state: State, given: str) -> None:
    result = run("enrollment", "create", "--population", "demo", "--expires", given)
    assert result.exit_code == 2
    assert f"--expires {given!r}: expected a number and s, m, h, d or w" in result.stderr
    assert state.asked is None


def test_list_shows_what_is_left_and_no_secret(run: Run) -> None:
    assert run("enrollment", "list").stderr == "there are no enrollment tokens\n"
    run("enrollment", "create", "--population", "demo", "--uses", "3")
    listed = run("enrollment", "list")
    assert listed.stdout.splitlines()[1].split()[:5] == ["e-1", "demo", "open", "3", "3"]
    assert "secret" not in listed.output
    assert parsed(run("enrollment", "list", "--json"))[0]["num_left"] == 3


def test_revoking(run: Run) -> None:
    assert run("enrollment", "revoke", "e-1").stdout == "e-1 is revoked\n"
    assert parsed(run("enrollment", "revoke", "e-1", "--json"))["state"] == "revoked"
    result = run("client", "revoke", "c-1")
    assert result.stdout == "c-1 is revoked\n"
    assert "fedplat enrollment revoke e-1" in result.stderr
    assert parsed(run("client", "revoke", "c-1", "--json"))["state"] == "revoked"


def test_revoking_a_ticket_with_its_clients_continues_to_the_last_page(run: Run, state: State) -> None:
    result = run("enrollment", "revoke", "e-1", "--with-clients")
    assert result.stdout == "e-1 is revoked\n"
    assert result.stderr == "clients that enrolled with it, all revoked now: 3\n"
    assert state.pages == ["", "1", "2"]
