"""`fedplat new`: each template is a project whose tests pass, that is simulated, and that runs as its README says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from fedplat.admin import AdminClient, profile
from fedplat.cli.app import app
from fedplat.cli.new import TEMPLATES
from fedplat.job import warnings
from fedplat.simulation.scenario import file
from support import processes
from support.cli.runner import CliRunner

FILES = {
    ".gitignore",
    "README.md",
    "client.py",
    "data.py",
    "job.schema.json",
    "job.toml",
    "model.py",
    "requirements.txt",
    "test_project.py",
}
MORE_FILES = {"lora": {"generate.py", "text.txt"}}
"""Files that only some templates have."""
MIN_ACCURACY = {"lora": 0.2}
"""Of the exported model; 0.8 for examples of two classes, and for a language model that of bytes."""
PYTHON = [sys.executable, "-W", "error", "-W", "ignore::pytest.PytestDeprecationWarning"]


def new(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["new", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_pytest_the_next_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    assert "  python -m pip install pytest && python -m pytest" in new("tumors").stdout.splitlines()


@pytest.mark.parametrize("template", TEMPLATES)
def test_files_of_a_template(template: str, here: Path) -> None:
    done = new("tumors", "--template", template)
    files = FILES | MORE_FILES.get(template, set())
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"created tumors: {', '.join(sorted(files))}",
        "next:",
        "  cd tumors",
        "  fedplat simulate job.toml",
        "  python -m pytest",
        "README.md has the commands for a server and real clients.",
    ]
    assert {path.name for path in (here / "tumors").iterdir()} == files
    text = "".join(path.read_text() for path in (here / "tumors").iterdir())
    assert "tumors" in text
    assert not re.findall(r"PROJECT_NAME|[A-Z]+_EXTRAS", text)
    job = file.read(here / "tumors" / "job.toml").job
    assert (job.name, job.population, job.trainer) == ("tumors", "tumors", "tumors")
    assert warnings(job) == []


def test_numpy_is_the_default_and_needs_no_other_library(here: Path) -> None:
    found = json.loads(new("first", "--json").stdout)
    assert found == {"folder": "first", "files": sorted(FILES)}
    assert "torch" not in (here / "first/requirements.txt").read_text()
    code = "import client, sys; client.make_trainer(0); assert not {'torch', 'sklearn', 'lightning'} & set(sys.modules)"
    subprocess.run([*PYTHON, "-c", code], cwd=here / "first", check=True)


def test_what_is_refused(here: Path) -> None:
    (here / "full").mkdir()
    (here / "full/notes.txt").write_text("mine")
    (here / "file").write_text("mine")
    for arguments, words in (
        (["full"], "full is not empty; expected a folder that does not exist or is empty"),
        (["file"], "file is a file; expected a folder that does not exist or is empty"),
        (["two words"], "'two words' cannot be the name of a project: expected at most 63 letters, digits"),
        (["x", "--template", "pytorch"], "there is no template 'pytorch'; expected one of numpy, torch, sklearn, "),
        (["x", "--template", "pytorch"], "did you mean torch?"),
        (["file/x"], "file/x cannot be written: Not a directory; choose another folder"),
    ):
        done = new(*arguments)
        assert done.exit_code == 2
        assert words in done.stderr
    assert [path.name for path in (here / "full").iterdir()] == ["notes.txt"]
    assert not (here / "x").exists()


def test_an_empty_folder_is_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    done = new(".")
    assert done.exit_code == 0
    assert "cd " not in done.stdout
    assert 'name = "empty"' in (here / "empty/job.toml").read_text()


def commands_of(readme: Path) -> list[str]:
    """Return the blocks of commands: tests and simulation, server, clients and operator."""
    return re.findall(r"```bash\n(.*?)```", readme.read_text(), flags=re.DOTALL)


def bash(script: str, folder: Path) -> str:
    path = f"{processes.BIN}:/usr/bin:/bin"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{script}"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_default_template_is_simulated(here: Path) -> None:
    new("tumors")
    _, simulate = commands_of(here / "tumors/README.md")[0].splitlines()
    printed = bash(f"{simulate} --json --no-plots", here / "tumors")
    assert json.loads(printed)["summary"]["last"]["value"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)  # nine programs of "lora" import transformers, which takes 10 s of CPU time each
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_runs_as_its_readme_says(template: str, here: Path) -> None:
    """Its tests, and the two terminals: only the server's port, dashboard and profile differ, which others may use."""
    new("tumors", "--template", template)
    folder = here / "tumors"
    local, *others = commands_of(folder / "README.md")
    tests, simulate = local.splitlines()
    assert "2 passed" in bash(tests, folder)
    if template == "lora":
        read, *others, export = others
        bash(simulate, folder)
        before, after = re.findall(r"perplexity: (.*) before, (.*) after", bash(read, folder))[0]
        assert float(after) < float(before) / 5
        others[-1] += export
    daemon, operator = others
    program, *options = daemon.split()
    options += ["--listen", f"127.0.0.1:{processes.free_port()}", "--dashboard", "", "--profile", "profile.toml"]
    with processes.processes([["env", "-C", str(folder), str(processes.BIN / program), *options]], here / "server.log"):
        processes.until((folder / "server" / "tumors.ticket").exists, "the ticket")
        with AdminClient(profile.load(folder / "server" / "admin.toml")) as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
        bash(f"trap 'kill $(jobs -p) || true' EXIT\n{operator}", folder)
    changes = "--set model.initial=final.safetensors --set rounds=1 --set config.learning_rate=1e-9"
    scored = json.loads(bash(f"{simulate} {changes} --json --no-plots", folder))
    assert scored["summary"]["last"]["value"] > MIN_ACCURACY.get(template, 0.8)  # on data that no client has
