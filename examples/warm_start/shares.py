"""Who holds which digits: four clients most of them, and a small part is public.

The public part has no 7, 8 or 9: these only the clients can teach.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "private"))

import digits

CLIENTS = 4
PUBLIC = range(48, digits.NUM_CLIENTS)
"""The shares of the digits that are public; the clients hold the others."""

initial, held_out, train = digits.initial, digits.held_out, digits.train


def client_data(client: int) -> tuple[digits.Images, digits.Labels]:
    """What client 0 to 3 holds: a quarter of what is not public."""
    return _together(range(client, PUBLIC.start, CLIENTS))


def public_data() -> tuple[digits.Images, digits.Labels]:
    """What the server may use: about 200 digits."""
    images, labels = _together(PUBLIC)
    known = labels < 7
    return images[known], labels[known]


def _together(shares: range) -> tuple[digits.Images, digits.Labels]:
    images, labels = zip(*map(digits.client_data, shares), strict=True)
    return np.concatenate(images), np.concatenate(labels)
