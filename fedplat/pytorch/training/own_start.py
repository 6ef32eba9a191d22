"""The start of clients with models of their own: what they load, what they exchange with the server's model, and when.

A client reports a model, and its update is the rounded difference of this model and the received one. The client loses
exactly the same numbers, so that the sum of all models stays the same but for the rounding of the additions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedplat.aggregate.local import CONTROL, Arrays, LocalAlgorithm, LocalStart, StartContext
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training.learner import Trainee


class OwnStart:
    """The result of an algorithm's `start`, loaded into the module."""

    def __init__(
        self, algorithm: LocalAlgorithm, trainee: Trainee, parameters: Parameters, remembered: Arrays, rate: float
    ) -> None:
        """Load the client's model; the module must have the received values. Raises `ModelError`."""
        assert algorithm.start is not None
        self._trainee = trainee
        values = {name: value for name, value in backend.to_torch(parameters).items() if not name.startswith(CONTROL)}
        received = {
            name: value.to(trainee.device, copy=True) for name, value in values.items() if value.is_floating_point()
        }
        trained = [name for name in trainee.parameters() if name in received]
        start = algorithm.start(StartContext(received, remembered, trained, rate))
        self.metrics: Mapping[str, float] = start.metrics
        _check_names(start, received)
        self.reported = {name: received[name] + start.exchange[name] for name in received}
        exchange = {name: self.reported[name] - received[name] for name in received}
        self.exchange = {name: exchange[name] for name in trained}
        self._load(start.weights, exchange, trained)

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return all floating-point tensors of the client's model that are not personal."""
        tensors = self._trainee.shared_tensors()
        return {name: tensors[name].detach() for name in self.reported}

    def report(self, parameters: Parameters) -> None:
        """Write the model that the client reports: the received one plus the exchange."""
        for name, array in backend.to_arrays(self.reported).items():
            parameters[name][...] = array

    def _load(self, weights: Arrays, exchange: Arrays, trained: list[str]) -> None:
        module = self._trainee.shared_tensors()
        shared = {module[name].data_ptr() for name in trained}
        with torch.no_grad():
            for name, weight in weights.items():
                if name in trained:
                    module[name].copy_(weight)
                elif module[name].data_ptr() not in shared:  # else it is another name of a trained tensor
                    module[name].copy_(weight - exchange[name])


def _check_names(start: LocalStart, received: Arrays) -> None:
    for name, tensor in received.items():
        for arrays in (start.weights, start.exchange):
            if name not in arrays or arrays[name].shape != tensor.shape:
                raise ModelError(
                    f"the client's own model has no tensor {name!r} of the shape {list(tensor.shape)}; expected the "
                    "tensors of the job's model: it was stored for another model"
                )
