"""Profiles, the settings that replace them, and the commands about operators."""

from __future__ import annotations

import json
import pwd
import stat
from pathlib import Path

import pytest
import typer
from click.testing import Result

from fedplat.admin import AdminClient, profile
from fedplat.admin.patience import Patience
from fedplat.admin.profile import Profile
from fedplat.cli import lists, operators
from fedplat.cli.app import app
from fedplat.cli.output import Output, OutputFormat
from fedplat.cli.session import CommandSession, Settings
from fedplat.errors import ProfileError
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import TOKEN, Run, parsed
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.runner import CliRunner

PEM = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command with only the given environment."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(app, list(arguments), env=environment)

    return run


def test_a_profile_comes_back_and_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.toml"
    written = Profile('h"o\\st:1', "fedplat_op_x", PEM, insecure=True)
    profile.save(written, path)
    assert profile.load(path) == Profile('h"o\\st:1', "fedplat_op_x", PEM + "\n", insecure=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ProfileError, match="exists already"):
        profile.save(written, path)
    assert [one.name for one in path.parent.iterdir()] == ["profile.toml"]
    assert "fedplat_op_x" not in repr(written)


@pytest.mark.parametrize("text", ["token = 1", "what = 'x'", "server = ", b"\xff"])
def test_what_is_no_profile(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError, match="is not valid"):
        profile.load(path)


@pytest.mark.parametrize("text", ["", 'token = "from the file"\n'])
def test_a_profile_without_a_server_is_not_for_the_default_address(
    bare: Run, server: FakeServer, state: State, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text + "insecure = true\n" * bool(text))
    refused = bare("--profile", str(path), "status")
    assert (refused.exit_code, refused.stderr.count("\n"), state.tokens) == (2, 1, [])
    assert f"the profile {path} names no server: add the line server = " in refused.stderr
    if text:
        assert bare("--profile", str(path), "--server", server.address, "status").exit_code == 0
        assert state.tokens == ["Bearer from the file"]


def test_without_a_profile_a_command_says_where_one_comes_from(bare: Run, tmp_path: Path) -> None:
    result = bare("status")
    assert result.exit_code == 4
    assert str(tmp_path / "config" / "fedplat" / "profile.toml") in result.stderr
    assert "fedplat-server init" in result.stderr
    assert result.stderr.count("\n") == 1
    missing = bare("--profile", str(tmp_path / "none.toml"), "status")
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("content", [None, "no certificate", b"\xff\xfe"])
def test_certificates_that_cannot_be_used(bare: Run, content: str | bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = bare("--ca", str(path), "status", FEDPLAT_TOKEN="t")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert str(path) in result.stderr


def test_the_default_profile_is_used_and_the_environment_stands_above_it(
    bare: Run, server: FakeServer, state: State, tmp_path: Path
) -> None:
    profile.save(Profile(server.address, "from the profile", insecure=True), tmp_path / "config/fedplat/profile.toml")
    assert bare("status").exit_code == 0
    assert bare("status", FEDPLAT_TOKEN="from the environment").exit_code == 0
    assert state.tokens == ["Bearer from the profile", "Bearer from the environment"]
    other = tmp_path / "other.toml"
    profile.save(Profile("localhost:1", "from another", insecure=True), other)
    assert bare("job", "list", "--server", server.address, FEDPLAT_PROFILE=str(other)).exit_code == 0
    assert state.tokens[-1] == "Bearer from another"


def test_no_option_takes_a_token(bare: Run) -> None:
    for command in (("--help",), ("status", "--help"), ("operator", "add", "--help")):
        assert "--token" not in bare(*command).stdout


def test_an_operator_is_added_with_a_profile_of_its_own(run: Run, server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "ben.toml"
    result = run("operator", "add", "ben", "--role", "viewer", "--expires", "90d", "--to", str(path))
    assert result.exit_code == 0
    assert TOKEN not in result.output
    assert profile.load(path) == Profile(server.address, "token of ben", insecure=True)
    assert run("operator", "add", "eve", "--role", "viewer").stdout == (
        f'server = "{server.address}"\ntoken = "token of eve"\ninsecure = true\n'
    )
    listed = parsed(run("operator", "list", "--json"))
    assert [(one["name"], one["role"], one["expires_unix_s"]) for one in listed] == [
        ("ben", "viewer", 90 * 86_400.0),
        ("eve", "viewer", 0.0),
    ]
    assert run("operator", "remove", "ben").exit_code == 0
    assert "ben" not in run("operator", "list").stdout
    again = run("operator", "add", "x", "--role", "viewer", "--to", str(path))
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


@pytest.mark.parametrize("text", ["90", "d", "0d", "-1d", "1y", "9999999d"])
def test_times_that_cannot_be_read(run: Run, text: str) -> None:
    assert "such as 24h or 90d" in run("operator", "add", "x", "--role", "viewer", "--expires", text).stderr


def test_the_audit_log_is_shown_to_its_end(run: Run, state: State) -> None:
    state.audit = [
        admin_pb2.AuditEvent(
            sequence=n, unix_s=1.7e9, actor="anna", action="job paused", subject=f"j-{n}", details="{}"
        )
        for n in range(1, 6)
    ]
    state.audit[4].details = '{"a":"\\u001b[31m"}'
    head, *lines = run("audit").stdout.splitlines()
    assert head.split() == ["ROW", "TIME", "ACTOR", "ACTION", "SUBJECT", "DETAILS"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert lines[0].endswith("  anna   job paused  j-1")
    rows = [json.loads(line) for line in run("audit", "--after", "3", "--json").stdout.splitlines()]
    assert [row["sequence"] for row in rows] == [4, 5]


@pytest.mark.parametrize("form", [OutputFormat.TABLE, OutputFormat.JSONL])
def test_new_rows_of_the_audit_log_are_shown_once_over_a_restart(
    form: OutputFormat,
    state: State,
    server: FakeServer,
    client: AdminClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add(count: int) -> None:
        for _ in range(count):
            state.audit.append(admin_pb2.AuditEvent(sequence=len(state.audit) + 1, actor="anna", details="{}"))

    steps = iter([lambda: add(60), lambda: None, lambda: (server.restart(), add(1))])

    def pause(seconds: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    add(55)
    monkeypatch.setattr("support.cli.fake_admin.ROWS_OF_A_PAGE", 7)
    command = CommandSession(client, Output(form=form), Patience(60.0, print))
    query = lists.Query[admin_pb2.AuditEvent](
        client.page, admin_pb2.ListAuditRequest(actor="anna"), lambda page: page.events, "", lists.Order.NEWEST_LAST
    )
    with pytest.raises(typer.Exit):
        lists.follow(command, query, operators.AUDIT_LAYOUT, operators.continue_after, pause=pause)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("waiting", "  ROW", "ROW"))]
    numbers = [json.loads(line)["sequence"] if form is OutputFormat.JSONL else int(line.split()[0]) for line in lines]
    assert numbers == list(range(1 if form is OutputFormat.JSONL else 6, 117))


def test_a_list_is_followed_in_lines_only(run: Run) -> None:
    for words in (("audit", "-f", "-o", "json"), ("events", "-f", "-o", "json"), ("audit", "-f", "--watch")):
        refused = run(*words)
        assert (refused.exit_code, "--follow prints" in refused.stderr) == (2, True)


def test_lists_that_have_no_pages_have_the_limit(run: Run) -> None:
    for name in ("ben", "eve"):
        run("operator", "add", name, "--role", "viewer")
    cut = run("operator", "list", "-n", "1")
    assert (cut.stdout.count("\n"), cut.stderr) == (2, "1 of 2; --limit 0 for all\n")
    assert run("operator", "list", "-n", "1", "-o", "name").output == "ben\n"


def test_status_describes_the_connection(run: Run, state: State) -> None:
    assert "TLS, the server's certificate expires in 30 days" in run("status").stdout
    state.insecure = True
    assert "WITHOUT TLS" in run("status").stdout


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_user(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "FEDPLAT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find_no_user)
    with pytest.raises(ProfileError, match=r"no home directory: name a file with --profile"):
        Settings().resolve(None)
    monkeypatch.setenv("FEDPLAT_TOKEN", "fedplat_op_x")  # all that is needed
    assert Settings(server="one:1").resolve(None).server == "one:1"
