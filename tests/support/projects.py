"""The three distributions, as their pyproject.toml files declare them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The versions of Python that fedplat supports."""
MAX_LIGHT = 14
"""Maximum number of distributions that `pip install fedplat-client` installs, with fedplat and fedplat-client."""


@dataclasses.dataclass(frozen=True)
class Project:
    """A distribution: the folder of its pyproject.toml, and its package."""

    folder: Path
    package: str

    @property
    def path(self) -> Path:
        return self.folder / "pyproject.toml"

    @property
    def sources(self) -> Path:
        return self.folder / self.package

    @property
    def table(self) -> dict[str, Any]:
        return tomllib.loads(self.path.read_text())["project"]

    @property
    def name(self) -> str:
        return self.table["name"]

    @property
    def version(self) -> str:
        return self.table["version"]

    @property
    def extras(self) -> dict[str, list[Requirement]]:
        found: dict[str, list[str]] = self.table["optional-dependencies"]
        return {extra: [*map(Requirement, texts)] for extra, texts in found.items()}

    @property
    def dependencies(self) -> list[Requirement]:
        return [*map(Requirement, self.table["dependencies"])]

    @property
    def requirements(self) -> list[Requirement]:
        """The dependencies, and those of every extra."""
        return [*self.dependencies, *(each for extra in self.extras.values() for each in extra)]


CORE = Project(ROOT, "fedplat")
CLIENT = Project(ROOT / "client", "fedplat_client")
SERVER = Project(ROOT / "server", "fedplat_server")
PROJECTS = (CORE, CLIENT, SERVER)
OURS = frozenset(project.name for project in PROJECTS)


def require_index(folder: Path) -> None:
    """Skips the test where no package index can be reached."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "0", "--timeout", "10"]
    reach = [*pip, "download", "--no-deps", "--no-cache-dir", "--dest", str(folder / "reach"), "hatchling>=1.26"]
    if subprocess.run(reach, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
