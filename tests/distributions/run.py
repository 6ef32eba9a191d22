"""Builds the distributions, and proves that they work without this repository. `make dist` runs it.

    python tests/distributions/run.py [--output dist] [--wheelhouse build] [--tag v0.1.0]

Third-party wheels of the pinned versions are downloaded once into a folder, the wheelhouse. Everything after that is
offline: three sdists and wheels are built and compared with the tree, installed into empty environments, and used there
as the documentation describes. `--tag` also checks that the version is that of a release's tag. The last line is
`DIST OK`, with the seconds of the whole run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distributions import building, checks
from distributions.environments import Installer, Machine
from support.projects import CORE, ROOT

Result = TypeVar("Result")


def prove(output: Path, wheelhouses: Path) -> None:
    """Builds into `output`, and runs every check. Raises `DistributionError` or `CalledProcessError`."""
    wheelhouse = _step("wheelhouse", lambda: building.make_wheelhouse(wheelhouses))
    _step("build", lambda: building.build(wheelhouse, output))
    files = _step("files", lambda: building.inspect(output))
    print(*(f"  {path} {path.stat().st_size / 1e3:.0f} kB" for path in files), sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="fedplat-dist-") as name:
        root = Path(name).resolve()
        folders = {each: root / each for each in ("project", "readme", "demo", "types")}
        for folder in folders.values():
            folder.mkdir()
        installer = Installer(root, [wheelhouse, output])
        edge = _step("client: pip install", lambda: installer.make_environment("edge", "fedplat-client"))
        _step("  size", lambda: checks.check_light(edge))
        tool = ("fedplat-server[dashboard]", "--with-executables-from", "fedplat")
        commands = _step("server: tool install", lambda: installer.install_tool(*tool))
        whole = ("fedplat[cli,torch,plots,dashboard]", "fedplat-client", "fedplat-server", *building.ALSO)
        python = _step("all: pip install", lambda: installer.make_environment("all", *whole))
        machine = Machine(root, (python.parent,))
        _step("  origin", lambda: checks.check_origin(python))
        _step("  types", lambda: checks.check_types(python, folders["types"]))
        client = Machine(root, (edge.parent,))
        _step("fedplat new", lambda: checks.check_project(Machine(root, (commands,)), client, folders["project"]))
        reader = Machine(folders["readme"], machine.path)  # without the profile that the project's server has made
        _step("README", lambda: checks.check_readme(reader, folders["readme"]))
        _step("demo", lambda: checks.check_demo(machine, folders["demo"]))


def _step(name: str, work: Callable[[], Result]) -> Result:
    began = time.monotonic()
    result = work()
    words = result if isinstance(result, str) else ""
    print(f"{name:24} {time.monotonic() - began:5.1f} s  {words}", flush=True)
    return result


def main(output: Path = ROOT / "dist", wheelhouse: Path = ROOT / "build", tag: str = "") -> None:
    """Build the distributions into OUTPUT, and test them offline with the third-party wheels in WHEELHOUSE."""
    began = time.monotonic()
    if tag and tag != f"v{CORE.version}":
        print(f"the tag is {tag}, and the version {CORE.version}; expected the tag v{CORE.version}", file=sys.stderr)
        sys.exit(2)
    try:
        prove(output.resolve(), wheelhouse.resolve())
    except building.DistributionError as exc:
        print(f"DIST FAILED {exc}", file=sys.stderr)
        sys.exit(1)
    print(f"DIST OK version={CORE.version} seconds={time.monotonic() - began:.0f}")


if __name__ == "__main__":
    typer.run(main)
