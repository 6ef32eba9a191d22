"""The model: a small network as a module of PyTorch Lightning."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import data


class LightningClassifier(LightningModule):
    """A network with one hidden layer. `job_config` is the table `[config]` of the job."""

    job_config: dict[str, float]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(data.NUM_FEATURES, 32), nn.ReLU(), nn.Linear(32, data.NUM_CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss and the accuracy, which the simulation reports."""
        inputs, labels = batch
        outputs = self.layers(inputs)
        self.log("val_loss", nn.functional.cross_entropy(outputs, labels))
        self.log("val_accuracy", (outputs.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of a client's training."""
        return torch.optim.SGD(self.parameters(), lr=self.job_config["learning_rate"])
