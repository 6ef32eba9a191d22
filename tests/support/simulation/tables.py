"""Small files of examples: tables, images, arrays and LEAF's JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Rows = Sequence[Sequence[object]]


def write_csv(path: Path, header: Sequence[str], rows: Rows) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def write_parquet(path: Path, header: Sequence[str], rows: Rows) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: [row[at] for row in rows] for at, name in enumerate(header)}), path)
    return path


def write_images(folder: Path, classes: Sequence[str], count: int, *, bright: bool = False) -> np.ndarray:
    """Write `count` images of 4 x 5 pixels for each class; with `bright`, a class is brighter than the one before."""
    rng = np.random.default_rng(0)
    images: list[np.ndarray] = []
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            low, high = (number * 128, number * 128 + 100) if bright else (0, 256)
            images.append(rng.integers(low, high, (4, 5, 3)).astype(np.uint8))
            Image.fromarray(images[-1]).save(folder / name / f"{index}.png")
    return np.stack(images)


def write_leaf(folder: Path, users: Mapping[str, tuple[Any, Any]]) -> None:
    (folder / "train").mkdir(parents=True)
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    text = json.dumps({"users": list(data), "num_samples": [len(y) for _, y in users.values()], "user_data": data})
    (folder / "train" / "data.json").write_text(text)
