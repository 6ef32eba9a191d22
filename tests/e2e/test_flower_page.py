"""docs/flower.md is true: its commands run, in their order, and so do its files and its program."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedplat.admin import AdminClient, profile
from fedplat.flower.app import BEFORE, OLDEST, read_app
from fedplat.flower.strategies import FLOWER_STRATEGIES
from support import processes

ROOT = processes.ROOT
PAGE = (ROOT / "docs" / "flower.md").read_text("utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL))
INSTALL, SIMULATE, SERVE, DEPLOY, SUBMIT = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)

LOAD = """
import sys
from digits.task import Net
from safetensors.torch import load_file

for name in sys.argv[1:]:
    Net().load_state_dict(load_file(name))
"""


def test_the_extras_exist() -> None:
    named = dict(re.findall(r"^\| .* \| `(fedplat[a-z-]*)\[([a-z,]+)\]`", PAGE, flags=re.MULTILINE))
    assert set(named) == {"fedplat", "fedplat-server", "fedplat-client"}
    for name, extras in named.items():
        file = ROOT / name.removeprefix("fedplat").removeprefix("-") / "pyproject.toml"
        assert set(extras.split(",")) <= set(tomllib.loads(file.read_text())["project"]["optional-dependencies"])
        assert f"[{extras}]" in INSTALL
    app = tomllib.loads((ROOT / "examples/flower/digits/pyproject.toml").read_text())
    needed = {text.split(">")[0] for text in app["project"]["dependencies"]}
    assert needed - {"flwr"} <= set(INSTALL.split())


def test_the_lists_are_complete() -> None:
    (listed,) = re.findall(r"^Strategies of Flower: (.*?)\. ", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(FLOWER_STRATEGIES)
    first, last = (f"{major}.{minor}" for major, minor in (OLDEST, (BEFORE[0], BEFORE[1] - 1)))
    assert f"`flwr` {first} and {last}; other versions" in PAGE
    assert read_app(ROOT / "examples/flower/digits").name == "digits"
    assert PAGE.index("<!-- conformance -->") < PAGE.index("<!-- end -->")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """Simulation, deployment and ordinary job: the only changes are the port, which others may use."""
    for module in ("flwr", "torch", "sklearn"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    port = processes.free_port()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{processes.BIN}:/usr/bin:/bin",
    }

    def bash(script: str) -> str:
        # What the script leaves running ends with it.
        script = f"set -e\ntrap 'kill $(jobs -p) || true' EXIT\n{script}".replace("localhost:7443", f"localhost:{port}")
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    assert "COMPLETED" in bash(SIMULATE)
    (program,) = re.findall(r"(?<!-->\n)```python\n(.*?)```", PAGE, flags=re.DOTALL)
    *lines, last = program.strip().splitlines()
    shown = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, f"print({last})"])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "COMPLETED (10, 32)\n"
    init, serve = SERVE.splitlines()
    bash(f"{init} --port {port}")
    command = ["env", "-C", str(tmp_path), f"PATH={environment['PATH']}", *serve.split()]
    with processes.processes([[*command, "--listen", f"127.0.0.1:{port}"]], tmp_path / "server.log"):
        with AdminClient(profile.load(tmp_path / "data" / "admin.toml")) as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
        said = bash(DEPLOY + SUBMIT)  # the clients of the second way also work for the third
    assert "round 4 (server-round 2)  committed  assigned 2  reported 2" in said
    assert re.search(r"round 5/5 .*evaluation committed", said)
    assert list((tmp_path / "data" / "flower").glob("j-*/final_model.pt"))
    assert "Fatal" not in (tmp_path / "server.log").read_text()
    names = ("runs/digits/model.safetensors", "final.safetensors", "adam.safetensors")
    environment["PYTHONPATH"] = str(ROOT / "examples/flower/digits")
    subprocess.run([sys.executable, "-c", LOAD, *names], cwd=tmp_path, env=environment, check=True)
