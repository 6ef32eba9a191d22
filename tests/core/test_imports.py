"""No module imports itself by way of others; lazy imports and those for type checking count, too."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import grimp
import pytest

import fedplat
import fedplat_client
import fedplat_server


@pytest.mark.parametrize("distribution", ["fedplat", "fedplat_server", "fedplat_client"])
def test_there_is_no_import_circle(distribution: str) -> None:
    graph = grimp.build_graph(distribution, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises `CycleError`, which names the circle


@pytest.mark.parametrize("distribution", [fedplat, fedplat_server, fedplat_client], ids=lambda module: module.__name__)
def test_no_module_of_ours_is_imported_by_a_name(distribution: ModuleType) -> None:
    """Such an import would be in no graph."""
    (folder,) = distribution.__path__
    files = [file for file in Path(folder).rglob("*.py") if "import_module(" in file.read_text()]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    imports = [call for call in calls if ast.unparse(call.func).endswith("import_module")]
    assert [text for call in imports if (text := ast.unparse(call.args[0])).startswith("'fedplat")] == []


INTERRUPTED = """
import importlib.abc, os, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "msgspec":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from {} import main
sys.argv[1:] = ["{}"]
main()
"""


@pytest.mark.parametrize(
    ("entry", "name"), [("fedplat.cli", "status"), ("fedplat_server.cli.main", "run"), ("fedplat_client.cli", "run")]
)
def test_ctrl_c_during_the_imports_of_a_command_is_no_traceback(entry: str, name: str) -> None:
    """Each of them needs msgspec."""
    command = [sys.executable, "-c", INTERRUPTED.format(entry, name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
