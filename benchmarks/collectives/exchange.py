"""Messages between two ranks, from which the implementations are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import distributed

Messages: TypeAlias = Sequence[tuple[torch.Tensor, int]]
"""Tensors, and the rank to send each to, or to receive it from."""


def exchange(sends: Messages = (), receives: Messages = ()) -> None:
    """Send to some ranks and receive from others at the same time."""
    operations = [distributed.P2POp(distributed.irecv, values, rank) for values, rank in receives]
    operations += [distributed.P2POp(distributed.isend, values, rank) for values, rank in sends]
    if operations:
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
