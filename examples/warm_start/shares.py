"""The partition of the digits: four clients have most of them, and a small part is public.

The public part has no 7, 8 or 9: only the clients have these digits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "private"))

import digits

CLIENTS = 4
PUBLIC = range(48, digits.NUM_CLIENTS)
"""The public shares of the digits; the clients have the others."""

initial, held_out, train = digits.initial, digits.held_out, digits.train


def client_data(client: int) -> tuple[digits.Images, digits.Labels]:
    """Return the data of client 0 to 3: a quarter of the digits that are not public."""
    return _concatenate(range(client, PUBLIC.start, CLIENTS))


def public_data() -> tuple[digits.Images, digits.Labels]:
    """Return the data of the server: about 200 digits."""
    images, labels = _concatenate(PUBLIC)
    known = labels < 7
    return images[known], labels[known]


def _concatenate(shares: range) -> tuple[digits.Images, digits.Labels]:
    images, labels = zip(*map(digits.client_data, shares), strict=True)
    return np.concatenate(images), np.concatenate(labels)
