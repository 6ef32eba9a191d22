"""Contexts: profiles by name, which of them a command uses, and the commands about them."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import typer.main
from click.shell_completion import ShellComplete
from click.testing import Result

from fedplat.admin import profile
from fedplat.admin.contexts import ContextStore
from fedplat.admin.profile import Profile
from fedplat.cli.app import app
from fedplat.errors import ProfileError
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.runner import CliRunner

Command = Callable[..., Result]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ContextStore:
    """The contexts of a user who has none."""
    for name in ("FEDPLAT_PROFILE", "FEDPLAT_CONTEXT", "FEDPLAT_TOKEN", "FEDPLAT_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return ContextStore(tmp_path / "config" / "fedplat")


@pytest.fixture
def command(store: ContextStore) -> Command:
    def run(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)

    return run


def fill(store: ContextStore, address: str, *names: str) -> None:
    """Add contexts of a server without TLS, each with its name as the token."""
    for name in names:
        store.add(name, Profile(address, name, insecure=True))


def test_a_command_uses_the_context_that_is_named_nearest_to_it(
    command: Command, store: ContextStore, server: FakeServer, state: State, tmp_path: Path
) -> None:
    fill(store, server.address, "default", "test", "prod")
    profile.save(Profile(server.address, "file", insecure=True), tmp_path / "file.toml")
    file = str(tmp_path / "file.toml")
    assert command("status").exit_code == 0
    assert command("context", "use", "test").stdout == f"context test is in use: {server.address}\n"
    for arguments, environment in [
        ([], {}),
        ([], {"FEDPLAT_CONTEXT": "prod"}),
        (["--context", "default"], {"FEDPLAT_CONTEXT": "prod"}),
        (["--context", "prod"], {"FEDPLAT_PROFILE": file}),
        (["--profile", file], {"FEDPLAT_CONTEXT": "prod"}),
        (["--context", "prod"], {"FEDPLAT_TOKEN": "variable"}),
    ]:
        done = command(*arguments, "status", **environment)
        assert done.exit_code == 0, done.output
    used = [token.removeprefix("Bearer ") for token in state.tokens]
    assert used == ["default", "test", "prod", "default", "prod", "file", "variable"]
    both = command("--profile", file, "--context", "prod", "status")
    assert (both.exit_code, "expected only one of them" in both.stderr) == (2, True)


def test_contexts_are_added_listed_used_and_removed(command: Command, store: ContextStore, tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text('server = "a.example:1"\ntoken = "secret"\n')
    assert command("context", "list").stderr == "there are no contexts; add one with: fedplat context add NAME FILE\n"
    assert "use it with: fedplat context use prod" in command("context", "add", "prod", str(given)).stdout
    piped = command("context", "add", "Test.2", "-", "--use", "--json", stdin=given.read_text())
    path = store.folder / "contexts" / "Test.2.toml"
    expected = {"name": "Test.2", "is_current": True, "server": "a.example:1", "path": str(path), "mistake": ""}
    assert json.loads(piped.stdout) == expected
    assert [stat.S_IMODE(each.stat().st_mode) for each in (store.folder, path.parent, path)] == [0o700, 0o700, 0o600]
    listed = command("context", "list").stdout.splitlines()
    assert [line.split() for line in listed] == [
        ["CURRENT", "NAME", "SERVER"],
        ["*", "Test.2", "a.example:1"],
        ["prod", "a.example:1"],
    ]
    assert command("context", "list", "-o", "name", "-n", "1").stdout == "Test.2\n"
    assert [each["name"] for each in json.loads(command("context", "list", "--json").stdout)] == ["Test.2", "prod"]
    cut = command("context", "list", "--limit", "1")
    assert "1 of 2; --limit 0 for all" in cut.stderr
    assert "secret" not in cut.output + piped.output
    assert "FEDPLAT_CONTEXT is set" in command("context", "use", "prod", FEDPLAT_CONTEXT="x").stderr
    assert command("context", "remove", "prod").stdout == "removed context prod; default is in use\n"
    assert not (store.folder / "contexts" / "prod.toml").exists()
    assert "the context in use, default, does not exist" in command("context", "list").stderr
    missing = command("status")
    assert (missing.exit_code, "other contexts: Test.2;" in missing.stderr) == (4, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prd", "there is no context prd; did you mean prod?"),
        ("nothing", "there is no context nothing; expected one of default, prod"),
        ("../profile", "'../profile' is no name of a context; expected 1 to 63 letters"),
        ("", "'' is no name of a context"),
        ("a\x1b[2J", r"'a\x1b[2J' is no name of a context"),
        ("x" * 64, "is no name of a context"),
    ],
)
def test_names_that_are_not_contexts(command: Command, store: ContextStore, name: str, message: str) -> None:
    fill(store, "a.example:1", "default", "prod")
    for words in (["--context", name, "status"], ["context", "use", name], ["context", "remove", name]):
        refused = command(*words)
        assert (refused.exit_code, refused.stderr.count("\n"), message in refused.stderr) == (2, 1, True)
        assert refused.stderr.isprintable() or refused.stderr.rstrip("\n").isprintable()
    assert store.names() == ["default", "prod"]


def test_profiles_that_cannot_be_added(command: Command, store: ContextStore, tmp_path: Path) -> None:
    fill(store, "a.example:1", "prod")
    for words, stdin, message in [
        (("prod", "-"), 'server = "b:1"', "the context prod exists already"),
        (("new", "-"), "what = 1", "the profile on stdin is not valid"),
        (("new", "-"), "", "the profile on stdin names no server"),
        (("new", "-"), "#" * (profile.MAX_BYTES + 1), "it is larger than 1 MiB"),
        (("new", str(tmp_path / "none")), "", "cannot be read: No such file"),
        (("../new", "-"), "", "is no name of a context"),
    ]:
        refused = command("context", "add", *words, stdin=stdin)
        assert (refused.exit_code, message in refused.stderr) == (2, True), refused.output
    assert store.names() == ["prod"]


def test_what_others_may_have_written_into_the_folder(command: Command, store: ContextStore) -> None:
    fill(store, "a.example:1", "default", "broken", "open")
    folder = store.folder / "contexts"
    (folder / "broken.toml").write_text("server = 1")
    (folder / "open.toml").chmod(0o644)
    (folder / "a\x1b[2J.toml").write_text("")
    done = command("context", "list")
    assert [line.split()[-2:] for line in done.stdout.splitlines()[2:]] == [["broken", "-"], ["open", "a.example:1"]]
    assert "warning: context broken: the profile" in done.stderr
    assert f"warning: context open: other users can read the token: chmod 600 {folder / 'open.toml'}" in done.stderr
    assert command("context", "use", "broken").exit_code == 2
    assert store.current == "default"
    for text in ("../../etc/passwd", "", "x" * 1000, "\udcff"):
        (store.folder / "context").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ProfileError, match="has no name of a context"):
            store.current  # noqa: B018 -- raises
    (store.folder / "context").write_text("gone\n")
    refused = command("status", FEDPLAT_TOKEN="t")
    assert (refused.exit_code, "there is no context gone" in refused.stderr) == (2, True)
    assert command("context", "use", "default").exit_code == 0


def test_names_are_completed(store: ContextStore) -> None:
    fill(store, "a.example:1", "default", "prod", "prod-2")
    root = typer.main.get_command(app)
    assert isinstance(root, click.Command)
    found = ShellComplete(root, {}, "fedplat", "_FEDPLAT_COMPLETE")
    for words in (["context", "use"], ["context", "remove"], ["--context"]):
        items = found.get_completions(words, "prod")
        assert [(item.value, item.help) for item in items] == [("prod", "a.example:1"), ("prod-2", "a.example:1")]
