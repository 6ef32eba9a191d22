"""Local training for ordinary PyTorch users (extra "torch")."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedplat.errors import MissingExtraError
from fedplat_client.task import EvaluateResult, Scalar, Task, TrainResult

try:
    import torch
except ImportError as exc:
    raise MissingExtraError(
        "TorchTrainer needs PyTorch, which is not installed; install it with: pip install 'fedplat-client[torch]'"
    ) from exc
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedplat.backends import torch as backend

Data: TypeAlias = Dataset[Any] | Callable[[Task], Dataset[Any]]
Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter], Mapping[str, Scalar]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter], config: Mapping[str, Scalar]) -> torch.optim.Optimizer:
    """SGD with the job's `learning_rate` and, if it has one, its `momentum`."""
    return torch.optim.SGD(parameters, lr=_number(config, "learning_rate"), momentum=float(config.get("momentum", 0.0)))


@dataclass(frozen=True, kw_only=True)
class TorchTrainer:
    """A trainer and an evaluator made of a module and a dataset of (input, target) pairs.

    ```python
    trainer = TorchTrainer(model=make_model, data=dataset)
    client.add_trainer("digits", trainer)
    client.add_evaluator("digits", trainer.evaluate)
    ```

    The job's configuration gives `epochs`, `batch_size` and what the optimizer reads. Equal seeds, data and
    tasks give equal bits on one CPU; each round draws anew. PyTorch's global random state is left as it was.
    """

    model: Callable[[], nn.Module]
    """Makes the module; the server's values replace its initial ones."""
    data: Data
    """A dataset with a length, or a function that makes one for a task."""
    loss: Loss = nn.functional.cross_entropy
    """Mean loss of a batch of (output, target)."""
    optimizer: MakeOptimizer = sgd
    device: str = "auto"
    """A PyTorch device; "auto" is CUDA when there is one, else the CPU."""
    seed: int = 0

    def __post_init__(self) -> None:
        # The first optimizer of a process imports much of PyTorch: seconds that no deadline should pay for.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)

    def __call__(self, task: Task) -> TrainResult:
        """Trains for `config["epochs"]` epochs."""
        epochs, batch_size = _count(task.config, "epochs"), _count(task.config, "batch_size")
        dataset, num_examples = self._dataset(task)
        device = self._device()
        with _seeded(device, self.seed, task) as generator:
            module = self._module(task, device).train()
            optimizer = self.optimizer(module.parameters(), task.config)
            # BatchNorm cannot train on a single example; shuffling leaves out another one each time.
            drop_last = _has_batch_norm(module) and num_examples > batch_size and num_examples % batch_size == 1
            loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator, drop_last=drop_last)
            scores = _Scores()
            for epoch in range(epochs):
                scores = _Scores()
                for index, (inputs, targets) in enumerate(loader):
                    optimizer.zero_grad(set_to_none=True)
                    outputs = module(inputs.to(device))
                    loss = self.loss(outputs, targets := targets.to(device))
                    loss.backward()
                    optimizer.step()
                    scores.add(loss, outputs, targets)
                    task.progress((epoch + (index + 1) / len(loader)) / epochs)
        backend.copy_from_state_dict(task.parameters, module.state_dict())
        return TrainResult(parameters=task.parameters, num_examples=num_examples, metrics=scores.means())

    def evaluate(self, task: Task) -> EvaluateResult:
        """Measures the task's parameters on the dataset, without training."""
        dataset, num_examples = self._dataset(task)
        device = self._device()
        batch_size = _count(task.config, "batch_size") if "batch_size" in task.config else 256
        scores = _Scores()
        with _seeded(device, self.seed, task), torch.no_grad():
            module = self._module(task, device).eval()
            loader = DataLoader(dataset, batch_size=batch_size)
            for index, (inputs, targets) in enumerate(loader):
                outputs = module(inputs.to(device))
                scores.add(self.loss(outputs, targets := targets.to(device)), outputs, targets)
                task.progress((index + 1) / len(loader))
        return EvaluateResult(num_examples=num_examples, metrics=scores.means())

    def _device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _module(self, task: Task, device: torch.device) -> nn.Module:
        module = self.model()
        backend.load_into(module, task.parameters)
        return module.to(device)

    def _dataset(self, task: Task) -> tuple[Dataset[Any], int]:
        dataset = self.data if isinstance(self.data, Dataset) else self.data(task)
        if not isinstance(dataset, Sized):
            raise ValueError(f"the dataset {type(dataset).__name__} has no length; expected a map-style dataset")
        if not len(dataset):
            raise ValueError("the client's dataset is empty; expected at least one example to train or evaluate on")
        return dataset, len(dataset)


class _Scores:
    """Sums of a loss, and of the right answers where the targets are classes; on the device until they are read."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._hits: list[torch.Tensor] = []
        self._num_examples = 0
        self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._losses.append(loss.detach() * len(targets))
        self._num_examples += len(targets)
        if outputs.ndim == targets.ndim + 1 and not targets.is_floating_point():
            self._hits.append((outputs.detach().argmax(1) == targets).sum())
            self._num_answers += targets.numel()

    def means(self) -> dict[str, float]:
        means = {"loss": torch.stack(self._losses).double().sum().item() / self._num_examples}
        if self._num_answers:
            means["accuracy"] = torch.stack(self._hits).sum().item() / self._num_answers
        return means


@contextmanager
def _seeded(device: torch.device, seed: int, task: Task) -> Generator[torch.Generator]:
    """Seeds PyTorch for one task, and yields a generator for shuffling."""
    model_seed, data_seed = np.random.SeedSequence([seed, task.round, task.attempt]).generate_state(2)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(model_seed))
        yield torch.Generator().manual_seed(int(data_seed))


def _has_batch_norm(module: nn.Module) -> bool:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return any(isinstance(part, kinds) for part in module.modules())


def _setting(config: Mapping[str, Scalar], key: str) -> Scalar:
    if key not in config:
        raise ValueError(f"the job's configuration has no {key!r}; expected a number. Add it to the job file")
    return config[key]


def _number(config: Mapping[str, Scalar], key: str) -> float:
    value = _setting(config, key)
    if isinstance(value, bool | str):
        raise ValueError(f"the job's configuration has {key} = {value!r}; expected a number")
    return float(value)


def _count(config: Mapping[str, Scalar], key: str) -> int:
    value = _setting(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"the job's configuration has {key} = {value!r}; expected a whole number of at least 1")
    return value
