"""The notebooks in `examples/` are stored with their outputs (`make notebooks`), and run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from support import notebooks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
MAX_BYTES = 300_000


def test_there_are_four_notebooks() -> None:
    names = ["first_simulation", "language_model", "new_algorithm", "private_training"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_its_outputs(path: Path) -> None:
    """A reader on a code host sees the numbers and a picture, of one run from the first cell to the last."""
    text = path.read_text("utf-8")
    notebook = json.loads(text)
    nbformat.validate(notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) or "<img" in str(output.get("data")) for output in outputs)
    assert "stderr" not in [output.get("name") for output in outputs]
    assert code[-1]["outputs"]
    assert len(text) < MAX_BYTES
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}  # not the version of one machine
    without_pictures = re.sub(r"[A-Za-z0-9+/=]{200,}", "", text)
    assert not re.findall(r"/(?:home|root|tmp|work|dev|usr)/[\w.-]+|0x[0-9a-f]{6,}", without_pictures)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    if path.stem == "language_model":
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    stored: Any = nbformat.read(path, as_version=4)
    assert notebooks.kinds(notebooks.execute(path, tmp_path)) == notebooks.kinds(stored)
