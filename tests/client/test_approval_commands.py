"""The commands with which an owner decides which jobs run, without a server and with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedplat.job import canonical_text, digest_job, parse_job
from fedplat.wire.v1 import fleet_pb2
from fedplat_client.commands import main
from support.fake_fleet import FakeFleet

SPEC = parse_job(
    'name = "digits"\npopulation = "demo"\ntrainer = "digits"\nrounds = 3\n'
    '[model]\ninitial = "m:f"\n[selection]\ngoal = 1\n'
)
INITIAL = "ab" * 32
TEXT, DIGEST = canonical_text(SPEC), digest_job(SPEC, INITIAL)


@pytest.fixture
def command(fleet: FakeFleet, tmp_path: Path) -> Callable[..., str]:
    """Run a command of a client without a server; return what it prints."""
    ticket = tmp_path / "ticket"
    ticket.write_text(fleet.ticket.to_text())
    where = ["--ticket-file", str(ticket), "--data-dir", str(tmp_path / "site")]

    def run(name: str, *arguments: str, fails: bool = False) -> str:
        result = CliRunner().invoke(main, [name, *where, *arguments])
        assert (result.exit_code != 0) is fails, result.output
        return result.output

    return run


@pytest.mark.slow
def test_an_owner_reviews_and_decides(fleet: FakeFleet, command: Callable[..., str]) -> None:
    digest = DIGEST
    job = fleet_pb2.ReviewedJob(
        digest=digest,
        job_id="j-1",
        name="digits",
        submitter="a\x1b[2J",
        job_file=TEXT,
        initial_digest=INITIAL,
    )
    forged = fleet_pb2.ReviewedJob(digest="cd" * 32, job_file=TEXT, initial_digest=INITIAL)
    fleet.jobs += [job, forged]
    (listed,) = [line for line in command("review").splitlines() if line.startswith(digest[:16])]
    assert "waits    digits by a\\x1b[2J: not approved yet" in listed
    assert "cdcdcdcd" not in command("review", "--offline")
    shown = command("review", digest[:8], "--offline")
    assert "who sees it        the server, and with it its operator, each update by itself" in shown
    assert command("review", digest, "--offline", "--file") == TEXT
    assert command("approve", digest[:8], "--max-rounds", "2") == f"approved: digits ({digest[:16]})\n"
    assert command("approve", "ef" * 32, "--until", "2999-01-01").startswith("approved: a job that its server has not")
    facts = json.loads(command("review", digest, "--json", "--offline"))
    assert (facts["verdict"], facts["submitter"], facts["policy"]) == ("allow", "a\x1b[2J", [])
    command("revoke", digest[:8], "--reason", "over")
    lines = command("approvals").splitlines()
    assert [line.split("  ")[0] for line in lines] == [digest[:16], "ef" * 8]
    assert lines[0].endswith("revoked: over")
    assert lines[1].endswith("approved, until 2999-01-01")
    assert json.loads(command("approvals", "--json"))["counter"] == 3
    assert "3 lines, unchanged" in command("released", "--verify")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["approve", "xyz"], "'xyz' is no digest; expected 64 hexadecimal digits"),
        (["approve", "12345678"], "no job that this client knows begins with 12345678"),
        (["approve", "ab" * 32, "--until", "2020-01-01"], "--until 2020-01-01 has passed"),
        (["approve", "ab" * 32, "--until", "soon"], "--until 'soon' is no day"),
        (["reject", "ab" * 32, "--reason", "x" * 501], "printable text of at most 500 bytes"),
        (["review", "ab" * 32, "--offline"], "its server has not offered it"),
    ],
)
def test_wrong_arguments_get_a_sentence(command: Callable[..., str], arguments: list[str], text: str) -> None:
    assert text in command(*arguments, fails=True)
