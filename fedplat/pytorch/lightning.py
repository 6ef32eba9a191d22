"""The learner of PyTorch Lightning's modules (extra "lightning").

A training is a run of Lightning's own `Trainer` from the received weights: `training_step`, `configure_optimizers` and
the module's hooks mean what they mean there. The job's `[config]` is the module's attribute `job_config`.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from typing_extensions import override

from fedplat.config import toml, user_code
from fedplat.errors import DataError, JobFileError, MissingExtraError, ModelError
from fedplat.extras import install_command
from fedplat.learner import Config, Data, check_data
from fedplat.model import Parameters
from fedplat.pytorch import convert, training

try:
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden

except ImportError as exc:
    raise MissingExtraError(
        f"PyTorch Lightning is not installed; install it with: {install_command('lightning')}"
    ) from exc
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

LightningData: TypeAlias = Data | Dataset[Any] | DataLoader[Any] | LightningDataModule
"""Arrays, a dataset, a loader with batches of its own, or a data module."""
_RUNS = threading.Lock()
"""PyTorch's random state, warning filters and the levels of loggers belong to the process."""
_LOGGERS = ("lightning.pytorch", "lightning.fabric")


class LightningConfig(Struct, frozen=True):
    """The keys of `[config]` that the training itself uses; the module may read these and others."""

    epochs: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    max_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Steps of each training, of every optimizer; 0 for those of `epochs`."""
    batch_size: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 32
    """Examples of a batch; 0 for all of them. A loader or a data module has its own."""

    def __post_init__(self) -> None:
        if self.max_steps and self.epochs != 1:
            raise ValueError(
                f"max_steps = {self.max_steps}: it is the number of local steps, and epochs = {self.epochs} asks for "
                "another; expected epochs = 1 with max_steps, or max_steps = 0"
            )


@dataclass(frozen=True)
class OwnLightningModule:
    """The class of the user's module, or a function that creates it, with keyword options."""

    name: str
    folder: Path
    options: Mapping[str, Any]

    def __call__(self) -> LightningModule:
        """Create a module. Raises `UserCodeError`, and `JobFileError` if it is something else."""
        module = user_code.call(self.name, self.folder, self.options)
        if not isinstance(module, LightningModule):
            raise JobFileError(
                f"{self.name} is a {type(module).__name__}; expected a LightningModule of the package `lightning` "
                "(those of the package `pytorch_lightning` are other classes)"
            )
        return module


@dataclass(frozen=True)
class _OwnModule:
    """A module, and its base if only the other tensors are shared."""

    module: LightningModule
    base: training.FrozenBase | None

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}


@dataclass(frozen=True)
class LightningLearner:
    """Trains a `LightningModule` with one device; `device` is Lightning's `accelerator`, such as "cpu" or "auto".

    The batches of arrays and datasets are those of `fedplat.pytorch.training`, so a module that does the same steps
    gets the same bits. Checkpoints, loggers and progress bars are off.
    """

    module: Callable[[], LightningModule]
    """Creates the module; the job's values replace its initial ones."""
    device: str = "cpu"
    share: training.Share = "all"
    """With "trained" the job's model has only what training changes, see `fedplat.pytorch.training.Learner`. The module
    is then made once for all trainings and evaluations, since a base may take minutes to load."""
    _idle: training.IdleModules[_OwnModule] = field(
        default_factory=training.IdleModules, init=False, repr=False, compare=False
    )

    def initial(self, seed: int = 0) -> Parameters:
        """Return the values of a new module, without its base if only what is trained is shared."""
        with _RUNS, training.use_seed(torch.device("cpu"), seed):
            module = self.module()
        base = self._find_base(module)
        state = module.state_dict()
        return convert.from_state_dict({name: state[name] for name in state if base is None or name not in base.names})

    def base_sha256(self) -> str:
        """Return the SHA-256 of a new module's base. Raises `ModelError` if it has none."""
        with _RUNS, training.use_seed(torch.device("cpu"), 0):
            base = self._find_base(self.module())
        if base is None:
            raise ModelError('a learner with share = "all" has no base; expected share = "trained"')
        return base.sha256

    def train(
        self,
        parameters: Parameters,
        data: LightningData,
        config: Config,
        seed: int,
        after_step: Callable[[float], object] = lambda done: None,
    ) -> dict[str, float]:
        """Train the model in place; return `loss`, the mean over the last epoch, and the metrics that are logged.

        The prefix "train_" of a metric is removed. If the steps return no loss, there is only one that is logged. With
        several optimizers `local_steps` is the mean of their steps. Raises `ModelError`, `DataError`, and what the
        module raises.
        """
        options = _read(config)
        with self._borrow(parameters, config) as own:
            module = own.module
            with _RUNS, _quiet(), training.use_seed(torch.device("cpu"), seed):
                observer = _Observer(options, after_step)
                max_epochs = -1 if options.max_steps else options.epochs  # the observer ends the training
                trainer = self._trainer(max_epochs=max_epochs, limit_val_batches=0, callbacks=[observer])
                if isinstance(data, LightningDataModule):
                    cast(Any, data).job_config = dict(config)
                    trainer.fit(module, datamodule=data)
                else:
                    smallest = 2 if any(isinstance(part, _BATCH_NORMS) for part in module.modules()) else 1
                    trainer.fit(module, _make_loader(data, options.batch_size, smallest, seed))
            if own.base is not None:
                own.base.check_unchanged()
            state = module.state_dict()
            parameters.assign(convert.to_arrays({name: state[name] for name in parameters if name in state}))
        if not parameters.is_finite():
            raise DataError("the training has diverged: the model holds NaN or infinite values")
        logged = _metrics(trainer.callback_metrics, "train_")
        return {**logged, **observer.metrics, "local_steps": _count_steps(trainer)}

    def evaluate(self, parameters: Parameters, data: LightningData, config: Config | None = None) -> dict[str, float]:
        """Return the metrics that `validation_step` logs, without the prefix "val_"; none if there is no such step."""
        given = {} if config is None else config
        with (
            self._borrow(parameters, given) as own,
            _RUNS,
            _quiet(),
            training.use_seed(torch.device("cpu"), 0),
        ):
            module = own.module
            if not is_overridden("validation_step", module):
                return {}
            trainer = self._trainer()
            if isinstance(data, LightningDataModule):
                cast(Any, data).job_config = dict(given)
                trainer.validate(module, datamodule=data, verbose=False)
            else:
                loader = data if isinstance(data, DataLoader) else DataLoader(_make_dataset(data), _EVALUATION_BATCH)
                trainer.validate(module, loader, verbose=False)
            return _metrics(trainer.callback_metrics, "val_")

    def require_base(self, config: Config) -> None:
        """Raise `ModelError` if modules have a base and a job's `[config]` states none."""
        if self.share == "trained" and not config.get("base_sha256"):
            raise ModelError(training.explain_missing_base(self.base_sha256()))

    def check_config(self, config: Config) -> None:
        """Raise `JobFileError` for an invalid value of `epochs`, `max_steps` or `batch_size`."""
        _read(config)

    @contextmanager
    def _borrow(self, parameters: Parameters, config: Config) -> Generator[_OwnModule]:
        """Give the block a module with these parameters, which no other task uses."""
        sha256 = str(config.get("base_sha256", ""))
        with self._idle.borrow(self._make, sha256, is_required=False) as own:
            convert.load_into(own.module, parameters, None if own.base is None else own.base.check_fit)
            cast(Any, own.module).job_config = dict(config)
            yield own

    def _make(self) -> _OwnModule:
        with _RUNS, _quiet(), training.use_seed(torch.device("cpu"), 0):
            module = self.module()
            return _OwnModule(module, self._find_base(module))

    def _find_base(self, module: LightningModule) -> training.FrozenBase | None:
        return training.FrozenBase(module) if self.share == "trained" else None

    def _trainer(self, **options: Any) -> Trainer:
        return Trainer(
            accelerator=self.device,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            **options,
        )


_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
_EVALUATION_BATCH = 256


class EpochBatches:
    """The indices of each batch: every epoch is a new permutation, as in `fedplat.pytorch.training.StepSchedule`."""

    def __init__(self, num_examples: int, batch_size: int, smallest: int, seed: int) -> None:
        size = batch_size or num_examples
        left_out = num_examples > size and num_examples % size < smallest
        self._num_examples, self._size = num_examples, size
        self._used = num_examples - (num_examples % size if left_out else 0)
        self._rng = np.random.default_rng([seed, 0])

    def __len__(self) -> int:
        return math.ceil(self._used / self._size)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._rng.permutation(self._num_examples)[: self._used].tolist()
        return (order[start : start + self._size] for start in range(0, self._used, self._size))


class _Observer(Callback):
    """Measures the mean loss of the last epoch, and reports the completed part of the training."""

    def __init__(self, options: LightningConfig, after_step: Callable[[float], object]) -> None:
        self._options, self._after_step = options, after_step
        self._losses: list[tuple[float, int]] = []

    @property
    def metrics(self) -> dict[str, float]:
        """`loss`, the mean of the last epoch's examples; none if the steps returned no loss (manual optimization)."""
        num_examples = sum(count for _, count in self._losses)
        return {"loss": sum(loss * count for loss, count in self._losses) / num_examples} if num_examples else {}

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append((float(loss.detach()), _count(batch)))
        if self._options.max_steps:
            done = _count_steps(trainer) / self._options.max_steps
            trainer.should_stop = done >= 1.0
        else:
            batches = max(1, float(trainer.num_training_batches))
            done = (trainer.current_epoch + (batch_idx + 1) / batches) / self._options.epochs
        self._after_step(min(1.0, done))


def _count_steps(trainer: Trainer) -> float:
    """Return the steps so far: with several optimizers the mean of theirs."""
    return trainer.global_step / max(1, len(trainer.optimizers))


def count_examples(data: LightningData) -> int:
    """Return the number of examples to train on. Raises `DataError` if it is unknown or 0."""
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = cast("DataLoader[Any]", data.train_dataloader())
    examples = data.dataset if isinstance(data, DataLoader) else _make_dataset(data)
    try:
        count = len(cast(Any, examples))
    except TypeError as exc:
        raise DataError(f"the data {type(examples).__name__} has no length; expected a map-style dataset") from exc
    if not count:
        raise DataError("there are no examples; expected at least one")
    return count


def _make_loader(
    data: Data | Dataset[Any] | DataLoader[Any], batch_size: int, smallest: int, seed: int
) -> DataLoader[Any]:
    if isinstance(data, DataLoader):
        return data
    count_examples(data)
    dataset = _make_dataset(data)
    batches = EpochBatches(len(cast(Any, dataset)), batch_size, smallest, seed)
    # A loader without its own generator draws from the global one, which the module's dropout also uses.
    return DataLoader(dataset, batch_sampler=cast(Any, batches), generator=torch.Generator())


def _make_dataset(data: Data | Dataset[Any]) -> Dataset[Any]:
    """Return a dataset; arrays become tensors, float64 as float32 and integers as int64."""
    if isinstance(data, Dataset):
        return data
    return TensorDataset(*(_to_tensor(array) for array in check_data(data)))


def _to_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    dtype = {"f": np.float32, "i": np.int64, "u": np.int64}.get(array.dtype.kind, array.dtype)
    return torch.from_numpy(np.array(array, dtype=dtype))


def _count(batch: Any) -> int:
    """Return the number of examples of a batch: the length of its first tensor."""
    while isinstance(batch, list | tuple | Mapping) and batch:
        batch = next(iter(cast(Any, batch.values() if isinstance(batch, Mapping) else batch)))
    return len(batch) if isinstance(batch, torch.Tensor) and batch.ndim else 1


def _metrics(logged: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return logged numbers by name, without the prefix and without those of single steps."""
    found = {
        name.removesuffix("_epoch").removeprefix(prefix): float(value)
        for name, value in logged.items()
        if not name.endswith("_step")
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _read(config: Config) -> LightningConfig:
    own = {name: value for name, value in config.items() if name in LightningConfig.__struct_fields__}
    return toml.read_record(own, LightningConfig, "config.")


@contextmanager
def _quiet() -> Generator[None]:
    """Turn off Lightning's hints to its users, such as to use more processes to load data."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)  # of PyTorch, to it
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
