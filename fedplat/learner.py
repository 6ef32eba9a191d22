"""The contract of learners: what a model needs so that simulated and real clients can train it.

Models are `Parameters` and data are NumPy arrays, so a learner may use any library. PyTorch modules have a richer
contract of their own, `fedplat.pytorch.training`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat.client_state import ClientState
from fedplat.config.toml import format_value
from fedplat.errors import DataError, JobFileError
from fedplat.model import Parameters

Config: TypeAlias = Mapping[str, bool | int | float | str]
"""A job's `[config]`."""
Data: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Inputs and targets; the first dimension of both is the number of examples."""


@runtime_checkable
class ArrayLearner(Protocol):
    """A model, and how one client trains it.

    A learner has no memory: all that a training starts from are its arguments. It can be pickled.

    >>> class Mean:
    ...     def initial(self, seed: int) -> Parameters:
    ...         return Parameters.from_arrays({"mean": np.zeros(1, np.float32)})
    ...
    ...     def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> dict[str, float]:
    ...         parameters["mean"][:] = check_data(data)[1].mean()
    ...         return self.evaluate(parameters, data)
    ...
    ...     def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
    ...         return {"loss": float(((data[1] - parameters["mean"]) ** 2).mean())}
    >>> isinstance(Mean(), ArrayLearner)
    True
    """

    def initial(self, seed: int) -> Parameters:
        """Return the initial model; equal seeds give equal bits."""
        ...

    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Mapping[str, float]:
        """Train the model in place on a client's examples, and return metrics; the seed determines all randomness.

        Raises `DataError` for examples that it cannot use.
        """
        ...

    def evaluate(self, parameters: Parameters, data: Data) -> Mapping[str, float]:
        """Score a model on examples, without a change; return metrics, such as `loss` and `accuracy`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of one client: `number` counts from 1; `num_rounds` are those of the job, 0 if they are not known."""

    number: int
    num_rounds: int
    seed: int
    """Determines all randomness of the training."""
    client_state: ClientState


@runtime_checkable
class StatefulLearner(ArrayLearner, Protocol):
    """A learner whose clients keep something between rounds, or that weighs them by something else than examples."""

    personal: tuple[str, ...]
    """Names of tensors that are client state; a model without them can only be scored by a client."""

    def train_round(
        self, parameters: Parameters, data: Data, config: Config, this: Round
    ) -> tuple[float, Mapping[str, float]]:
        """Train the model in place, and write to the client state; return the client's weight, and metrics."""
        ...

    def score(
        self, parameters: Parameters, data: Data, config: Config, client_state: ClientState
    ) -> tuple[float, Mapping[str, float]]:
        """Score a model with a client's state, without a change; return the client's weight, and metrics."""
        ...


class BaseLearner(Struct, frozen=True):
    """The base of learners that a simulation file names: the table `[simulation.model]`."""

    def build(self, folder: Path) -> Self:
        """Return the learner; its files are relative to `folder`."""
        return self


def check_data(data: Data) -> Data:
    """Return inputs and targets as arrays; lists, tensors and columns of pandas are converted, in their order.

    Raises `DataError` for what is not a pair of arrays, for no examples, and for NaN or infinite values.
    """
    pair = cast(object, data)
    if not isinstance(pair, tuple | list) or len(cast(Sequence[object], pair)) != 2:
        raise DataError(f"the data is a {type(pair).__name__}; expected a pair of arrays, (inputs, targets)")
    inputs, targets = (_as_array(values, name) for values, name in zip(data, ("inputs", "targets"), strict=True))
    if len(inputs) != len(targets):
        raise DataError(f"there are {len(inputs)} inputs and {len(targets)} targets; expected one target for each")
    if not len(targets):
        raise DataError("there are no examples; expected at least one")
    for name, array in (("inputs", inputs), ("targets", targets)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(f"the {name} hold NaN or infinite values; expected finite ones")
    return inputs, targets


def _as_array(values: Any, name: str) -> npt.NDArray[Any]:
    if np.ma.is_masked(values):
        raise DataError(f"the {name} have masked values; expected all values, or only the rows that have them")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as exc:  # lists of unequal lengths, a tensor with gradients
        raise DataError(f"the {name} cannot be an array: {exc}") from exc
    if array.ndim == 0:
        hint = "; use .toarray()" if hasattr(values, "toarray") else ""
        raise DataError(
            f"the {name} are a {type(values).__name__}; expected an array with a row for each example{hint}"
        )
    return array


def check_config(learner: ArrayLearner, config: Config) -> None:
    """Raise `JobFileError` for options that only PyTorch modules have, and for those that the learner refuses.

    A learner refuses options in a method `check_config(config)`, if it has one.
    """
    for key, expected in (("algorithm", "sgd"), ("dp", "none"), ("partial_work", False)):
        if config.get(key, expected) != expected:
            raise JobFileError(
                f'config.{key} = {format_value(config[key])}: only the learner "torch" supports it; leave the key out'
            )
    if refuse := getattr(learner, "check_config", None):
        refuse(config_of_round(config, 1))


def config_of_round(config: Config, round_number: int) -> Config:
    """Return a job's configuration with the learning rate of a round, which counts from 1."""
    rate, decay = config.get("learning_rate"), config.get("learning_rate_decay", 1.0)
    if isinstance(rate, bool | str | None) or isinstance(decay, bool | str):
        return config
    kept = {key: value for key, value in config.items() if key != "learning_rate_decay"}
    return {**kept, "learning_rate": rate * decay ** (round_number - 1)}
