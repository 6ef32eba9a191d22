"""Least-recently-used eviction in a folder of limited size."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path


def make_room(
    folder: Path, size_bytes: int, limit_bytes: int, spared: Collection[str], evicted: Callable[[Path, int], None]
) -> bool:
    """Delete the least recently used files until `size_bytes` fit into the limit; return False if they cannot.

    `size_bytes` counts all files with a stem in `spared`; these are not deleted. `evicted` is called with each deleted
    file and its size. Raises `OSError`.
    """
    others = [path for path in folder.iterdir() if path.stem not in spared]
    used = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in others)
    excess = sum(size for _, size, _ in used) + size_bytes - limit_bytes
    for _, size, path in used:
        if excess <= 0:
            break
        path.unlink()
        excess -= size
        evicted(path, size)
    return excess <= 0
