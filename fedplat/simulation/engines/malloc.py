"""A setting of the C library: keep freed memory in this process."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep_freed_memory() -> None:
    """Keep freed memory for the next tensors. Does nothing if the C library is not glibc.

    By default, glibc maps every block of more than about 128 KiB anew, and the kernel takes longer to clear its pages
    than a small convolution takes to compute: with this setting a step of LeNet was 2.7 times faster on one machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, _LARGE)
