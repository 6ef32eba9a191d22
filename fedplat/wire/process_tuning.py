"""Memory settings for processes that transfer files by gRPC: for fedplat's own programs, not for library users."""

from __future__ import annotations

import gc
import os
import sys

from fedplat import system

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MESSAGE = 16 * 2**20
_KEPT = 32 * 2**20


def reuse_message_memory() -> None:
    """Configure glibc to keep up to 32 MiB of freed message memory for the next messages.

    By default glibc returns the memory of many 1 MiB messages to the kernel, which clears the pages again for the next
    message, and keeps some per thread: a sixth of the CPU time of all transfers. Larger arrays still use memory from
    the kernel and return it at once. Does nothing on other systems, or if the environment configures malloc.
    """
    if not sys.platform.startswith("linux") or any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        return
    mallopt = system.find_c_function("mallopt")  # musl does not have it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_ARENA_MAX, 2)


def keep_what_is_loaded() -> None:
    """Exclude loaded code from garbage collection.

    Code lives as long as the process; traversing all of it repeatedly took a twentieth of the CPU time of a round with
    large models, in clients more than in the server.
    """
    gc.collect()
    gc.freeze()
