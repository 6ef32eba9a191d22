"""The layouts in which the ranks of a pool train and evaluate models that are divided among them."""

from __future__ import annotations

import msgspec

from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel.mesh import Layout, make_layout, make_mesh


def find_layout(ranks: Ranks, parallel: Parallel) -> Layout | None:
    """Return this process's place in a layout of the first ranks; None in a process that is not among them.

    All ranks of `join_group` have to call it. A layout for more ranks than there are has no mesh: each process then has
    the whole model, and computes parts of batches, or stages, one after the other. Layouts are made once, since each
    has its own groups of processes.
    """
    known: dict[object, Layout | None] = ranks.kept
    if parallel not in known:
        known[parallel] = _make_layout(ranks, parallel)
    return known[parallel]


def _make_layout(ranks: Ranks, parallel: Parallel) -> Layout | None:
    if ranks.size < parallel.num_ranks:
        group = ranks.subgroup(min(ranks.size, parallel.num_parts))
        # A process with the whole model has nothing to fetch from elsewhere, and no reason to compute things again.
        alone = msgspec.structs.replace(parallel, offload="none", recompute="none")
        return None if group is None else Layout(alone, group, None)
    group = ranks.subgroup(parallel.num_ranks)
    if group is None:
        make_mesh(ranks, parallel)  # its groups need all processes, also those that are in none of them
        return None
    layout = make_layout(group, parallel)
    assert layout.mesh is not None
    for number, size in enumerate(layout.mesh.shape):
        if size > 1:
            group.prove(layout.mesh.get_group(number))
    return layout
