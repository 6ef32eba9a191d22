"""The local training options in a job's `[config]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fedplat.aggregate import local
from fedplat.aggregate import options as ranges
from fedplat.aggregate.feddyn import client_feddyn
from fedplat.aggregate.local import LocalAlgorithm
from fedplat.aggregate.scaffold import client_scaffold
from fedplat.toml import read_record

Scalar = bool | int | float | str
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Coefficient = Annotated[float, Meta(ge=0.0, le=1e30)]


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a client's training. Raises `ValueError` for a value out of its range.

    A step uses the gradient of `batch_size * accumulate` examples, `batch_size` of them in memory at a time.
    """

    epochs: Count
    batch_size: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    """Examples of a batch; 0 for all of them."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e30)]
    momentum: ranges.Decay = 0.0
    weight_decay: Coefficient = 0.0
    max_grad_norm: Coefficient = 0.0
    """Bound of the L2 norm of a step's gradient, before the algorithm adds to it; 0 for no bound."""
    accumulate: Count = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    algorithm: Literal["sgd", "fedprox", "scaffold", "feddyn"] = "sgd"
    mu: Coefficient = 0.0
    """μ of FedProx."""
    alpha: Coefficient = 0.0
    """α of FedDyn."""
    learning_rate_decay: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Factor of the learning rate from one round to the next."""
    partial_work: bool = False
    """True if a client that runs out of time reports the steps that it has completed."""
    measure_before: bool = False
    """True if the client reports `loss_before`: the mean loss of the received model on its data."""
    dp: Literal["none", "flat", "per_layer", "ghost"] = "none"
    """Example-level privacy: how the gradients of single examples are clipped, see `fedplat.pytorch.dp`."""
    dp_noise_multiplier: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    """Standard deviation of the noise in a step's sum of clipped gradients, divided by `dp_max_grad_norm`."""
    dp_max_grad_norm: Coefficient = 0.0
    """Bound of the L2 norm of each example's gradient."""
    dp_delta: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """The δ at which clients report their ε."""

    def __post_init__(self) -> None:
        ranges.check(self)
        if not self.batch_size and self.accumulate > 1:
            raise ValueError(f"accumulate = {self.accumulate}: expected 1 if a batch is all data (batch_size = 0)")
        if self.mu and self.algorithm != "fedprox":
            raise ValueError(f'mu = {self.mu}: only the algorithm "fedprox" has it, and this is "{self.algorithm}"')
        if (self.alpha > 0) != (self.algorithm == "feddyn"):
            raise ValueError(f'alpha = {self.alpha}: expected a number above 0 with the algorithm "feddyn", else 0')
        for mistake in self._private_mistakes():
            raise ValueError(mistake)

    @classmethod
    def from_config(cls, config: Mapping[str, Scalar]) -> LocalOptions:
        """Return the options of a job; other keys of its `[config]` are for the trainer. Raises `JobFileError`."""
        own = {name: value for name, value in config.items() if name in cls.__struct_fields__}
        return read_record(own, cls, "config.")

    @property
    def is_private(self) -> bool:
        """True if the training has example-level privacy."""
        return self.dp != "none"

    def _private_mistakes(self) -> Iterator[str]:
        """Yield the options that are invalid with this `dp`, each message beginning with its key."""
        for name in ("dp_noise_multiplier", "dp_max_grad_norm", "dp_delta"):
            value: float = getattr(self, name)
            if self.is_private and not value:
                yield f'{name} = {value:g}: expected a number above 0 with dp = "{self.dp}"'
            if value and not self.is_private:
                yield f'{name} = {value:g}: expected it with dp = "flat", "per_layer" or "ghost" only, and dp is "none"'
        if not self.is_private:
            return
        if self.max_grad_norm:
            yield f'max_grad_norm = {self.max_grad_norm:g}: expected only dp_max_grad_norm with dp = "{self.dp}"'
        if self.precision != "fp32":
            yield f'precision = "{self.precision}": expected "fp32" with dp = "{self.dp}": noise must be exact'
        if self.measure_before:
            yield f'measure_before = true: expected false with dp = "{self.dp}": the loss is not protected'

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round; rounds count from 1."""
        return self.learning_rate * self.learning_rate_decay ** (round_number - 1)

    def client_half(self) -> LocalAlgorithm:
        """Return the client's half of the algorithm, with these options."""
        match self.algorithm:
            case "sgd":
                return local.sgd()
            case "fedprox":
                return local.fedprox(self.mu)
            case "scaffold":
                return client_scaffold()
            case "feddyn":
                return client_feddyn(self.alpha)
