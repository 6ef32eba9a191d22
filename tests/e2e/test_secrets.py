"""No secret reaches a log, an error or the output of a command, however much is logged."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedplat.admin import profile, submission
from fedplat.cli import app as operator
from fedplat.cli import watch
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import admin_pb2
from fedplat_server.cli import commands
from support import processes
from support.cli.runner import CliRunner
from support.jobs import write_job

JOB = write_job("short", trainer="train")
UNKNOWN_TOKEN = "fedplat_op_" + "Zq3" * 14 + "x"
"""A text in the form of a token."""


def forms(secret: bytes) -> set[str]:
    """The forms in which a program might write some bytes."""
    found = {secret.hex(), secret.hex().upper(), repr(secret)[2:-1], str(list(secret))[1:-1]}
    for shift in range(3):  # base64 of a text in which the secret begins anywhere
        coded = base64.b64encode(bytes(shift) + secret)
        whole = coded[(4 * shift + 2) // 3 : len(coded) - 4]
        found |= {whole.decode(), whole.decode().replace("+", "-").replace("/", "_")}
    with contextlib.suppress(UnicodeDecodeError):
        found.add(secret.decode())
    return found


class Secrets:
    """The secrets that must not appear in any text, in all their forms."""

    def __init__(self) -> None:
        self._forms: dict[str, str] = {}

    def add(self, what: str, *secrets: str | bytes) -> None:
        assert secrets, what
        for secret in secrets:
            data = secret.encode() if isinstance(secret, str) else secret
            assert len(data) >= 16, f"{what} is too short to search for"
            self._forms |= dict.fromkeys(forms(data), what)

    def add_key(self, path: Path) -> None:
        """A private key: its PEM, line by line, and the number itself."""
        pem = path.read_bytes()
        self.add(path.name, *(line for line in pem.splitlines() if not line.startswith(b"-----") and len(line) >= 16))
        key = serialization.load_pem_private_key(pem, None)
        if isinstance(key, Ed25519PrivateKey):
            self.add(path.name, key.private_bytes_raw())
        else:
            assert isinstance(key, EllipticCurvePrivateKey)
            number = key.private_numbers().private_value
            self.add(path.name, number.to_bytes(32, "big"), str(number))

    def found_in(self, text: str) -> set[str]:
        marker = {"a private key"} if "PRIVATE KEY" in text else set[str]()
        return marker | {what for form, what in self._forms.items() if form in text}


class Site:
    """A server, and everything that it and the commands have printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spied = folder / "spied"
        self.said: list[str] = []
        self.secrets = Secrets()
        self._clients: list[subprocess.Popen[str]] = []

    def run(self, *command: str, status: int = 0, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
        """Runs a command in this process; returns stdout and stderr, without adding them to `said`."""
        app = {"fedplat": operator.app, "fedplat-server": commands.app}[command[0]]
        done = CliRunner().invoke(app, list(command[1:]), env=environment)
        assert done.exit_code == status, done.output
        return done.stdout, done.stderr

    def told(self, *command: str, status: int = 0, environment: Mapping[str, str] | None = None) -> str:
        """The same for a command that prints no secrets; adds its output to `said`."""
        out, err = self.run(*command, status=status, environment=environment)
        self.said.append(out + err)
        return out + err

    def client(self, data_dir: Path, *options: str) -> subprocess.Popen[str]:
        python_path = os.pathsep.join([str(processes.ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        client = subprocess.Popen(
            [
                *(sys.executable, "-m", "fedplat_client", "run", "--log-level", "debug"),
                *("--trainer", "support.spy:train", "--data-dir", str(data_dir), *options),
            ],
            env={**os.environ, "SPY_FILE": str(self.spied), "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._clients.append(client)
        return client

    def end_all(self) -> None:
        """Ends the clients that are left after a failure."""
        for client in self._clients:
            if client.poll() is None:
                client.kill()
                client.communicate()

    def end(self, client: subprocess.Popen[str], status: int) -> str:
        """Waits for a client; returns its last line."""
        out, _ = client.communicate(timeout=processes.PATIENCE_S)
        self.said.append(out)
        assert client.returncode == status, out
        return out.splitlines()[-1]


@pytest.fixture
def site(tmp_path: Path) -> Generator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.end_all()


def keys_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.key"))


def lines_of(path: Path) -> list[bytes]:
    return [bytes.fromhex(line) for line in path.read_text().split()]


@pytest.mark.slow
@pytest.mark.fault("F30")
def test_no_secret_reaches_a_log(site: Site) -> None:
    """From the first start to the rotation of the authority, with the most verbose logs everywhere."""
    data, secrets = site.folder / "server", site.secrets
    where = ("--data-dir", str(data))
    with processes.server(data, "--log-level", "DEBUG", "--json-log") as server, server.admin() as admin:
        mine = {"FEDPLAT_PROFILE": str(server.profile_path), "FEDPLAT_SERVER": server.address}
        secrets.add("the admin's token", server.profile.token)
        site.said.append(server.said_by_init)
        for key in keys_of(data):
            secrets.add_key(key)
        ticket = _tickets(site, mine, where)
        (site.folder / "ticket").write_text(ticket.to_text() + "\n")
        first = site.client(site.folder / "first", "--ticket-file", str(site.folder / "ticket"))
        _work(admin, server)
        shutil.copytree(site.folder / "first", site.folder / "second")
        second = site.client(site.folder / "second")
        assert site.end(first, 1).startswith("Error: PERMISSION_DENIED: another process has opened a newer session")
        third = site.client(site.folder / "third", "--ticket", ticket.to_text())
        assert "used up" in site.end(third, 1)
        (client,) = admin.list_clients("demo")
        site.told("fedplat", "client", "revoke", client.client_id, environment=mine)
        assert "revoked this client" in site.end(second, 1)
        _refused_logins(site, mine)
        _changed_certificates(site, where)
        site.told("fedplat", "audit", environment=mine)
        secrets.add("a client's secret", *lines_of(site.spied))
    for key in keys_of(site.folder / "first"):
        secrets.add_key(key)
    site.said.append(server.log_text())
    _check(site)


def _tickets(site: Site, mine: dict[str, str], where: Sequence[str]) -> Ticket:
    """Makes secrets; each command prints at most one secret line, the one that is meant to be secret."""
    create = ("fedplat", "enrollment", "create", "--population", "demo")
    out, err = site.run(*create, environment=mine)
    ticket = Ticket.from_text(out)
    assert out.count("\n") == 1
    site.said.append(err)
    site.secrets.add("a ticket", out.strip(), ticket.secret)
    token = profile.load(_operator(site, where)).token
    site.secrets.add("an operator's token", token)
    site.told("fedplat", "enrollment", "list", environment=mine)
    site.told("fedplat", "operator", "list", environment=mine)
    return ticket


def _operator(site: Site, where: Sequence[str]) -> Path:
    path = site.folder / "ben.toml"
    site.told("fedplat-server", "operator", "add", "ben", "--role", "viewer", "--to", str(path), *where)
    return path


def _work(admin: processes.AdminClient, server: processes.Server) -> None:
    model = Parameters.from_arrays({"weight": np.zeros(100_000, np.float32)})  # too large for a report: it is uploaded
    job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model))
    ended = watch.follow(admin, job.job_id, watch.View(lambda _: None, lambda _: None))
    assert ended.status == admin_pb2.JOB_STATUS_COMPLETED
    processes.until(lambda: admin.status().num_waiting == 1, "the client to wait for more")


def _refused_logins(site: Site, mine: dict[str, str]) -> None:
    """A viewer without the role that a call needs, an unknown token, and a text that is not a token."""
    viewer = {**mine, "FEDPLAT_PROFILE": str(site.folder / "ben.toml")}
    text = site.told("fedplat", "client", "revoke", "c-1", status=4, environment=viewer)
    assert "operator ben has the role viewer" in text
    for given in (UNKNOWN_TOKEN, UNKNOWN_TOKEN + "-and-a-mistake"):
        site.secrets.add("a wrong token", given)
        assert "needs an operator's token" in site.told(
            "fedplat", "status", status=4, environment={**mine, "FEDPLAT_TOKEN": given}
        )


def _changed_certificates(site: Site, where: Sequence[str]) -> None:
    for change in ("renew", "rotate-ca", "show"):
        site.told("fedplat-server", "certificates", change, *where)
        for key in keys_of(site.folder / "server"):
            site.secrets.add_key(key)


def _check(site: Site) -> None:
    kinds = set[str]()
    for text in site.said:
        kinds |= site.secrets.found_in(text)
    assert kinds == set()
    everything = "\n".join(site.said)
    for event in ("the server is ready", "an operator's call was refused", "the audit log ends here"):
        assert json.dumps({"event": event})[1:-1] in everything, f"the log does not contain: {event}"
    for line in ("The client is enrolled.", "The task started: ", "The task is done and reported: ", "fenced"):
        assert line in everything, f"the log does not contain: {line}"
    stored = list((site.folder / "server").glob("fedplat.sqlite*"))
    assert stored
    for path in stored:  # the database keeps only hashes
        assert site.secrets.found_in(path.read_bytes().decode("latin-1")) == set()


@pytest.mark.parametrize(
    "leak", ["{!r}", "{0}", "hex {1}", "Basic {2}", '{{"token": "{0}"}}', "fedplat_session={2}"], ids=range(6)
)
def test_a_leak_would_be_found(leak: str) -> None:
    secret = os.urandom(32).hex().encode()
    secrets = Secrets()
    secrets.add("it", secret)
    assert secrets.found_in("nothing of that kind") == set()
    text = leak.format(secret.decode(), secret.hex(), base64.b64encode(b"user:" + secret).decode())
    assert secrets.found_in(f"before {text} behind") == {"it"}


def test_a_leaked_signature_would_be_found() -> None:
    secret = os.urandom(64)
    secrets = Secrets()
    secrets.add("it", secret)
    leaks: Iterable[object] = (secret, secret.hex(), base64.b64encode(secret), base64.urlsafe_b64encode(b"x" + secret))
    for leak in leaks:
        assert secrets.found_in(f"before {leak!r} behind") == {"it"}
