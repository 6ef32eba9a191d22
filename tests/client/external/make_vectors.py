"""Write docs/schema/task-folder-vectors.json: results of programs, and what the client makes of them.

    python tests/client/external/make_vectors.py

For authors of programs in other languages; `test_vectors.py` holds the client to them.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fedplat.model import Parameters

PATH = Path(__file__).resolve().parents[3] / "docs" / "schema" / "task-folder-vectors.json"
BASE = Parameters.from_arrays(
    {"bias": np.array([1.5], "f4"), "weight": np.array([[1, 2], [3, 4]], "f4"), "n": np.array(7)}
)
TRAINED = {"bias": np.array([1.0], "f4"), "weight": np.array([[1, 2.5], [3, 5]], "f4"), "n": np.array(8)}
RESULT = {"num_examples": 10, "metrics": {"loss": 0.5}}
ALL = "result.json", "model-out.safetensors"


def tensors(arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file in the order of the arrays, as another library writes it."""
    names = {np.dtype("f4"): "F32", np.dtype("f8"): "F64", np.dtype("i8"): "I64"}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for name, array in arrays.items():
        begin, body = len(body), body + array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [begin, len(body)]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def update(**changes: object) -> dict[str, Any]:
    """Trained minus base, and of the integer the trained value."""
    values = {name: array - BASE[name] if array.dtype.kind == "f" else array for name, array in TRAINED.items()}
    return {**values, **changes}


def make() -> dict[str, Any]:
    good = json.dumps(RESULT).encode()
    trained, other = tensors(TRAINED), tensors({name: TRAINED[name] for name in ("n", "weight", "bias")}, {"by": "x"})
    cases: list[dict[str, Any]] = []

    def add(name: str, refused: str, files: dict[str, bytes]) -> None:
        case: dict[str, Any] = {"name": name, "files": {k: base64.b64encode(v).decode() for k, v in files.items()}}
        cases.append(case | ({"refused": refused} if refused else {"accepted": True}))

    add("trained values", "", {"result.json": good, "model-out.safetensors": trained})
    add("trained values in another order, with metadata", "", {"result.json": good, "model-out.safetensors": other})
    add("an update", "", {"result.json": good, "update.safetensors": tensors(update())})
    add(
        "both",
        "update.safetensors and model-out",
        {"result.json": good, **dict.fromkeys(("update.safetensors", ALL[1]), trained)},
    )
    add("neither", "neither", {"result.json": good})
    add("no result", "did not write result.json", {"model-out.safetensors": trained})
    for name, arrays, refused in (
        ("a tensor is missing", {"weight": TRAINED["weight"], "n": TRAINED["n"]}, "tensor 'bias' is missing"),
        ("a tensor too many", {**TRAINED, "more": np.zeros(1, "f4")}, "tensor 'more' is not part of the model"),
        ("another shape", {**TRAINED, "bias": np.zeros(2, "f4")}, "tensor 'bias' is float32 [2]; expected float32 [1]"),
        ("another dtype", {**TRAINED, "bias": np.zeros(1, "f8")}, "tensor 'bias' is float64 [1]; expected float32 [1]"),
        (
            "not a number",
            {**TRAINED, "bias": np.full(1, np.nan, "f4")},
            "tensor 'bias' in model-out.safetensors has NaN",
        ),
        (
            "infinity",
            {**TRAINED, "weight": np.full((2, 2), np.inf, "f4")},
            "tensor 'weight' in model-out.safetensors has",
        ),
    ):
        add(name, refused, {"result.json": good, "model-out.safetensors": tensors(arrays)})
    add(
        "no safetensors file",
        "model-out.safetensors cannot be used",
        {"result.json": good, "model-out.safetensors": b"PK\3\4"},
    )
    add(
        "a file cut short",
        "model-out.safetensors cannot be used",
        {"result.json": good, "model-out.safetensors": trained[:-1]},
    )
    add(
        "a file with more behind it",
        "model-out.safetensors cannot be used",
        {"result.json": good, "model-out.safetensors": trained + b"\0"},
    )
    for name, text, refused in (
        ("no JSON", "loss = 3", "result.json cannot be read"),
        ("a list", "[]", "result.json cannot be read"),
        ("an unknown key", '{"num_exmaples": 10}', "result.json cannot be read"),
        ("examples as text", '{"num_examples": "10"}', "result.json cannot be read"),
        ("examples as truth", '{"num_examples": true}', "result.json cannot be read"),
        ("NaN", '{"num_examples": NaN}', "result.json cannot be read"),
        ("no examples", '{"metrics": {}}', "result.json has no num_examples"),
        ("0 examples", '{"num_examples": 0}', "num_examples is 0"),
        ("-1 examples", '{"num_examples": -1}', "num_examples is -1"),
        ("a metric without a name", '{"num_examples": 1, "metrics": {"": 1}}', "the metric ''"),
        ("a metric as text", '{"num_examples": 1, "metrics": {"loss": "low"}}', "result.json cannot be read"),
        ("65 metrics", json.dumps({"num_examples": 1, "metrics": {f"m{i}": 1 for i in range(65)}}), "65 metrics"),
        ("an error", '{"error": "no data for this round"}', "the program says: no data for this round"),
    ):
        add(name, refused, {"result.json": text.encode(), "model-out.safetensors": trained})
    return {
        "version": 1,
        "model": base64.b64encode(BASE.to_bytes()).decode(),
        "trained": {name: array.ravel().tolist() for name, array in TRAINED.items()},
        "result": RESULT,
        "cases": cases,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(make(), indent=1, ensure_ascii=False) + "\n")
