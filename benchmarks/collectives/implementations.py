"""The implementations to compare."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from collectives import ring, star, tree
from fedplat.pytorch.distributed import VectorLayout, Vectors, make_vectors
from fedplat.pytorch.distributed.bench.measure import Buffers, Operation, Trial, make_library_trials
from fedplat.pytorch.distributed.shared_memory import SharedMemoryVectors

SHARED = "shared memory"
POINT_TO_POINT: Mapping[str, Mapping[str, Operation]] = {
    "broadcast": {"star": star.broadcast, "tree": tree.broadcast, "ring": ring.broadcast},
    "scatter": {"star": star.scatter, "tree": tree.scatter},
    "gather": {"star": star.gather, "tree": tree.gather},
    "all-gather": {"star": star.all_gather, "tree": tree.all_gather, "ring": ring.all_gather},
    "all-to-all": {"ring": ring.all_to_all},
    "reduce": {"star": star.reduce, "tree": tree.reduce, "ring": ring.reduce},
    "reduce-scatter": {"star": star.reduce_scatter, "ring": ring.reduce_scatter},
    "all-reduce": {"star": star.all_reduce, "tree": tree.all_reduce, "ring": ring.all_reduce},
}
"""Implementations by messages between two ranks. A ring is useless if every byte has only one receiver, and a tree if
every rank has different bytes for each other rank."""

SHARED_MEMORY: Mapping[str, Callable[[Vectors], object]] = {
    "all-gather": lambda vectors: vectors.all_gather(),
    "reduce-scatter": lambda vectors: vectors.reduce_scatter(),
    "all-reduce": lambda vectors: vectors.all_reduce(),
}
"""The sums of a pool on the CPUs of one host (`fedplat.pytorch.distributed.shared_memory`)."""


def make_trials(buffers: Buffers, collectives: Sequence[str]) -> list[Trial]:
    """Return the trials of all implementations: of the library, by messages, and in shared memory where possible."""
    ranks = buffers.ranks
    vectors = make_vectors(ranks, VectorLayout.even(ranks.size, ranks.size, buffers.count, multiple=1))
    in_shared_memory = dataclasses.replace(buffers, take=vectors.whole)
    trials: list[Trial] = []
    for name in collectives:
        trials += make_library_trials(buffers, [name])
        for implementation, operation in POINT_TO_POINT[name].items():
            trials.append(Trial(name, implementation, buffers, functools.partial(operation, buffers)))
        if isinstance(vectors, SharedMemoryVectors) and name in SHARED_MEMORY:
            run = functools.partial(SHARED_MEMORY[name], vectors)
            trials.append(Trial(name, SHARED, in_shared_memory, run))
    return trials
