"""The README is true: its files are taken out of it and run, with its commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from e2e import processes
from fedplat.cli.app import app
from fedplat.model import Parameters
from fedplat_server.commands import app as server

README = (processes.ROOT / "README.md").read_text()


def files_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.DOTALL))


def commands_of(text: str) -> list[str]:
    blocks: list[str] = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_trainer_is_short() -> None:
    assert len(files_of(README)["trainer.py"].splitlines()) < 30


def test_two_machines(tmp_path: Path) -> None:
    """A server, two clients that run the README's trainer, and the operator's commands, to the exported model."""
    files = files_of(README)
    assert set(files) == {"trainer.py", "job.toml", "start.py"}
    commands = commands_of(README)
    with processes.server(tmp_path / "server") as server:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
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
    # The private data of every client follows y = x (1, -2, 0.5).
    final = Parameters.open(tmp_path / "final.safetensors")["weight"]
    np.testing.assert_allclose(final, [1.0, -2.0, 0.5], atol=0.05)


def test_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's simulations, but with fewer rounds, and a smaller fleet instead of the million."""
    commands = [command.partition("fedplat ")[2] for command in commands_of(README) if "fedplat simulate" in command]
    assert [command.split("/")[-1] for command in commands] == [
        "digits-dirichlet.toml",
        "million.toml",
        "mnist-noniid.toml",
    ]
    monkeypatch.chdir(processes.ROOT)
    data = Path(os.environ.get("FEDPLAT_DATA", processes.ROOT / "../shared/data"))
    for command in commands:
        if "mnist" in command and not (data / "mnist.npz").exists():
            continue
        small = ["--rounds", "1", "--no-plots", "--json", "--output", str(tmp_path / command.split("/")[-1])]
        if "million" in command:
            small += ["--set", "simulation.fleet.num_clients=20000"]
        done = CliRunner().invoke(app, [*command.split(), *small], env={"FEDPLAT_DATA": str(data)})
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["status"] == "COMPLETED"


def test_commands_exist() -> None:
    """Each fedplat command of the README and of docs/ is one that the program knows."""
    texts = [README, *(path.read_text() for path in (processes.ROOT / "docs").glob("*.md"))]
    called = {
        tuple(word for word in match.split() if re.fullmatch(r"[a-z]+", word))
        for text in texts
        for match in re.findall(r"^fedplat(?:-server|-client)? [^\n#|]*", text, flags=re.MULTILINE)
    }
    assert called
    commands: dict[tuple[str, ...], str] = {}
    for line in (line for text in texts for line in commands_of(text)):
        program, *words = line.split()
        if program in ("fedplat", "fedplat-server", "fedplat-client"):
            commands[program, *(word for word in words[:2] if re.fullmatch(r"[a-z]+", word))] = line
    programs = {"fedplat": app, "fedplat-server": server}
    for (program, *names), line in commands.items():
        if program in programs:  # a process for each of them would take half a minute
            helped = CliRunner().invoke(programs[program], [*names, "--help"])
            assert helped.exit_code == 0, f"{line}: {helped.output}"
            continue
        done = subprocess.run(
            [str(processes.BIN / program), *names, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_links_lead_somewhere() -> None:
    for path in [processes.ROOT / "README.md", *(processes.ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (processes.ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([\w-]+)`?", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
