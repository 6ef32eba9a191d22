"""No module imports itself by way of others; lazy imports and those for type checking count, too."""

from __future__ import annotations

import graphlib

import grimp
import pytest


@pytest.mark.parametrize("distribution", ["fedplat", "fedplat_server", "fedplat_client"])
def test_there_is_no_import_circle(distribution: str) -> None:
    graph = grimp.build_graph(distribution, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises `CycleError`, which names the circle
