"""The memory of a process that moves files by gRPC: for programs of our own, never for those that import us."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MESSAGE = 16 * 2**20
_KEPT = 32 * 2**20


def reuse_message_memory() -> None:
    """Lets glibc keep the memory of messages, up to 32 MiB of it, for the next ones.

    Otherwise it gives that of many a message of 1 MiB back to the kernel, which clears the pages again for the next
    one, and keeps some for each thread: a sixth of the CPU time of all transfers. Larger arrays still come from the
    kernel and go back at once. Does nothing elsewhere, or if the environment says how to allocate.
    """
    if not sys.platform.startswith("linux") or any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_ARENA_MAX, 2)


def keep_what_is_loaded() -> None:
    """Takes what a program has loaded out of the garbage collector's rounds.

    Code lives as long as the process; walking through all of it again and again was a twentieth of the CPU time of
    a round of large models, in clients more than in the server.
    """
    gc.collect()
    gc.freeze()
