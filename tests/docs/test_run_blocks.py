"""Runs the blocks that no test of a single page runs, on a development server with a finished job."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Generator
from pathlib import Path

import pytest
import tomli_w

from fedplat.admin import AdminClient, profile
from fedplat.cli.app import app
from fedplat_server.cli.commands import app as server
from support import processes
from support.cli.runner import CliRunner
from support.docs import commands
from support.docs.blocks import ROOT, Block, read, read_all

PREPARED = Path(__file__).parent / "prepared.py"
BLOCKS = [block for block in read_all() if block.is_run_here]
APPS = {"fedplat": app, "fedplat-server": server}


def environment_of(home: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("FEDPLAT_", "XDG_"))}
    paths = {"HOME": str(home), "PATH": f"{processes.BIN}:/usr/bin:/bin", "FEDPLAT_DATA_DIR": str(home / "stopped")}
    return {**variables, **paths, "OMP_NUM_THREADS": "1"}


class World:
    """An operator of a development server, with a completed job `digits` and a copy of the stopped server's folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = environment_of(home)
        readme = {block.marker.removeprefix("file: "): block.text for block in read("README.md")}
        (home / "trainer.py").write_text(readme["trainer.py"])
        (home / "job.toml").write_text(readme["job.toml"].replace('name = "linear"', 'name = "digits"'))

    @contextlib.contextmanager
    def started(self, *commands: str) -> Generator[None]:
        settings = [f"{name}={self.environment[name]}" for name in ("HOME", "PATH")]
        absent = [f"--unset={name}" for name in sorted(set(os.environ) - set(self.environment))]
        lines = [["env", "-C", str(self.home), *absent, *settings, *command.split()] for command in commands]
        with processes.processes(lines, self.home / "processes.log"):
            yield

    @contextlib.contextmanager
    def server(self) -> Generator[AdminClient]:
        """`fedplat-server dev`, as on the pages; its port is its only change."""
        command = f"fedplat-server dev --listen {self.address} --dashboard="
        with self.started(command):
            path = self.home / ".config/fedplat/profile.toml"
            processes.until((self.home / "fedplat-data/demo.ticket").exists, "the ticket")
            with AdminClient(profile.load(path)) as admin:
                admin.wait_until_ready(processes.PATIENCE_S)
                yield admin

    def train(self) -> None:
        """Trains the README's job, and keeps a copy of the data folder for commands that work without a server."""
        self.address = f"127.0.0.1:{processes.free_port()}"
        client = "fedplat-client run --ticket-file fedplat-data/demo.ticket --trainer linear=trainer:train --data-dir"
        with self.server(), self.started(f"{client} client-1", f"{client} client-2"):
            self.bash(f"cd {self.home}; fedplat job submit job.toml --follow")
        shutil.copytree(self.home / "fedplat-data", self.home / "stopped")

    def find_names(self, admin: AdminClient) -> dict[str, str]:
        """What stands for the examples on the pages."""
        return {
            "c-0123456789abcdef": admin.list_clients("demo")[0].client_id,
            "e-0123456789ab": admin.list_enrollments()[0].enrollment_id,
            "/var/lib/fedplat": str(self.home / "stopped"),
            "--data-dir DATA": f"--data-dir {self.home / 'stopped'}",
            "JOB": "digits",
            "fedplat simulate": "fedplat simulate --rounds 1 --no-plots",
            "fedplat-server dev": "fedplat status",  # which the world has started
        }

    def run(self, script: str) -> str:
        """Runs a block in the working directory: in this process, which is quicker, unless it needs a shell."""
        found = commands.find(script)
        lines = [line for line in script.splitlines() if line.strip()]
        if len(found) != len(lines) or not all(command.words[0] in APPS for command in found):
            return self.bash(script)
        absent = dict.fromkeys(set(os.environ) - set(self.environment))
        said = ""
        for command in found:
            invoke = CliRunner().invoke
            done = invoke(APPS[command.program], command.rest, input="y\n", env={**self.environment, **absent})
            assert done.exit_code == 0, f"{command.words}\n{done.output}"
            said += done.output
        return said

    def bash(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"set -eo pipefail\n{script}"],
            env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


def folder_of(page: str, home: Path) -> Path:
    """The folder in which the blocks of a page run, with the page's files."""
    folder = home / page.replace("/", "-")
    folder.mkdir(exist_ok=True)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    for block in read(page):
        if block.marker.startswith("file: "):
            (folder / block.marker.removeprefix("file: ")).write_text(block.text)
    return folder


def write_private_jobs(folder: Path) -> None:
    """Writes the files that the commands of docs/privacy.md name: the page's tables, and a small simulation."""
    (tables,) = [tomllib.loads(block.text) for block in read("docs/privacy.md") if "participation =" in block.text]
    head = {"name": "digits", "population": "demo", "trainer": "digits", "rounds": 3}
    model = {"model": {"initial": "fedplat.pytorch.models:digits_2nn"}}
    (folder / "job.toml").write_text(tomli_w.dumps({**head, **model, **tables}))
    sampling = {"policy": "poisson", "rate": 0.5}
    small = {
        "config": {"epochs": 1, "batch_size": 32, "learning_rate": 0.3},
        "selection": {**tables["selection"], "goal": 20, "wait_for": 30, "sampling": sampling},
        "simulation": {"data": {"source": "digits"}, "partition": {"scheme": "iid", "clients": 40}},
    }
    (folder / "digits.toml").write_text(tomli_w.dumps({**head, **model, **tables, **small}))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in BLOCKS if block.language == "bash"]
    assert len(blocks) > 10
    world = World(tmp_path)
    world.train()
    write_private_jobs(folder_of("docs/privacy.md", tmp_path))
    printed: dict[tuple[str, int], str] = {}
    with world.server() as admin:
        names = world.find_names(admin)
        for block in blocks:
            monkeypatch.chdir(folder_of(block.page, tmp_path))
            printed[block.page, block.line] = world.run(replace(block.text, names))
    assert len(printed) == len(blocks)
    operations = tmp_path / "docs-operations.md"
    assert (operations / "model.safetensors").read_bytes()
    assert (operations / "fedplat.rules.yml").exists()
    assert (tmp_path / "docs-index.md/my-project/README.md").exists()
    said = "\n".join(printed.values())
    for part in (
        "nothing is broken",
        "job digits (j-",
        "this job",
        "removed the old authority",
        "is revoked",
        "COMPLETED",
    ):
        assert part in said


def replace(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


@pytest.mark.slow
def test_the_programs_run(tmp_path: Path) -> None:
    """One process for all pages, since each would import PyTorch; tests/docs/prepared.py has what the pages assume."""
    pages: dict[str, list[Block]] = {}
    for block in BLOCKS:
        if block.language == "python":
            pages.setdefault(block.page, []).append(block)
    arguments: list[str] = []
    for page, blocks in pages.items():
        program = folder_of(page, tmp_path) / "blocks_of_the_page.py"
        program.write_text("\n".join(block.text for block in blocks))
        arguments += [page, str(program)]
    done = subprocess.run(
        [sys.executable, str(PREPARED), *arguments],
        cwd=tmp_path, env=environment_of(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(pages)
