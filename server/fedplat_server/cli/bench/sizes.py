"""Sizes on the command line, and the memory that a measurement needs."""

from __future__ import annotations

import re
from pathlib import Path

from fedplat_server.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_NUM_VECTORS = 6
"""The vectors of the largest size in a rank's memory: three buffers, one in shared memory, and the library's copies."""


def parse(text: str, option: str) -> int:
    """Return the bytes of `1KB`, `64M`, `1 GB` or `4096`: powers of 1024, as in nccl-tests. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d{1,12}) ?([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ConfigError(f"{option} {text}: expected a size such as 1KB, 64MB or 1GB")
    return int(match[1]) * _UNITS[match[2]]


def format_size(num_bytes: int) -> str:
    """Return a size as `64 MB`, with units of 1024; sizes between multiples of a unit are rounded."""
    for unit in ("GB", "MB", "KB"):
        scale = _UNITS[unit[0]]
        if num_bytes > 0.99 * scale:
            return f"{num_bytes / scale:.0f} {unit}"
    return f"{num_bytes} B"


def list_powers(smallest: int, largest: int, step: int) -> list[int]:
    """Return `smallest`, its multiples by powers of `step` below `largest`, and `largest`."""
    powers = [smallest]
    while powers[-1] * step < largest:
        powers.append(powers[-1] * step)
    return [*powers, largest] if largest > powers[-1] else powers


def available_memory(root: Path = Path("/")) -> int:
    """Return the free memory in bytes, within the limit of the container (cgroup v2). `root` is the file system."""
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    fields = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    free = 1024 * fields["MemAvailable"]
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text("ascii").strip()) != "max":
        free = min(free, int(text) - int(used.read_text("ascii")))
    return max(0, free)


def largest_that_fits(ranks: int, memory: int) -> int:
    """Return the largest vector size that the memory suffices for, in bytes."""
    return memory // (_NUM_VECTORS * ranks)
