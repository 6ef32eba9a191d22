"""Distributed SGD with attackers, as an engine of the simulation. Each task is one step of one worker.

Source: Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", arXiv 2006.09365,
Section 6, and its published code (`epfml/byzantine-robust-noniid-optimizer`), with the same settings. A good worker
has a momentum, m ← β m + g, and reports -m; the job's rule computes the server's step from these reports. Attackers can
read the reports of the good workers in the same round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.simulation.data import Dataset
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate

BATCH_SIZE = 32
BATCHES_BEFORE_A_SHUFFLE = 30
IPM_SCALE = 0.1
_ORDER, _DROPOUT = 1, 2


def network() -> nn.Module:
    """Build the CNN of the published code, without a ReLU after its second convolution; 1,199,882 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


class Workers:
    """An engine with `num_good` workers with sorted parts of the data, followed by `num_bad` attackers."""

    def __init__(self, data: Dataset, num_good: int, num_bad: int, attack: str, momentum: float, seed: int) -> None:
        order = np.argsort(data.targets, kind="stable")
        self._parts = np.split(order[: len(order) // num_good * num_good], num_good)
        self._everything = np.arange(len(data.targets))
        self._inputs, self._targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
        self._test = torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_targets)
        self._num_good, self._num_bad, self._attack = num_good, num_bad, attack
        self._momentum, self._seed = momentum, seed
        # The published simulator restores torch's state after each worker, so all drop the same units, in all steps.
        self._dropout = int(np.random.SeedSequence([seed, _DROPOUT]).generate_state(1)[0])
        torch.manual_seed(seed)
        # With this memory format scoring takes half the time. torch's types omit `memory_format`.
        self._module = network().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._buffers: list[torch.Tensor | None] = [None] * num_good
        self._models: dict[int, Parameters] = {}
        self._reports: dict[int, list[torch.Tensor]] = {}
        self.initial = backend.from_state_dict(self._module.state_dict())

    @property
    def num_clients(self) -> int:
        """The number of good workers and attackers."""
        return self._num_good + self._num_bad

    def num_examples(self, client: int) -> int:
        """Return the number of examples of a step."""
        return BATCH_SIZE

    def publish(self, version: int, model: Parameters) -> None:
        """Store a committed version."""
        self._models[version] = model

    def retire(self, version: int) -> None:
        """Delete a version that no further task will use."""
        self._models.pop(version, None)
        self._reports.pop(version, None)

    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Do nothing: all steps of a version are computed together with its first result."""

    def result(self, task: ClientTask) -> LocalUpdate:
        """Return the step of a worker, as its update."""
        if task.version not in self._reports:
            self._reports[task.version] = self._step(task.version)
        return LocalUpdate(self._update(-self._reports[task.version][task.client]), float(BATCH_SIZE))

    def drop(self, task: ClientTask) -> None:
        """Do nothing: no resources belong to a single task."""

    def client_states(self) -> Mapping[int, Mapping[str, Parameters]]:
        """Return the momenta of the good workers."""
        pairs = enumerate(self._buffers)
        return {worker: {"momentum": self._update(buffer)} for worker, buffer in pairs if buffer is not None}

    def set_client_states(self, client_states: Mapping[int, Mapping[str, Parameters]]) -> None:
        """Replace the momenta."""
        self._buffers = [None] * self._num_good
        for worker, named in client_states.items():
            self._buffers[worker] = torch.from_numpy(named["momentum"].to_vector().copy())

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Compute accuracy and loss on the test images."""
        self._module.load_state_dict(backend.to_torch(model))
        self._module.eval()
        loss, correct = 0.0, 0
        with torch.no_grad():
            for inputs, targets in zip(*(each.split(100) for each in self._test), strict=True):
                outputs = self._module(inputs.contiguous(memory_format=torch.channels_last))
                loss += float(nn.functional.cross_entropy(outputs, targets, reduction="sum"))
                correct += int((outputs.argmax(1) == targets).sum())
        total = len(self._test[1])
        return {"accuracy": correct / total, "loss": loss / total if math.isfinite(loss) else -1.0}

    def close(self) -> None:
        """Do nothing: all memory is freed with the engine."""

    def _step(self, version: int) -> list[torch.Tensor]:
        """Compute the reports of all workers in the round that starts from a version."""
        self._module.load_state_dict(backend.to_torch(self._models[version]))
        self._module.train()
        for worker, part in enumerate(self._parts):
            gradient, buffer = self._gradient(version, worker, part), self._buffers[worker]
            self._buffers[worker] = gradient if buffer is None else buffer.mul_(self._momentum).add_(gradient)
        good = [buffer.clone() for buffer in self._buffers if buffer is not None]
        return good + self._attacks(version, torch.stack(good))

    def _attacks(self, version: int, good: torch.Tensor) -> list[torch.Tensor]:
        if self._attack == "bit-flip":
            # These attackers have data of all classes, and no momentum.
            rest = range(self._num_good, self.num_clients)
            return [-self._gradient(version, worker, self._everything) for worker in rest]
        if self._attack == "ipm":
            return [-IPM_SCALE * good.mean(0)] * self._num_bad
        assert self._attack == "alie"
        supporters = self.num_clients // 2 + 1 - self._num_bad
        z = statistics.NormalDist().inv_cdf((self._num_good - supporters) / self._num_good)
        mean = good.mean(0)
        # torch's `std` over the first dimension is three times slower.
        deviation = ((good - mean).square_().sum(0) / (self._num_good - 1)).sqrt_()
        return [mean - z * deviation] * self._num_bad

    def _gradient(self, version: int, worker: int, part: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        epoch, number = divmod(version, BATCHES_BEFORE_A_SHUFFLE)
        shuffled = np.random.default_rng([self._seed, _ORDER, worker, epoch]).permutation(part)
        first = number * BATCH_SIZE % max(1, len(part) - BATCH_SIZE + 1)
        batch = torch.from_numpy(shuffled[first : first + BATCH_SIZE])
        torch.manual_seed(self._dropout)
        loss = nn.functional.cross_entropy(self._module(self._inputs[batch]), self._targets[batch])
        gradients = torch.autograd.grad(loss, list(self._module.parameters()))
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def _update(self, vector: torch.Tensor) -> Parameters:
        sizes = [array.size for array in self.initial.values()]
        parts = vector.split(sizes)
        named = zip(self.initial.items(), parts, strict=True)
        return Parameters.from_arrays({name: part.reshape(array.shape).numpy() for (name, array), part in named})
