"""The README and docs/machines.md are true: their files are taken out of them and run, with their commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat.admin import AdminClient, profile
from fedplat.cli.app import app
from fedplat.job import parse_job, warnings
from fedplat.model import Parameters
from support import processes
from support.cli.runner import CliRunner

README = (processes.ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((processes.ROOT / "docs").glob("*.md"))}
MACHINES = DOCS["machines.md"]
FILES_IN_PROSE = re.compile(r"`((?:fedplat|server|client|tests|docs|proto|benchmarks|examples)/[\w./-]*\w)`")


def files_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.DOTALL))


def blocks_of(text: str, language: str = "bash") -> list[str]:
    return re.findall(rf"(?<!-->\n)```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands_of(text: str) -> list[str]:
    return [line.split("#")[0].strip() for block in blocks_of(text) for line in block.splitlines() if line.strip()]


def write_files(text: str, folder: Path) -> None:
    for name, content in files_of(text).items():
        (folder / name).write_text(content)


def check_weight(path: Path) -> None:
    # The private data of every client follows y = x (1, -2, 0.5).
    np.testing.assert_allclose(Parameters.open(path)["weight"], [1.0, -2.0, 0.5], atol=0.05)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 80
    assert sum(len(text.splitlines()) for text in files_of(README).values()) <= 30


@pytest.mark.slow
def test_one_machine(tmp_path: Path) -> None:
    """The README's two terminals: the only change is the port, which others may use."""
    write_files(README, tmp_path)
    assert set(files_of(README)) == {"trainer.py", "job.toml"}
    install, daemon, operator = blocks_of(README)
    assert install.startswith("pip install")
    address = f"127.0.0.1:{processes.free_port()}"
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    environment = {**os.environ, **home, "OMP_NUM_THREADS": "1", "PATH": f"{processes.BIN}:/usr/bin:/bin"}

    def bash(script: str) -> None:
        # What the script leaves running ends with it.
        script = f"set -e\ntrap 'kill $(jobs -p) || true' EXIT\n{script}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout

    variables = [f"{name}={environment[name]}" for name in ("PATH", *home)]
    command = ["env", "-C", str(tmp_path), *variables, *daemon.split(), "--listen", address]
    with processes.processes([command], tmp_path / "server.log"):
        profile_path = tmp_path / "config" / "fedplat" / "profile.toml"
        processes.until((tmp_path / "fedplat-data" / "demo.ticket").exists, "the ticket")
        with AdminClient(profile.load(profile_path)) as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
        bash(operator)
    check_weight(tmp_path / "final.safetensors")


@pytest.mark.slow
def test_the_simulation_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reaches its target, in a folder without a clone of the repository."""
    (program,) = blocks_of(README, "python")
    monkeypatch.chdir(tmp_path)
    exec(program, {})  # the README's own lines
    assert re.search(r"^accuracy 0.85  after \d", capsys.readouterr().out, flags=re.MULTILINE)


def test_the_job_of_the_readme_warns_of_nothing(tmp_path: Path) -> None:
    assert warnings(parse_job(files_of(README)["job.toml"])) == []


@pytest.mark.slow
def test_two_machines(server: processes.Server, tmp_path: Path) -> None:
    """A server, two clients that run the page's trainer, and the operator's commands, to the exported model."""
    write_files(MACHINES, tmp_path)
    assert set(files_of(MACHINES)) == {"trainer.py", "job.toml", "start.py"}
    commands = commands_of(MACHINES)
    assert "python trainer.py" in commands
    assert "export FEDPLAT_TICKET=fpt1..." in commands
    environment = {
        **os.environ,
        "FEDPLAT_PROFILE": str(server.profile_path),
        "PATH": f"{processes.BIN}:/usr/bin:/bin",
    }

    def run(command: str) -> str:
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    first, *others = [command for command in commands if re.match("fedplat (?!simulate|privacy)", command)]
    ticket = run(first).strip()
    trainers = [
        [
            "env",
            f"HOME={tmp_path / str(n)}",
            f"FEDPLAT_TICKET={ticket}",
            sys.executable,
            str(tmp_path / "trainer.py"),
        ]
        for n in (1, 2)
    ]
    with processes.processes(trainers, tmp_path / "clients.log"):
        assert [command.split()[1] for command in others] == ["job", "model"]
        for command in others:
            run(command)
    check_weight(tmp_path / "final.safetensors")


def test_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/simulation.md, but with one round, and a smaller fleet instead of the million."""
    found = [command.removeprefix("fedplat ") for command in commands_of(DOCS["simulation.md"])]
    commands = [command for command in found if command.startswith("simulate") and "--show-data" not in command]
    assert {re.findall(r"[\w-]+\.toml", command)[0] for command in commands} == {
        "digits-dirichlet.toml",
        "digits-async.toml",
        "mnist-noniid.toml",
        "million.toml",
    }
    monkeypatch.chdir(processes.ROOT)
    data = Path(os.environ.get("FEDPLAT_DATA", processes.ROOT / "../shared/data"))
    for number, command in enumerate(commands):
        if "mnist" in command and not (data / "mnist.npz").exists():
            continue
        small = ["--rounds", "1", "--no-plots", "--json", "--dir", str(tmp_path / str(number))]
        if "million" in command:
            small += ["--set", "simulation.fleet.num_clients=20000"]
        done = CliRunner().invoke(app, [*command.split(), *small], env={"FEDPLAT_DATA": str(data)})
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["status"] == "COMPLETED"


def test_the_files_of_the_recipes_exist() -> None:
    files = {name for name in FILES_IN_PROSE.findall(DOCS["contributing.md"]) if "NAME" not in name}
    assert len(files) > 20
    assert not [name for name in files if not (processes.ROOT / name).exists()]


@pytest.mark.parametrize("name", ["README.md", "docs/contributing.md", "docs/demos.md", "docs/performance.md"])
def test_make_targets_exist(name: str) -> None:
    makefile = (processes.ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:`|^)make ([\w-]+)", (processes.ROOT / name).read_text(), flags=re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
