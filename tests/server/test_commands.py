"""`fedplat-server init`, `operator` and `certificates`: what they make, what they keep, what they print."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from cryptography import x509

from fedplat.admin import profile
from fedplat_server.auth import pki_folder
from fedplat_server.auth.tls import load, utc_now
from fedplat_server.cli import commands, init, main
from fedplat_server.cli.options import database_url, with_store
from fedplat_server.config import ServerConfig, TlsFiles, is_postgres
from fedplat_server.errors import ConfigError
from fedplat_server.records.audit import AuditRow, OperatorRecord, hash_token
from fedplat_server.storage import data_dir

COMMAND = str(Path(sys.executable).parent / "fedplat-server")
SECRETS = ("admin.toml", "pki/ca.key", "pki/server.key")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path) -> Run:
    """Runs a command on the data folder, in this process: (exit status, stdout, stderr)."""

    def here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedplat-server", *arguments, "--data-dir", str(data)])
        before, umask = signal.getsignal(signal.SIGTERM), os.umask(0o022)
        with pytest.raises(SystemExit) as caught:
            main.main()
        signal.signal(signal.SIGTERM, before)
        os.umask(umask)
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return here


def files_of(data: Path) -> dict[str, bytes]:
    names = (*SECRETS, "pki/ca.pem", "pki/server.pem")
    return {name: (data / name).read_bytes() for name in names}


def operators_of(data: Path) -> list[OperatorRecord]:
    return with_store(database_url(data, None), lambda store: store.operators.list_operators())


def audit_of(data: Path) -> list[AuditRow]:
    return with_store(database_url(data, None), lambda store: store.audit.list_rows())


def is_complete(data: Path) -> None:
    """The files that a server needs to start, and the admin to use it, exist and fit together."""
    load(pki_folder.PkiFolder.of(data).files, utc_now())
    token = profile.load(data / "admin.toml").token
    found = with_store(database_url(data, None), lambda store: store.operators.find_operator(hash_token(token)))
    assert found is not None
    assert (found.name, found.role) == ("admin", "admin")
    for name in SECRETS:
        assert stat.S_IMODE((data / name).stat().st_mode) == 0o600, name


def line_of(result: tuple[int, str, str], status: int) -> str:
    """The one line that a failing command prints."""
    code, out, err = result
    assert (code, out, err.count("\n")) == (status, "", 1), result
    assert err.startswith("fedplat-server: ")
    return err


# --- init ------------------------------------------------------------------------------------------------------------


def test_init_makes_all_and_repeated_it_keeps_all(run: Run, data: Path) -> None:
    status, out, err = run("init", "--host", "fed.example.org", "--host", "10.0.0.7")
    assert (status, err) == (0, "")
    is_complete(data)
    assert profile.load(data / "admin.toml").server == "fed.example.org:7443"
    assert f"fedplat --profile {data / 'admin.toml'} status" in out
    before = files_of(data)
    status, out, err = run("init", "--host", "fed.example.org")
    assert (status, err, "made" in out) == (0, "", False)
    assert files_of(data) == before
    assert [one.name for one in operators_of(data)] == ["admin"]
    assert [row.action for row in audit_of(data)].count("operator added") == 1


@pytest.mark.parametrize(
    ("missing", "made"),
    [
        (["pki/server.pem"], "server certificate"),
        (["pki/server.key"], "server certificate"),
        (["pki/server.pem", "pki/server.key"], "server certificate"),
        (["fedplat.sqlite"], "database"),
        (["admin.toml", "fedplat.sqlite"], "operator admin"),
    ],
)
def test_init_completes_what_is_missing(run: Run, data: Path, missing: list[str], made: str) -> None:
    run("init")
    before = files_of(data)
    for name in missing:
        (data / name).unlink()
    status, out, err = run("init")
    assert (status, err) == (0, "")
    assert f"made the {made}" in out
    is_complete(data)
    for name, content in files_of(data).items():
        assert content == before[name] or name in missing or name.startswith("pki/server."), name


def test_init_replaces_no_operator_whose_profile_was_taken_away(run: Run, data: Path) -> None:
    """The profile belongs on the operator's machine."""
    run("init")
    (data / "admin.toml").rename(data / "elsewhere.toml")
    status, out, _ = run("init")
    assert status == 0
    assert "kept the operator admin; its profile is in another file" in out
    assert "status" not in out, "there is no profile to name"
    assert not (data / "admin.toml").exists()


def test_init_refuses_a_profile_of_another_database(run: Run, data: Path) -> None:
    run("init")
    foreign = profile.Profile(token="fedplat_op_" + "x" * 43)
    (data / "admin.toml").unlink()
    profile.save(foreign, data / "admin.toml")
    status, _, err = run("init")
    assert (status, err.count("\n")) == (2, 1)
    assert "belongs to no operator in this database" in err


def test_init_reports_a_certificate_for_another_host(run: Run) -> None:
    run("init", "--host", "one.example.org")
    status, _, err = run("init", "--host", "two.example.org")
    assert (status, err.count("\n")) == (2, 1)
    assert "certificates renew" in err
    assert "--host one.example.org --host two.example.org" in err


KILLED = """
import os, signal, sys
from fedplat_server.auth import pki_folder
from fedplat_server.cli import commands, init, main
from fedplat.admin import profile
from fedplat_server.database import schema

data, num_steps = sys.argv[1], int(sys.argv[2])
left, ended = 0, []

def deadly(module, name):
    real = getattr(module, name)
    def step(*arguments, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*arguments, **options)
    setattr(module, name, step)

deadly(pki_folder, "replace")
deadly(profile, "save")
deadly(schema, "upgrade")
deadly(init, "add_operator_to")
for left in range(num_steps):
    place, child = f"{data}-{left}", os.fork()
    if child == 0:
        sys.argv = ["fedplat-server", "init", "--data-dir", place]
        main.main()
        os._exit(0)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert ended == [-signal.SIGKILL] * num_steps, ended
"""


@pytest.mark.slow
def test_init_that_was_killed_can_be_repeated(run: Run, data: Path) -> None:
    """Killed before each of its durable steps: four files, the database, the profile, the operator."""
    num_steps = 7
    command = [sys.executable, "-c", KILLED, str(data), str(num_steps)]  # forks them: to import takes longest
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for step in range(num_steps):
        Path(f"{data}-{step}").rename(data)
        status, _, err = run("init")
        assert (status, err) == (0, "")
        is_complete(data)
        shutil.rmtree(data)


@pytest.mark.parametrize("host", ["", "a b", "host:1", "http://host"])
def test_init_with_a_host_that_cannot_be_makes_nothing(run: Run, data: Path, host: str) -> None:
    assert "expected a host name or an address" in line_of(run("init", "--host", host), 2)
    assert not (data / "pki").exists()


# --- operators -------------------------------------------------------------------------------------------------------


def test_an_operator_is_added_listed_and_removed(run: Run, data: Path, tmp_path: Path) -> None:
    run("init")
    out_file = tmp_path / "ben.toml"
    status, out, err = run("operator", "add", "ben", "--role", "viewer", "--expires", "90d", "--to", str(out_file))
    token = profile.load(out_file).token
    assert (status, err, token in out) == (0, "", False)
    assert stat.S_IMODE(out_file.stat().st_mode) == 0o600
    status, listed, _ = run("operator", "list")
    assert (status, token in listed) == (0, False)
    assert any(line.startswith("ben") and "viewer" in line and "expires" in line for line in listed.splitlines())
    assert run("operator", "remove", "ben") == (0, "operator ben was removed\n", "")
    assert [(one["name"], one["role"]) for one in json.loads(run("operator", "list", "--json")[1])] == [
        ("admin", "admin")
    ]
    assert [(row.actor, row.action, row.subject) for row in audit_of(data)][-2:] == [
        ("host", "operator added", "ben"),
        ("host", "operator removed", "ben"),
    ]
    left = f"no admin is left; add one with: fedplat-server operator add NAME --role admin --data-dir {data}\n"
    assert run("operator", "remove", "admin") == (0, f"operator admin was removed\n{left}", "")


def test_a_profile_on_stdout_is_all_that_is_printed(run: Run, data: Path) -> None:
    run("init")
    _, out, _ = run("operator", "add", "ben", "--role", "operator", "--server", "fed.example.org:7443")
    (data / "ben.toml").write_text(out)
    made = profile.load(data / "ben.toml")
    assert made.server == "fed.example.org:7443"
    assert x509.load_pem_x509_certificates(made.ca.encode())


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("add", "ben", "--role", "root"), "expected viewer, operator, admin", 2),
        (("add", "a b", "--role", "viewer"), "operator name", 2),
        (("add", "", "--role", "viewer"), "operator name", 2),
        (("add", "ben", "--role", "viewer", "--expires", "soon"), "--expires 'soon': expected", 2),
        (("add", "admin", "--role", "viewer"), "admin", 1),
        (("remove", "nobody"), "nobody", 1),
    ],
)
def test_wrong_arguments_for_operators(run: Run, data: Path, arguments: list[str], said: str, status: int) -> None:
    run("init")
    assert said in line_of(run("operator", *arguments), status)
    assert [one.name for one in operators_of(data)] == ["admin"]


def test_an_operator_whose_profile_cannot_be_written_is_not_made(run: Run, data: Path, tmp_path: Path) -> None:
    """Otherwise its name would be taken, and its token lost."""
    run("init")
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "ben.toml")
    assert "cannot be written" in line_of(run("operator", "add", "ben", "--role", "viewer", "--to", where), 2)
    taken = tmp_path / "taken.toml"
    taken.write_text("")
    assert "exists already" in line_of(run("operator", "add", "ben", "--role", "viewer", "--to", str(taken)), 2)
    free = tmp_path / "free.toml"
    line_of(run("operator", "add", "admin", "--role", "viewer", "--to", str(free)), 1)
    assert not free.exists()
    assert [one.name for one in operators_of(data)] == ["admin"]


def test_operators_need_a_database(run: Run, data: Path) -> None:
    data.mkdir()
    assert "db upgrade" in line_of(run("operator", "list"), 1)
    assert "db upgrade" in line_of(run("operator", "add", "ben", "--role", "viewer"), 1)


# --- certificates ----------------------------------------------------------------------------------------------------


def test_certificates_are_shown_and_renewed(run: Run, data: Path) -> None:
    run("init", "--host", "fed.example.org")
    status, shown, err = run("certificates", "show")
    assert (status, err) == (0, "")
    assert [line.split(":")[0] for line in shown.splitlines()] == ["server", "trusted"]
    assert "fed.example.org" in shown
    before = files_of(data)
    assert run("certificates", "renew")[0] == 0
    after = files_of(data)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"pki/server.pem", "pki/server.key"}
    is_complete(data)
    assert "fed.example.org" in run("certificates", "show")[1]
    run("certificates", "renew", "--host", "two.example.org")
    shown = run("certificates", "show")[1]
    assert ("two.example.org" in shown, "fed.example.org" in shown) == (True, False)
    assert [row.subject for row in audit_of(data) if row.action == "certificates changed"] == ["init", "renew", "renew"]


@pytest.mark.parametrize(
    ("host", "url", "options"),
    [
        (None, "postgresql://db/fed", "--listen 127.0.0.1:7443"),
        (["fed.example.org", "10.0.0.7"], "fedplat.sqlite", "--listen 0.0.0.0:7443"),
        (["fed.example.org"], "postgresql://db/fed", "--listen 0.0.0.0:7443 --advertise fed.example.org:7443"),
        (["2001:db8::7"], "postgresql://db/fed", "--listen 0.0.0.0:7443 --advertise [2001:db8::7]:7443"),
    ],
)
def test_the_command_after_init_is_one_that_run_accepts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: list[str] | None, url: str, options: str
) -> None:
    """A daemon of a PostgreSQL needs an address at which the others reach it."""
    monkeypatch.chdir(tmp_path)
    assert init.start_command(host, 7443, url) == f"fedplat-server run {options}"
    assert run("init", *([] if is_postgres(url) else ["--database", url]))[0] == 0
    monkeypatch.setattr(commands, "serve", Mock())
    assert run("run", *options.split(), "--database", url)[0] == 0


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ((), ""),
        (("--database", "other.sqlite"), " --database FOLDER/other.sqlite"),
        (("--database", "@url"), " --database @FOLDER/url"),
        (("--database", "postgresql://me:hunter2@db/fed"), " --database @FILE"),
    ],
    ids=["the default", "a file", "a file with a URL", "a password"],
)
def test_a_daemon_knows_the_options_that_find_its_data(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], place: str
) -> None:
    """Its alerts have commands, which are typed in other folders than the daemon's."""
    monkeypatch.chdir(data.parent)
    assert run("init", *(options if "other.sqlite" in options else ()))[0] == 0
    configs: list[ServerConfig] = []

    def serve(config: ServerConfig, *_: object, **__: object) -> None:
        configs.append(config)

    monkeypatch.setattr(commands, "serve", serve)
    Path("url").write_text("postgresql://me:hunter2@db/fed")
    run("run", *options)
    expected = f" --data-dir {data}" + place.replace("FOLDER", str(data.parent))
    (config,) = configs
    assert config.place == config.prune_options == expected
    assert config.tls is not None
    assert config.tls.renewal == f"fedplat-server certificates renew{expected}"


@pytest.mark.parametrize("command", ["show", "renew", "rotate-ca"])
def test_certificates_that_are_not_there(run: Run, command: str, data: Path) -> None:
    said = line_of(run("certificates", command), 2)
    assert f"check --data-dir, or create it: fedplat-server init --data-dir {data}\n" in said
    assert not data.exists()


@pytest.mark.parametrize("command", [("renew",), ("rotate-ca",)])
def test_certificates_are_not_changed_without_their_database(run: Run, command: tuple[str, ...], data: Path) -> None:
    """Else the change would be refused and done, and missing in the audit log."""
    run("init")
    before = files_of(data)
    (data / "fedplat.sqlite").rename(data.parent / "moved.sqlite")
    assert "is empty" in line_of(run("certificates", *command), 1)
    assert files_of(data) == before


@pytest.mark.parametrize("command", ["db current", "operator list", "operator add x --role viewer", "run --insecure"])
def test_a_folder_that_is_not_there_is_not_made_by_a_command_that_needs_it(run: Run, command: str, data: Path) -> None:
    said = line_of(run(*command.split()), 2)
    assert f"set --data-dir to that of the daemon, or make it: fedplat-server init --data-dir {data}\n" in said
    assert not data.exists()


@pytest.mark.slow
def test_the_first_operators_profile_follows_the_authority(run: Run, data: Path) -> None:
    run("init")
    first = profile.load(data / "admin.toml")
    for step in ([], ["--finish"]):
        assert run("certificates", "rotate-ca", *step)[0] == 0
        followed = profile.load(data / "admin.toml")
        assert followed.ca.strip() == (data / "pki" / "ca.pem").read_text().strip()
        assert (followed.server, followed.token) == (first.server, first.token)
    assert first.ca.strip() not in followed.ca
    own = msgspec.structs.replace(followed, ca=first.ca)
    profile.save(own, data / "admin.toml", overwrite=True)
    assert run("certificates", "rotate-ca")[0] == 0
    assert profile.load(data / "admin.toml") == own  # it trusted something else


@pytest.mark.slow
def test_prune_beside_a_daemon_is_refused_as_a_failure_that_passes(run: Run, data: Path) -> None:
    run("init")
    with data_dir.lock_data_dir(data, shared=True):
        said = line_of(run("prune", "--yes"), 1)
    assert f"a fedplat-server is running on {data}" in said
    assert run("prune", "--yes")[0] == 0


def test_another_profile_has_the_address_of_the_first_one(run: Run, data: Path, tmp_path: Path) -> None:
    run("init", "--host", "fed.example.org", "--port", "7000")
    assert run("operator", "add", "ben", "--role", "viewer", "--to", str(tmp_path / "ben.toml"))[0] == 0
    assert profile.load(tmp_path / "ben.toml").server == "fed.example.org:7000"


def test_a_database_that_cannot_be_opened_names_the_reason(run: Run, data: Path) -> None:
    """Without a traceback of the driver's thread, which outlives the command."""
    (data / "fedplat.sqlite").mkdir(parents=True)
    for command in ("init", "verify", "db current"):
        said = line_of(run(*command.split()), 1)
        assert "fedplat.sqlite cannot be opened (Is a directory): let the user of the server read and write it" in said


def test_wrong_arguments_for_certificates(run: Run, data: Path) -> None:
    run("init")
    before = files_of(data)
    assert "expected a host name" in line_of(run("certificates", "renew", "--host", "a b"), 2)
    assert f"begin with: fedplat-server certificates rotate-ca --data-dir {data}\n" in line_of(
        run("certificates", "rotate-ca", "--finish"), 2
    )
    (data / "pki" / "ca.key").write_text("rubbish")
    assert "the certificate authority" in line_of(run("certificates", "renew"), 2)
    after = files_of(data)
    assert {name for name in before if before[name] != after[name]} == {"pki/ca.key"}


def test_wrong_paths_and_names_are_one_sentence_and_leave_nothing(run: Run, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no certificate")
    assert run("init", "--host", "not a host")[0::2] == (
        2,
        "fedplat-server: --host 'not a host': expected a host name or an address, without a port\n",
    )
    assert not data.exists()
    data.mkdir()
    own = ["--tls-certificate", str(file), "--tls-key", str(file)]
    for option in ("--blobs", "--spool"):
        code, _, err = run("run", "--listen", "127.0.0.1:0", *own, option, str(file))
        assert (code, err) == (2, f"fedplat-server: {option} {file} is a file; expected a folder\n")
    with pytest.raises(
        ConfigError, match=f"^{file} holds no certificates in PEM; expected -----BEGIN CERTIFICATE-----"
    ):
        load(TlsFiles(file, file, None, renewal=""), utc_now())
    shutil.rmtree(data, ignore_errors=True)
    data.touch()
    assert run("init")[0::2] == (
        2,
        f"fedplat-server: the data folder {data} cannot be made: File exists; choose another folder with --data-dir\n",
    )


def test_an_output_that_cannot_be_written_gives_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "metrics", "rules"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "fedplat-server: the output cannot be written: No space left on device\n",
    )
