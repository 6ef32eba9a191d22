"""The PyTorch module and the loss that a simulation file names.

Both can be sent to worker processes: the user's functions are pickled by name and folder.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedplat.config import user_code
from fedplat.errors import JobFileError
from fedplat.pytorch.training import Learner

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
}
"""The built-in mean losses of (outputs, targets), by name."""


@dataclasses.dataclass(frozen=True)
class OwnModule:
    """The user's function that creates the module."""

    name: str
    folder: Path
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Its keyword arguments."""

    def __call__(self) -> nn.Module:
        """Create a module. Raises `UserCodeError`, and `JobFileError` if the function returns something else."""
        module = user_code.call(self.name, self.folder, self.options)
        if not isinstance(module, nn.Module):
            raise JobFileError(
                f"{self.name} returned a {type(module).__name__}; expected a PyTorch module. If model.initial returns "
                'named tensors, name the function that makes the module: [simulation.model] module = "module:function"'
            )
        return module


@dataclasses.dataclass(frozen=True)
class OwnFunction:
    """A function of two arrays that the user has written: a loss, which answers are correct, or an example."""

    name: str
    folder: Path

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        with user_code.importable(self.name, self.folder):
            return user_code.load_function(self.name, self.folder)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the result for a batch, or for a row of inputs and one of targets."""
        return self._function(outputs, targets)

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "folder": self.folder}  # each process imports the function itself


def make_learner(module: str, loss: str, accuracy: str, folder: Path) -> Learner:
    """Return the learner of a table `[simulation.model]`; its functions are relative to `folder`."""
    correct: Any = accuracy if ":" not in accuracy else OwnFunction(accuracy, folder)
    return Learner(
        model=OwnModule(module, folder), loss=LOSSES.get(loss) or OwnFunction(loss, folder), accuracy=correct
    )
