"""An index resolves fedplat with current versions, from wheels alone, for each Python and system; and the stubs run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from uv import find_uv_bin

from support.projects import CLIENT, CORE, PYTHONS, ROOT, SERVER, Project, require_index

pytestmark = pytest.mark.slow
SYSTEMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")
# A resolution takes up to ten seconds, in which it waits for the index.
oldest = pytest.param(PYTHONS[0], marks=pytest.mark.grid)
newest = pytest.param(PYTHONS[-1])
between = [pytest.param(python, marks=pytest.mark.grid) for python in PYTHONS[1:-1]]


def resolve(folder: Path, python: str, system: str, *arguments: str | Path) -> dict[str, Version]:
    """Return the versions that an index offers now, as wheels, for a system that need not be this one."""
    current = folder / "current.txt"
    current.write_text("protobuf>=7\nrich>=15\ntyper>=0.21\n")  # Flower admits none of them
    command = [find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-build", "-c", current]
    command += ["--python-version", python, "--python-platform", system, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Version(version) for name, version in re.findall(r"^([\w.-]+)==(\S+)$", done.stdout, re.MULTILINE)}


def list_extras(project: Project, *without: str) -> list[str]:
    return [part for name in project.extras if name not in without for part in ("--extra", name)]


@pytest.mark.parametrize("python", [oldest, *between, newest])
def test_a_client_needs_only_wheels(tmp_path: Path, python: str) -> None:
    require_index(tmp_path)
    for system in SYSTEMS:
        found = resolve(tmp_path, python, system, CLIENT.path)
        assert found["protobuf"] >= Version("7")
        assert "flwr" not in found


@pytest.mark.parametrize("python", [oldest, newest])
def test_everything_but_flower_resolves_with_current_versions(tmp_path: Path, python: str) -> None:
    """The extra `ray` is left out, since Ray has no wheels for some of the systems; `pool` is `torch`."""
    require_index(tmp_path)
    for project in (CORE, SERVER):
        extras = list_extras(project, "dev", "docs", "flower", "pool", "ray")
        found = resolve(tmp_path, python, SYSTEMS[0], project.path, *extras)
        assert found["rich"] >= Version("15")
        assert found["protobuf"] >= Version("7")


@pytest.mark.parametrize("strategy", ["lowest", "highest"])
def test_the_stubs_run_with_both_ends_of_the_bounds(tmp_path: Path, strategy: str) -> None:
    """Messages of the last releases, and hostile ones, with another protobuf in front of the installed one."""
    require_index(tmp_path)
    folder = tmp_path / "protobuf"
    (requirement,) = (each for each in CORE.dependencies if each.name == "protobuf")
    install = [find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--no-build", "--resolution", strategy]
    install += ["--python", sys.executable, "--target", str(folder), str(requirement)]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ask = "import google.protobuf as protobuf; print(protobuf.__file__, protobuf.__version__)"
    path, version = subprocess.check_output([sys.executable, "-c", ask], env=environment, text=True).split()
    assert path.startswith(str(folder))
    assert requirement.specifier.contains(version)
    assert (Version(version) >= Version("7")) == (strategy == "highest")
    tests = ["tests/server/test_golden.py", "tests/server/test_wire.py"]
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow and not grid"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
