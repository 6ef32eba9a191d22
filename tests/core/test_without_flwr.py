"""An environment without flwr: all else works, and a command that needs it names the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedplat.extras import install_command

ROOT = Path(__file__).resolve().parents[2]
APP = "examples/flower/digits"
SITE = """
import importlib.machinery
import importlib.metadata

find_spec = importlib.machinery.PathFinder.find_spec
from_name = importlib.metadata.Distribution.from_name

@classmethod
def find_other_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "flwr" else find_spec(name, path, target)

def find_other_distribution(name):
    if name == "flwr":
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)

importlib.machinery.PathFinder.find_spec = find_other_spec
importlib.metadata.Distribution.from_name = find_other_distribution
"""
"""Python imports `sitecustomize` when it starts."""
INSTALL = install_command("flower")
COMMANDS = {
    "fedplat.cli": (["flower", "run", APP], f"error: Flower apps need flwr: {INSTALL}"),
    "fedplat_client": (
        ["flower", APP, "--server", "localhost:1"],
        f"Error: FlowerTrainer needs flwr, which is not installed; install it with: {INSTALL}",
    ),
    "fedplat_server": (
        ["run", "--insecure", "--flower-app", f"digits={APP}"],
        f"fedplat-server: --flower-app digits={APP}: Flower apps need flwr: {INSTALL}",
    ),
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "module", ["fedplat.cli", *(pytest.param(name, marks=pytest.mark.slow) for name in list(COMMANDS)[1:])]
)
def test_a_command_says_what_to_install(tmp_path: Path, module: str) -> None:
    arguments, expected = COMMANDS[module]
    folder = ["--data-dir", str(tmp_path / "data")] if module != "fedplat.cli" else []
    done = run(tmp_path, "-m", module, *arguments, *folder)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == expected
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_all_tests_can_be_collected(tmp_path: Path) -> None:
    """Those that import a module of ours which imports flwr name it: the others cannot fail."""
    ignored = ROOT / "tests" / "core" / "flower"  # as a folder, whose conftest.py ignores its files
    named = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search("flower|flwr", path.read_text())]
    files = [ignored, *(path for path in named if ignored not in path.parents)]
    assert len(files) > 10
    options = ["--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = run(tmp_path, "-m", "pytest", *options, *sorted(map(str, files)))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "test_without_flwr.py" in done.stdout
    assert "tests/core/flower/" not in done.stdout
