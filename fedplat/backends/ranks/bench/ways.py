"""The table of what is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fedplat.backends.ranks import Vectors
from fedplat.backends.ranks.bench import library, ring, star, tree
from fedplat.backends.ranks.bench.area import Area

Operation: TypeAlias = Callable[[Area], object]

LIBRARY = "library"
SHARED = "shared"
WAYS: dict[str, dict[str, Operation]] = {
    "broadcast": {LIBRARY: library.broadcast, "star": star.broadcast, "tree": tree.broadcast, "ring": ring.broadcast},
    "scatter": {LIBRARY: library.scatter, "star": star.scatter, "tree": tree.scatter},
    "gather": {LIBRARY: library.gather, "star": star.gather, "tree": tree.gather},
    "all-gather": {
        LIBRARY: library.all_gather,
        "star": star.all_gather,
        "tree": tree.all_gather,
        "ring": ring.all_gather,
    },
    "all-to-all": {LIBRARY: library.all_to_all, "ring": ring.all_to_all},
    "reduce": {LIBRARY: library.reduce, "star": star.reduce, "tree": tree.reduce, "ring": ring.reduce},
    "reduce-scatter": {LIBRARY: library.reduce_scatter, "star": star.reduce_scatter, "ring": ring.reduce_scatter},
    "all-reduce": {
        LIBRARY: library.all_reduce,
        "star": star.all_reduce,
        "tree": tree.all_reduce,
        "ring": ring.all_reduce,
    },
}
"""What is done by sending. A ring has no sense where every byte has one receiver, a tree where each has all."""

SHARED_WAYS: dict[str, Callable[[Vectors], object]] = {
    "all-gather": lambda vectors: vectors.all_gather(),
    "reduce-scatter": lambda vectors: vectors.reduce_scatter(),
    "all-reduce": lambda vectors: vectors.all_reduce(),
}
"""What `fedplat.backends.ranks` does through shared memory."""
