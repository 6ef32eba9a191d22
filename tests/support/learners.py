"""A learner in NumPy, as a user would write it, and the files of docs/learners.md."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np

from fedplat.learner import Config, Data, check_data
from fedplat.model import Parameters


class Centroids(msgspec.Struct, frozen=True):
    """Predicts the class whose mean is closest: sums and counts for each example."""

    features: int
    classes: int = 10

    def initial(self, seed: int) -> Parameters:
        sums, counts = np.zeros((self.classes, self.features), np.float32), np.zeros(self.classes, np.float32)
        return Parameters.from_arrays({"sums": sums, "counts": counts})

    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> dict[str, float]:
        inputs, targets = check_data(data)
        is_member = np.arange(self.classes)[:, None] == targets
        parameters["sums"][:] = is_member @ inputs.reshape(len(inputs), -1) / len(inputs)
        parameters["counts"][:] = is_member.mean(1)
        return self.evaluate(parameters, data)

    def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
        inputs, targets = data
        means = parameters["sums"] / np.maximum(parameters["counts"], 1e-9)[:, None]
        distances = ((inputs.reshape(len(inputs), 1, -1) - means) ** 2).sum(2)
        return {"loss": float(distances.min(1).mean()), "accuracy": float((distances.argmin(1) == targets).mean())}


def read_page() -> dict[str, str]:
    """The files that docs/learners.md shows, by name."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "learners.md").read_text("utf-8")
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page, flags=re.DOTALL))
