"""The sum of updates in the memory of an accelerator.

Windows of an update are copied there through two pinned buffers: one is copied while the other is filled. The product
and the sum are two operations, each rounded to float32. A fused operation would round once, and give other bits than
NumPy.
"""

from __future__ import annotations

import numpy as np
import torch

from fedplat.model import WINDOW, Vector

_SPARE_BYTES = 8 * 4 * WINDOW
"""Memory besides the sum: two windows of an update, and temporary memory of PyTorch."""


def device_sum(size: int, device: torch.device, free_bytes: int | None = None) -> DeviceSum | None:
    """Return a sum of `size` zeros on an accelerator; None without one, or if it has too little memory.

    `free_bytes` is the free memory of the device; None: as the device reports it.
    """
    if device.type != "cuda" and free_bytes is None:
        return None
    if free_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
    if 4 * size + _SPARE_BYTES > free_bytes:
        return None
    try:
        return DeviceSum(torch.zeros(size, dtype=torch.float32, device=device))
    except torch.OutOfMemoryError:  # another process has allocated the memory since
        return None


class DeviceSum:
    """A `DeviceAccumulator` in a tensor. It moves to the host's memory if the device runs out of memory."""

    def __init__(self, sum_: torch.Tensor) -> None:
        """`sum_`: float32 [size], to which updates are added in place."""
        self._sum = sum_
        self._host: Vector | None = None
        on_gpu, length = sum_.device.type == "cuda", min(WINDOW, len(sum_))
        self._staged = [torch.empty(length, pin_memory=on_gpu) for _ in range(2)]
        self._windows = [torch.empty(length, device=sum_.device) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)] if on_gpu else []
        self._turn = 0

    def add(self, start: int, values: Vector, weight: float) -> None:
        """Add values times a weight to the entries from `start` on."""
        if self._host is None:
            try:
                return self._add(start, values, weight)
            except torch.OutOfMemoryError:  # nothing was added: the addition is the last operation
                self._host = self.total()
        self._host[start : start + values.size] += np.multiply(values, weight, dtype=np.float32)

    def total(self) -> Vector:
        """Return the sum, in the host's memory."""
        return self._sum.cpu().numpy().copy() if self._host is None else self._host

    def _add(self, start: int, values: Vector, weight: float) -> None:
        turn = self._turn = 1 - self._turn
        if self._done:
            self._done[turn].synchronize()  # wait for the copy of two windows ago
        staged, window = self._staged[turn][: values.size], self._windows[turn][: values.size]
        staged.numpy()[:] = values
        window.copy_(staged, non_blocking=True)
        if weight != 1:
            window.mul_(float(np.float32(weight)))
        self._sum[start : start + values.size].add_(window)
        if self._done:
            self._done[turn].record()
