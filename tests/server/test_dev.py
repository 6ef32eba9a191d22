"""`fedplat-server dev`: what it makes, what it keeps, what it prints, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fedplat.admin import contexts, profile
from fedplat.wire.auth import Ticket
from fedplat_server.auth.client_directory import hash_secret
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import load, utc_now
from fedplat_server.cli import main, serving
from fedplat_server.cli.options import database_url, with_store
from fedplat_server.config import ServerConfig
from fedplat_server.database.records import EnrollmentToken
from fedplat_server.records.audit import hash_token
from fedplat_server.storage import data_dir as data_folder
from support import processes

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def profile_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `fedplat` looks for the profile of this user."""
    monkeypatch.delenv("FEDPLAT_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return profile.default_path()


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{processes.free_port()}"


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations of the servers that would run; these tests are about what happens before and after."""
    served: list[ServerConfig] = []

    def serve(config: ServerConfig, log_level: str, json_log: bool | None, on_started: Callable[[], object]) -> None:
        assert (log_level, json_log) == ("WARNING", None)
        served.append(config)
        on_started()

    monkeypatch.setattr(serving, "serve", serve)
    return served


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: Path,
    address: str,
    profile_path: Path,
    configs: list[ServerConfig],
) -> Run:
    """Runs `dev` on the data folder, in this process: (exit status, stdout, stderr)."""
    assert not profile_path.exists()
    assert configs == []

    def here(*arguments: str, where: str = address) -> tuple[int, str, str]:
        command = ["fedplat-server", "dev", "--data-dir", str(data), "--listen", where, *arguments]
        monkeypatch.setattr(sys, "argv", command)
        before, umask = signal.getsignal(signal.SIGTERM), os.umask(0o022)
        with pytest.raises(SystemExit) as caught:
            main.main()
        signal.signal(signal.SIGTERM, before)
        os.umask(umask)
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return here


def ticket_of(data: Path, population: str = "demo") -> Ticket:
    return Ticket.from_text((data / f"{population}.ticket").read_text())


def token_of(data: Path, ticket: Ticket) -> EnrollmentToken:
    found = with_store(
        database_url(data, None), lambda store: store.clients.find_enrollment_token(hash_secret(ticket.secret))
    )
    assert found is not None
    return found


def one_line(done: tuple[int, str, str], status: int) -> str:
    code, out, err = done
    assert (code, out, err.count("\n")) == (status, "", 1), done
    return err


def test_the_first_start_makes_all_and_the_next_keeps_all(
    run: Run, data: Path, address: str, profile_path: Path, configs: list[ServerConfig]
) -> None:
    status, out, err = run()
    assert (status, err, "kept" in out.splitlines()[0]) == (0, "", False)
    assert [(one.listen, one.data_dir, one.tls) for one in configs] == [(address, data, PkiFolder.of(data).files)]
    load(PkiFolder.of(data).files, utc_now())
    installed = profile.load(profile_path)
    assert (installed.server, installed.ca) == (address, (data / "pki" / "ca.pem").read_text().strip() + "\n")
    operator = with_store(
        database_url(data, None), lambda store: store.operators.find_operator(hash_token(installed.token))
    )
    assert operator is not None
    assert (operator.name, operator.role) == ("admin", "admin")
    ticket = ticket_of(data)
    assert (ticket.server, ticket.population, ticket.tls) == (address, "demo", True)
    assert ticket.ca == PkiFolder.of(data).ca.read_text()
    assert token_of(data, ticket).num_left == serving.NUM_TICKET_USES
    for path in (profile_path, data / "demo.ticket"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert f"fedplat-client run --ticket-file {data}/demo.ticket --data-dir client-1 --trainer" in out
    assert "\n  see its status  fedplat status\n" in out
    assert ticket.secret not in out
    assert installed.token not in out

    kept = {path: path.read_bytes() for path in (profile_path, data / "demo.ticket", data / "pki" / "server.pem")}
    status, out, err = run()
    assert (status, err, "made" in out) == (0, "", False)
    assert out.count("kept the") == 6
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_ticket_is_replaced_when_it_is_of_no_use(run: Run, data: Path) -> None:
    run()
    first = ticket_of(data)
    other = f"127.0.0.1:{processes.free_port()}"
    assert "made the ticket for 1000 clients" in run(where=other)[1]
    second = ticket_of(data)
    assert (second.server, second.secret == first.secret) == (other, False)
    token_id = token_of(data, second).token_id
    with_store(database_url(data, None), lambda store: store.clients.revoke_enrollment_token(token_id))
    assert "made the ticket" in run(where=other)[1]
    third = ticket_of(data)
    assert third.secret != second.secret
    (data / "demo.ticket").write_text("rubbish")
    assert "made the ticket" in run(where=other)[1]
    assert "kept the ticket" in run(where=other)[1]
    assert ticket_of(data).http == ""
    http = f"127.0.0.1:{processes.free_port()}"
    assert f"the server is ready at {other} (HTTP/1.1 at {http})" in run("--http-listen", http, where=other)[1]
    assert ticket_of(data).http == http


def test_each_population_has_its_own_ticket(run: Run, data: Path) -> None:
    run()
    run("--population", "phones")
    assert (ticket_of(data).population, ticket_of(data, "phones").population) == ("demo", "phones")
    assert "kept the ticket for 1000 clients of demo" in run()[1]


def test_the_profile_of_another_server_is_kept(run: Run, data: Path, address: str, profile_path: Path) -> None:
    profile_path.parent.mkdir(parents=True)
    profile.save(profile.Profile(server="fed.example.org:7443", token="fedplat_op_" + "x" * 43), profile_path)
    before = profile_path.read_bytes()
    status, out, _ = run()
    command = f"fedplat --profile {data / 'admin.toml'}"
    assert status == 0
    assert f"kept the profile {profile_path}, which is not for this server; use this server with: {command}\n" in out
    assert f"{command} status\n" in out
    assert profile_path.read_bytes() == before
    assert profile.load(data / "admin.toml").server == address


def test_a_profile_that_cannot_be_read_is_kept(run: Run, profile_path: Path) -> None:
    profile_path.parent.mkdir(parents=True)
    profile_path.write_text("server = 1")
    status, out, err = run()
    assert (status, err, "which is not for this server" in out) == (0, "", True)
    assert profile_path.read_text() == "server = 1"


def test_a_profile_with_another_address_is_kept(run: Run, data: Path, address: str, profile_path: Path) -> None:
    run()
    store = contexts.ContextStore(profile_path.parent)
    store.add("elsewhere", profile.Profile("fed.example.org:7443"))
    store.use("elsewhere")
    other = f"127.0.0.1:{processes.free_port()}"
    _, out, _ = run(where=other)
    assert f"address {address}; use this one with: fedplat --context default --server {other}\n" in out
    assert profile.load(profile_path).server == address
    profile_path.unlink()
    profile.save(profile.Profile(token="fedplat_op_" + "x" * 43), profile_path)
    _, out, _ = run(where=other)
    assert f"use this server with: fedplat --profile {data / 'admin.toml'} --server {other}\n" in out


def test_a_lost_profile_is_written_again(run: Run, data: Path, address: str, profile_path: Path) -> None:
    run()
    token = profile.load(profile_path).token
    profile_path.unlink()
    assert f"made the profile of fedplat {profile_path}\n" in run()[1]
    assert profile.load(profile_path).token == token
    (data / "admin.toml").unlink()
    assert run()[0] == 0  # the other one is enough
    profile_path.unlink()
    status, _, err = run()
    assert (status, "neither at" in err, "operator remove admin" in err) == (2, True, True)


def test_the_profile_is_written_where_the_variable_names_it(
    run: Run, tmp_path: Path, profile_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPLAT_PROFILE", str(tmp_path / "mine.toml"))
    run()
    assert profile.load(tmp_path / "mine.toml").token
    assert not profile_path.exists()


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("127.0.0.1:0", "expected a port from 1 to 65535"),
        ("0.0.0.0:7443", "loopback only"),
        ("fed.example.org:7443", "fedplat-server init --host NAME"),
        ("127.0.0.1:99999", "expected HOST:PORT"),
        ("7443", "expected HOST:PORT"),
    ],
)
def test_an_address_that_does_not_fit_makes_nothing(run: Run, data: Path, listen: str, message: str) -> None:
    assert message in one_line(run(where=listen), 2)
    assert not data.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--population", "a b"), "letters, digits"),
        (("--log-level", "LOUD"), "expected DEBUG"),
        (("--http-listen", "0.0.0.0:7444"), "--http-listen 0.0.0.0:7444: this server listens on loopback only"),
    ],
)
def test_wrong_options_make_nothing(run: Run, data: Path, options: list[str], message: str) -> None:
    assert message in one_line(run(*options), 2)
    assert not data.exists()


def test_a_taken_port_is_reported_before_anything_is_made(run: Run, data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        error = one_line(run(where=where), 2)
    assert re.search(rf"cannot listen on {where}: Address already in use; choose another with --listen", error)
    assert not (data / "pki").exists()


def test_a_second_one_at_the_same_time_is_refused(run: Run, data: Path, configs: list[ServerConfig]) -> None:
    with data_folder.lock_data_dir(data, shared=False):
        assert f"another fedplat-server uses {data}; stop it" in one_line(run(), 1)
    assert configs == []


def test_a_folder_of_init_is_used(run: Run, data: Path, profile_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator stays, and the profile gets the address on loopback."""
    monkeypatch.setattr(sys, "argv", ["fedplat-server", "init", "--data-dir", str(data), "--host", "fed.example.org"])
    umask, before = os.umask(0o077), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        main.main()
    os.umask(umask)
    signal.signal(signal.SIGTERM, before)
    made = profile.load(data / "admin.toml")
    assert run()[0] == 0
    installed = profile.load(profile_path)
    assert installed == msgspec.structs.replace(made, server=installed.server)
    assert installed.server.startswith("127.0.0.1:")
