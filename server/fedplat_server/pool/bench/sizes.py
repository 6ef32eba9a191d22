"""Sizes as operators write them, and how much memory a measurement takes."""

from __future__ import annotations

import re
from pathlib import Path

from fedplat_server.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_VECTORS = 6
"""Vectors of the largest size that a rank has at once: its own three, one that is shared, and the library's copies."""


def parsed(text: str, option: str) -> int:
    """Bytes of `1KB`, `64M`, `1 GB` or `4096`: powers of 1024, as nccl-tests has them. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d{1,12}) ?([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ConfigError(f"{option} {text}: expected a size such as 1KB, 64MB or 1GB")
    return int(match[1]) * _UNITS[match[2]]


def shown(num_bytes: int) -> str:
    """`64 MB`, of 1024 each; sizes that are no multiple, because they are divided by the ranks, are rounded."""
    for unit in ("GB", "MB", "KB"):
        scale = _UNITS[unit[0]]
        if num_bytes > 0.99 * scale:
            return f"{num_bytes / scale:.0f} {unit}"
    return f"{num_bytes} B"


def powers(least: int, most: int, step: int) -> list[int]:
    """`least`, and its multiples by powers of `step` up to `most`, which is the last one."""
    found = [least]
    while found[-1] * step < most:
        found.append(found[-1] * step)
    return [*found, most] if most > found[-1] else found


def available(root: Path = Path("/")) -> int:
    """Bytes of this host's memory that can be had: what is free, and below the limit of a container."""
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    fields = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    free = 1024 * fields["MemAvailable"]
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text("ascii").strip()) != "max":
        free = min(free, int(text) - int(used.read_text("ascii")))
    return max(0, free)


def most_that_fits(ranks: int, memory: int) -> int:
    """Bytes of the largest vectors that all ranks have room for."""
    return memory // (_VECTORS * ranks)
