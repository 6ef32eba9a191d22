"""Tests fedplat with other Pythons and with current versions of its dependencies. `make test-pythons` runs it.

    python tests/pythons/run.py [PYTHON ...] [--lowest] [--folder build/pythons]

PYTHON is a version or the path of an interpreter; without one, all supported versions that this machine has are tested,
and the others are named. For each, a package index installs the newest versions that fedplat admits into an environment
of its own (`--lowest`: the oldest ones that it names), without PyTorch. There every module is imported, with warnings
as errors, and tests of all three distributions run; outside Linux those of the client alone. The last line is
`PYTHONS OK` with the versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from uv import find_uv_bin

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.projects import PYTHONS, ROOT

CLIENT = (".[cli]", "./client")
ALL = (".[blake3,cli,dashboard,otel,privacy,sklearn,tables]", "./client", "./server")
TOOLS = ("hypothesis", "packaging", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
SHOWN = ("protobuf", "grpcio", "numpy", "typer", "rich", "sqlalchemy", "starlette", "uvicorn")
CLIENT_TESTS = tuple(
    f"tests/client/test_{name}.py" for name in ("client", "delta", "identity", "request_signing", "task", "transfer")
)
TESTS = (
    *CLIENT_TESTS,
    "tests/client/test_cli.py",
    "tests/core/cli/test_commands.py",
    "tests/core/cli/test_lists.py",
    "tests/core/codecs",
    "tests/core/rounds",
    "tests/core/simulation/test_driver.py",
    "tests/core/test_model_file.py",
    "tests/server/test_golden.py",
    "tests/server/test_wire.py",
)


def find_interpreter(python: str) -> str | None:
    """Return the path of an installed interpreter, also one of pyenv that is not selected, or None."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin"))
    path = os.pathsep.join([*map(str, pyenv), os.environ["PATH"]])
    command = [find_uv_bin(), "python", "find", "--no-python-downloads", "--no-project", python]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def test(interpreter: str, folder: Path, strategy: str) -> str:
    """Test in a new environment, and return its versions. Raises `CalledProcessError`."""
    uv, python = find_uv_bin(), folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    is_linux = sys.platform == "linux"
    _call(uv, "venv", "--quiet", "--clear", "--python", interpreter, str(folder))
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    _call(*install, "--no-sources", "--resolution", strategy, *(ALL if is_linux else CLIENT))
    _call(*install, *TOOLS)
    packages = ("fedplat", "fedplat_client", *(["fedplat_server"] if is_linux else []))
    _call(str(python), "-W", "error", "tests/pythons/imports.py", *packages)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not grid and not gpu"]
    _call(str(python), "-m", "pytest", *options, *(TESTS if is_linux else CLIENT_TESTS))
    found = subprocess.check_output([uv, "pip", "freeze", "--python", str(python)], text=True).split()
    versions = dict(line.split("==") for line in found if "==" in line)
    ask = "import platform; print(platform.python_version())"
    version = subprocess.check_output([str(python), "-c", ask], text=True).strip()
    return ", ".join([f"Python {version}", *(f"{name} {versions[name]}" for name in SHOWN if name in versions)])


def _call(*command: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def main(
    pythons: Annotated[list[str] | None, typer.Argument(metavar="[PYTHON]...")] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="Install the lowest versions that fedplat names.")] = False,
    folder: Annotated[Path, typer.Option(help="Where the environments are made.")] = ROOT / "build" / "pythons",
) -> None:
    """Test fedplat with other Pythons and with current versions of its dependencies."""
    tested: list[str] = []
    for python in pythons or PYTHONS:
        interpreter = find_interpreter(python)
        if interpreter is None:
            print(f"Python {python} is not installed here: not tested", flush=True)
            if pythons:
                sys.exit(1)
            continue
        print(f"--- Python {python}: {interpreter}", flush=True)
        name = Path(interpreter).parent.parent.name if "/" in python else python
        tested.append(test(interpreter, folder.resolve() / name, "lowest-direct" if lowest else "highest"))
    print(*tested, f"PYTHONS OK {len(tested)}", sep="\n")


if __name__ == "__main__":
    typer.run(main)
