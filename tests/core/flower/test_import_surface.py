"""fedplat relies on public names of flwr only, and each of them exists in the installed version."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedplat import flower

FOLDER = Path(flower.__file__).parent
PUBLIC = frozenset({"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"})
PRIVATE = {"identity.py": {("flwr.supercore.task_identity", "TaskIdentity")}}
"""What is imported from other modules; no public name sets the node from which a message comes."""


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules of flwr that a file imports, and their names that it uses."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in PUBLIC:
            yield ast.unparse(node.value), node.attr


SURFACE = sorted({each for file in FOLDER.rglob("*.py") for each in imported(file)})


def test_only_public_modules_are_imported() -> None:
    found = {file.name: {each for each in imported(file) if each[0] not in PUBLIC} for file in FOLDER.rglob("*.py")}
    assert {name: imports for name, imports in found.items() if imports} == PRIVATE


@pytest.mark.parametrize(("module", "name"), SURFACE)
def test_each_name_exists(module: str, name: str) -> None:
    loaded = importlib.import_module(module)
    assert not name or hasattr(loaded, name)
    if module in PUBLIC and name not in ("", "__all__"):
        assert name in loaded.__all__


def test_nothing_else_of_fedplat_imports_flwr() -> None:
    root = FOLDER.parents[1]
    for package in ("fedplat", "server/fedplat_server", "client/fedplat_client"):
        files = [file for file in (root / package).rglob("*.py") if not file.is_relative_to(FOLDER)]
        files = [file for file in files if "flwr" in file.read_text()]
        assert [file for file in files if [*imported(file)]] == []


def test_the_methods_that_are_replaced_or_implemented_exist() -> None:
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy

    for name in ("start", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"):
        assert callable(getattr(Strategy, name))
    abstract = {"set_run", "run", "create_message", "get_node_ids", "push_messages", "pull_messages"}
    assert Grid.__abstractmethods__ == abstract | {"send_and_receive"}
