"""The model: logistic regression in NumPy, for simulated and real clients."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
from fedplat.learner import Config
from fedplat import Parameters

import data


class LogisticRegression(msgspec.Struct, frozen=True):
    """Logistic regression of two classes, trained with gradient descent on batches.

    Fields would be keys of `[simulation.model]` in job.toml; `config` is the job's `[config]`.
    """

    def initial(self, seed: int) -> Parameters:
        """Return the initial model."""
        return Parameters.from_arrays(
            {"weight": np.zeros(data.NUM_FEATURES, np.float32), "bias": np.zeros(1, np.float32)}
        )

    def train(self, parameters: Parameters, examples: data.Examples, config: Config, seed: int) -> Mapping[str, float]:
        """Train the model in place on a client's examples, and return metrics."""
        inputs, labels = examples
        weight, bias = parameters["weight"], parameters["bias"]
        rng, rate, size = np.random.default_rng(seed), config["learning_rate"], config["batch_size"]
        for _ in range(config["epochs"]):
            order = rng.permutation(len(labels))
            for batch in np.split(order, range(size, len(order), size)):
                error = predict(parameters, inputs[batch]) - labels[batch]
                weight -= rate * inputs[batch].T @ error / len(batch)
                bias -= rate * error.mean()
        return self.evaluate(parameters, examples)

    def evaluate(self, parameters: Parameters, examples: data.Examples) -> Mapping[str, float]:
        """Return the loss and the accuracy of the model on examples."""
        inputs, labels = examples
        probability = np.clip(predict(parameters, inputs), 1e-7, 1 - 1e-7)
        losses = -np.log(np.where(labels == 1, probability, 1 - probability))
        return {"loss": float(losses.mean()), "accuracy": float(((probability > 0.5) == labels).mean())}


def predict(parameters: Parameters, inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the probability of class 1 for each example."""
    return 1 / (1 + np.exp(-(inputs @ parameters["weight"] + parameters["bias"])))


def initial() -> Parameters:
    """Return the initial model of the job."""
    return LogisticRegression().initial(seed=0)
