"""How this process's C library gives memory back: hardly ever."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep() -> None:
    """Keeps freed memory for the next tensors, where the C library is glibc; else nothing happens.

    By default, every tensor of more than some 100 KiB is mapped anew from the kernel, which takes longer to clear its
    pages than a small convolution takes to compute: LeNet's step was 2.7 times faster without on one machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, _LARGE)
