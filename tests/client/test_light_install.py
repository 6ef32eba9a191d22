"""The SDK imports and works in a real environment without torch, SQLAlchemy, alembic or the server."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedplat.wire.v1 import model_pb2
from support.fake_fleet import FakeFleet
from support.projects import CLIENT, CORE, MAX_LIGHT, OURS, ROOT

PROBE = """
import importlib.util, sys
import fedplat_client
heavy = ["torch", "sklearn", "lightning", "sqlalchemy", "alembic", "fedplat_server", "rich", "typer", "pydantic"]
assert [name for name in heavy if importlib.util.find_spec(name)] == []
assert [name for name in heavy if name in sys.modules] == []
for name in ("torch", "sklearn", "lightning"):
    try:
        __import__(f"fedplat_client.trainers.{name}")
    except fedplat_client.MissingExtraError as exc:
        print(exc)
import fedplat_client.trainers.learner
"""
LOADED = """
import sys
from fedplat_client import *
print(*(name for name in sys.modules if name.partition(".")[0] in ("fedplat", "fedplat_client")))
"""
MAX_LOADED = 100
TRAINER = """
from fedplat_client import TrainResult

def digits(task):
    task.parameters["weight"] *= 2
    return TrainResult(parameters=task.parameters, num_examples=1)
"""


def closure() -> set[str]:
    """The distributions that the SDK brings along, by the declarations of this tree and of what is installed."""
    names: set[str] = set()
    todo = [each for each in (*CORE.dependencies, *CLIENT.dependencies) if each.name not in OURS]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            names.add(name)
            todo += map(Requirement, importlib.metadata.requires(name) or [])
    return names


def prove(python: Path, fleet: FakeFleet, model: model_pb2.ModelRef, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    probe = [str(python), "-I", "-c", PROBE]
    output = subprocess.run(probe, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    for package in ("torch", "scikit-learn", "lightning"):
        assert f"'{package}>=" in output
    (folder / "edge.py").write_text(TRAINER)
    fleet.assign(model)
    arguments = ["run", "--ticket", fleet.ticket.to_text(), "--data-dir", "data"]
    command = [str(python), "-m", "fedplat_client", *arguments, "--trainer", "edge:digits", "--max-tasks", "1"]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    assert fleet.calls.count("Report") == 1


def test_few_distributions_come_along() -> None:
    names = closure() | {"fedplat", "fedplat-client"}
    assert len(names) <= MAX_LIGHT, sorted(names)


def test_few_modules_are_loaded() -> None:
    """Those of secure aggregation and decentralised training are loaded for the first job that needs them."""
    output = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True).stdout
    names = output.split()
    assert len(names) <= MAX_LOADED, sorted(names)
    own = "fedplat_client._protocols"
    needless = (
        "fedplat.aggregate",
        "fedplat.gossip",
        "fedplat.job",
        "fedplat.rounds",
        f"{own}.gossip",
        f"{own}.secure",
    )
    assert [name for name in names if name.startswith(needless)] == []


@pytest.mark.slow
def test_the_declared_dependencies_suffice(fleet: FakeFleet, model: model_pb2.ModelRef, tmp_path: Path) -> None:
    """Needs no network: the environment gets copies of the distributions that are installed here."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for name in (*closure(), "fedplat", "fedplat-client"):
        for file in importlib.metadata.files(name) or []:
            is_own = name.startswith("fedplat")  # an editable installation: of these, the metadata
            if (file.name == "METADATA") if is_own else (".." not in file.parts and "__pycache__" not in file.parts):
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)
    for folder in (ROOT / "fedplat", ROOT / "client" / "fedplat_client"):
        shutil.copytree(folder, packages / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    prove(tmp_path / "env" / "bin" / "python", fleet, model, tmp_path)
