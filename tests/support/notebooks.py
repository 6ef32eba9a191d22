"""The notebooks in `examples/`, executed: python tests/support/notebooks.py NOTEBOOK... stores their outputs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat


def execute(path: Path, folder: Path) -> Any:
    """Return a notebook with the outputs of its code in a folder, without what differs between machines and runs."""
    notebook: Any = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    notebook.metadata.language_info = {"name": "python"}  # not the version of one machine
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            # A bar that is full tells nothing but the speed of the machine.
            cell.outputs = [
                each for each in cell.outputs if "<progress" not in each.get("data", {}).get("text/html", "")
            ]
    return notebook


def kinds(notebook: Any) -> list[list[Any]]:
    """Return what each output of each cell is: a stream, or the formats of a value."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[each.get("name") or sorted(each.get("data", {})) for each in cell.outputs] for cell in code]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as made:
            nbformat.write(execute(Path(name), Path(made)), name)
