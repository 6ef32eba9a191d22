"""The published vectors and the JSON Schema of the task folder are what the client does."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat_client import Task
from fedplat_client.errors import ExternalTaskError
from fedplat_client.trainers.external import TaskFolder
from fedplat_client.trainers.external.schema import format_schema

SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schema"
VECTORS = json.loads((SCHEMAS / "task-folder-vectors.json").read_text())


def test_every_vector_is_accepted_or_refused(tmp_path: Path) -> None:
    model = Parameters.from_bytes(base64.b64decode(VECTORS["model"]))
    refused = 0
    for number, case in enumerate(VECTORS["cases"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in case["files"].items():
            (folder / name).write_bytes(base64.b64decode(content))
        task = Task(name="linear", parameters=model.copy())
        if "refused" in case:
            refused += 1
            with pytest.raises(ExternalTaskError, match=re.escape(case["refused"])):
                TaskFolder(folder).read_training(task)
            continue
        result = TaskFolder(folder).read_training(task)
        update = result.to_update(model)
        for name, values in VECTORS["trained"].items():
            base = model[name].ravel() if model[name].dtype.kind == "f" else 0
            np.testing.assert_array_equal(update[name].ravel() + base, values)
        assert {"num_examples": result.num_examples, "metrics": result.metrics} == VECTORS["result"]
    assert (refused, len(VECTORS["cases"])) == (25, 28)


def test_the_schema_is_that_of_the_records() -> None:
    assert (SCHEMAS / "task-folder.schema.json").read_text() == format_schema()


def test_tensors_of_the_server_may_be_left_out(tmp_path: Path) -> None:
    model = Parameters.from_arrays({"weight": np.zeros(2, "f4"), "server/control": np.ones(2, "f4")})
    (tmp_path / "result.json").write_text('{"num_examples": 1}')
    for arrays in ({"weight": np.ones(2, "f4")}, {**model, "weight": np.ones(2, "f4")}):
        (tmp_path / "model-out.safetensors").write_bytes(Parameters.from_arrays(arrays).to_bytes())
        update = TaskFolder(tmp_path).read_training(Task(name="a", parameters=model.copy())).to_update(model)
        assert update == Parameters.from_arrays({"weight": np.ones(2, "f4")})
