"""The model: a small network in PyTorch."""

from __future__ import annotations

from torch import nn

import data


def build() -> nn.Module:
    """Build the network; its initial values are random."""
    return nn.Sequential(nn.Linear(data.NUM_FEATURES, 32), nn.ReLU(), nn.Linear(32, data.NUM_CLASSES))
