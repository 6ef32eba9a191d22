"""The local training options in a job's `[config]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from fedplat import aggregate, errors
from fedplat.aggregate import algebra as ranges
from fedplat.config.plugins import BUILTIN, Plugins, build_checked, name_of
from fedplat.config.toml import format_value, read_name, read_record, suggest

Scalar = bool | int | float | str
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """The digests, from a job's `[config]`, of what all participants have themselves; "" for what it does not state."""

    base_sha256: str = ""
    tokenizer_sha256: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Scalar]) -> Pins:
        """Return the digests that a job states."""
        return cls(**{name: str(config.get(name, "")) for name in cls.__struct_fields__})


NO_PINS = Pins()


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a client's training. Raises `ValueError` for a value out of its range.

    A step uses the gradient of `batch_size * accumulate` examples, `batch_size` of them in memory at a time.
    """

    epochs: Count
    batch_size: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    """Examples of a batch; 0 for all of them."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e30)]
    max_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Steps of each training; 0 for those of `epochs`."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    keep_optimizer: bool = False
    """True if the optimizer continues with its state of the client's previous training, which is client state."""
    momentum: ranges.Decay = 0.0
    weight_decay: ranges.Coefficient = 0.0
    max_grad_norm: ranges.Coefficient = 0.0
    """Bound of the L2 norm of a step's gradient, before the algorithm adds to it; 0 for no bound."""
    accumulate: Count = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    algorithm: aggregate.LocalAlgorithmOptions = aggregate.LocalSgd()
    """The local algorithm; `[config]` has its name, and its options beside the keys of this record."""
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
    dp_max_grad_norm: ranges.Coefficient = 0.0
    """Bound of the L2 norm of each example's gradient."""
    dp_delta: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """The δ at which clients report their ε."""
    alternate: str = ""
    """Groups of trained tensors that take turns, one in each round, by names with wildcards and with commas between
    them: `"*lora_B*, *lora_A*"` trains all B in odd rounds, all A in even ones (RoLoRA). Empty: all in each round."""
    base_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """With a trainer of share = "trained": the SHA-256 of the tensors that are not trained, equal everywhere."""
    tokenizer_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """The SHA-256 of the tokenizer of all data, for clients that name theirs."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)
        if not self.batch_size and self.accumulate > 1:
            raise ValueError(f"accumulate = {self.accumulate}: expected 1 if a batch is all data (batch_size = 0)")
        if self.max_steps and self.epochs != 1:
            raise ValueError(
                f"max_steps = {self.max_steps}: it is the number of local steps, and epochs = {self.epochs} asks for "
                "another; expected epochs = 1 with max_steps, or max_steps = 0"
            )
        mistakes = *self._private_mistakes(), *self._optimizer_mistakes(), *self._algorithm_mistakes()
        for mistake in (*mistakes, *self._turn_mistakes()):
            raise ValueError(mistake)

    @classmethod
    def from_config(cls, config: Mapping[str, Scalar], plugins: Plugins = BUILTIN) -> LocalOptions:
        """Return the options of a job; other keys of its `[config]` are for the trainer.

        `plugins` are the names that `algorithm` may have besides the built-in ones. Raises `JobFileError`.
        """
        own = {name: value for name, value in config.items() if name in cls.__struct_fields__ and name != "algorithm"}
        mistakes: list[str] = []
        algorithm, options = None, None
        try:
            options = read_record(own, cls, "config.")
        except errors.JobFileError as exc:
            mistakes.append(str(exc))
        try:
            algorithm = read_algorithm(config, plugins)
        except errors.JobFileError as exc:
            mistakes.append(str(exc))
        if options is None or algorithm is None:
            raise errors.JobFileError("\n".join(mistakes))
        try:
            return msgspec.structs.replace(options, algorithm=algorithm)
        except ValueError as exc:
            raise errors.JobFileError(f"config.{exc}") from exc

    @property
    def keys(self) -> frozenset[str]:
        """The keys of `[config]` that these options are read from."""
        return frozenset({*self.__struct_fields__, *cast(msgspec.Struct, self.algorithm).__struct_fields__})

    def find_unknown(self, config: Mapping[str, Scalar]) -> dict[str, str]:
        """Return the keys of a `[config]` that are not in `keys`, each with a hint such as `; did you mean epochs?`."""
        return {key: suggest(key, self.keys) for key in config if key not in self.keys}

    @property
    def is_private(self) -> bool:
        """True if the training has example-level privacy."""
        return self.dp != "none"

    @property
    def algorithm_name(self) -> str:
        """The name of the algorithm in `[config]`."""
        return name_of(self.algorithm)

    @property
    def state_name(self) -> str:
        """The name of the algorithm's entry in the client state, which does not depend on how a file names a plugin."""
        return self.algorithm_name if self.is_builtin else f"algorithm.{type(self.algorithm).__name__}"[:63]

    @property
    def is_builtin(self) -> bool:
        """True if the algorithm is one of fedplat."""
        return type(self.algorithm) in aggregate.LOCAL_ALGORITHMS.values()

    @property
    def num_steps(self) -> int:
        """The number of local steps of each training, or 0 for those of `epochs`."""
        tau = self.algorithm.tau if isinstance(self.algorithm, aggregate.LocalEasgd) else 0
        return tau or self.max_steps

    def _turn_mistakes(self) -> Iterator[str]:
        if not self.alternate:
            return
        if self.keep_optimizer:
            yield explain_lost_moments(self.alternate)
        if not isinstance(self.algorithm, aggregate.LocalSgd | aggregate.LocalFedProx):
            yield (
                f'alternate = "{self.alternate}": with algorithm = "{self.algorithm_name}" a tensor that rests would '
                'lose its client state; expected "sgd" or "fedprox"'
            )

    def _optimizer_mistakes(self) -> Iterator[str]:
        if self.optimizer != "sgd" and self.momentum:
            yield f'momentum = {self.momentum:g}: expected 0 with optimizer = "{self.optimizer}", which has its own'

    def _algorithm_mistakes(self) -> Iterator[str]:
        """Yield why the algorithm cannot be used with the other options, each message beginning with a key."""
        if isinstance(self.algorithm, aggregate.LocalEasgd):
            yield from self._elastic_mistakes(self.algorithm)
        algorithm = self.build_algorithm()
        if self.optimizer != "sgd" and algorithm.needs_control:
            yield (
                f'optimizer = "{self.optimizer}": expected "sgd" with algorithm = "{self.algorithm_name}", whose '
                "control variates are means of the gradients of its steps"
            )
        if self.is_private and (algorithm.make_loss is not None or algorithm.perturb is not None):
            what = "its own loss" if algorithm.make_loss is not None else "gradients at other weights"
            yield (
                f'algorithm = "{self.algorithm_name}": it has {what}, and the guarantee of dp = "{self.dp}" rests on '
                'the gradients of single examples; expected dp = "none", or another algorithm'
            )
        if self.precision == "fp16" and algorithm.perturb is not None:
            yield (
                f'precision = "fp16": expected "fp32" or "bf16" with algorithm = "{self.algorithm_name}", whose '
                "offsets would depend on the scale of the gradients"
            )

    def _elastic_mistakes(self, elastic: aggregate.LocalEasgd) -> Iterator[str]:
        alpha = self.learning_rate * elastic.rho
        if alpha > 1.0:
            yield (
                f"rho = {elastic.rho:g}: with the learning rate {self.learning_rate:g} a client would move "
                f"{alpha:g} of its way to the centre, so beyond it; expected at most {1 / self.learning_rate:g}"
            )
        if elastic.tau and self.max_steps:
            yield f"tau = {elastic.tau}: expected either it or max_steps = {self.max_steps}, which has the same meaning"
        if elastic.tau and self.epochs != 1:
            yield (
                f"tau = {elastic.tau}: it is the number of local steps, and epochs = {self.epochs} asks for another; "
                "expected epochs = 1 with tau, or tau = 0"
            )

    def _private_mistakes(self) -> Iterator[str]:
        """Yield the options that are invalid with this `dp`, each message beginning with its key."""
        names = ("dp_noise_multiplier", "dp_max_grad_norm", "dp_delta")
        first, *others = [name for name in names if not getattr(self, name)] or [""]
        if self.is_private and first:
            more = f"; {' and '.join(others)} too" if others else ""
            yield f'{first} = 0: expected a number above 0 with dp = "{self.dp}"{more}'
        for name in names:
            if (value := getattr(self, name)) and not self.is_private:
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

    def build_algorithm(self) -> aggregate.LocalAlgorithm:
        """Return the algorithm; training uses that of `fedplat.pytorch.training.build_guarded_algorithm`.

        Raises `PluginError` or `UserCodeError` for an unusable plugin.
        """
        if self.is_builtin:
            return self.algorithm.build()
        return build_checked(self.algorithm, aggregate.LocalAlgorithm, "config.algorithm")


def explain_lost_moments(alternate: str) -> str:
    """Return why tensors that take turns have no kept optimizer."""
    return (
        f'alternate = "{alternate}": a tensor that rests would lose its optimizer\'s state; expected '
        "keep_optimizer = false"
    )


def read_algorithm(config: Mapping[str, Scalar], plugins: Plugins = BUILTIN) -> aggregate.LocalAlgorithmOptions:
    """Return the options of the local algorithm that a `[config]` names. Raises `JobFileError`."""
    record = read_name(config.get("algorithm", "sgd"), aggregate.LOCAL_ALGORITHM, "config.algorithm", plugins)
    name = str(record.__struct_config__.tag)
    for key in record.__struct_fields__:
        if key in LocalOptions.__struct_fields__:
            raise errors.JobFileError(
                f'config.algorithm = "{name}": {record.__name__} has a field {key}, which is an option of each local '
                "training; expected another name"
            )
    for other, builtin in aggregate.LOCAL_ALGORITHMS.items():
        if builtin is aggregate.LocalEasgd:
            continue  # its rule demands the algorithm, and other trainings have keys of these names
        for key in cast(type[msgspec.Struct], builtin).__struct_fields__:
            if config.get(key) and key not in record.__struct_fields__:
                raise errors.JobFileError(
                    f'config.{key} = {format_value(config[key])}: only the algorithm "{other}" has it, and this is '
                    f'"{name}"'
                )
    own = {key: value for key, value in config.items() if key in record.__struct_fields__}
    return cast(aggregate.LocalAlgorithmOptions, read_record({"algorithm": name, **own}, record, "config.", plugins))
