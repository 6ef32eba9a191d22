"""The Dockerfiles and the compose files of docker/, as data."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker"
DOCKERFILES = [FOLDER / f"Dockerfile.{app}" for app in ("server", "client")]
SERVICES = FOLDER / "Dockerfile.services"
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

Words = list[str]


def instructions(path: Path) -> list[Words]:
    """Return every instruction as its words; continued lines are joined."""
    text = path.read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def stages(path: Path) -> dict[str, list[Words]]:
    """Return the instructions of each stage, after those of the stages that it is made from."""
    found: dict[str, list[Words]] = {}
    name = ""
    for words in instructions(path):
        if words[0] == "FROM":
            name = words[3]
            found[name] = [*found.get(words[1], []), words]
        elif name:
            found[name].append(words)
    return found


def targets(path: Path) -> list[str]:
    """Return the stages that become images: their names end with that of the file."""
    app = path.suffix.removeprefix(".")
    return [name for name in stages(path) if name == app or name.endswith(f"-{app}")]


def last(words: list[Words], instruction: str) -> Words:
    """Return the last instruction of a kind, which is in force."""
    return [found for found in words if found[0] == instruction][-1]


def load(path: Path) -> dict[Any, Any]:
    """Return a file of YAML with its anchors resolved."""
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content
