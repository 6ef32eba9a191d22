"""Tasks with layers that need care when clients are trained together."""

from __future__ import annotations

from torch import nn

from support.simulation.tasks import SIDE


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(200, 4))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(SIDE * SIDE, 4))
