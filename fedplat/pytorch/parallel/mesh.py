"""The place of this process in a layout of ranks: its coordinates, and PyTorch's device mesh."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks

PIPELINE, DATA, SHARD, TENSOR = "pipeline", "data", "shard", "tensor"


@dataclass(frozen=True)
class Layout:
    """The ranks of one model: this process's coordinates in the mesh `pipeline × data × shard × tensor`.

    A layout for one process has no mesh: that process has all stages, and computes all parts in turn.
    """

    parallel: Parallel
    ranks: Ranks
    mesh: DeviceMesh | None

    @property
    def part(self) -> int:
        """The number of the part of every batch that this rank computes, below `parallel.num_parts`."""
        return self._coordinate(DATA) * self.parallel.shard + self._coordinate(SHARD)

    @property
    def pipeline_rank(self) -> int:
        """The number of this rank's group of stages, below `parallel.pipeline`."""
        return self._coordinate(PIPELINE)

    @property
    def stages(self) -> list[int]:
        """The numbers of the stages of this rank.

        With two, they are `rank` and `rank + pipeline`; for the zero-bubble schedule, which goes forth and back through
        the ranks, `rank` and `2 * pipeline - 1 - rank`.
        """
        count, rank, parallel = self.parallel.pipeline, self.pipeline_rank, self.parallel
        if self.mesh is None:
            return list(range(parallel.num_stages))
        if parallel.num_stages == count:
            return [rank]
        return [rank, 2 * count - 1 - rank] if parallel.schedule == "zero-bubble" else [rank, rank + count]

    def _coordinate(self, name: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)


def make_layout(ranks: Ranks, parallel: Parallel) -> Layout:
    """Return the layout of all `ranks`, which all call it. Raises `ValueError` if their number is another."""
    parallel.check_ranks(ranks.size)
    return Layout(parallel, ranks, make_mesh(ranks, parallel))


def make_mesh(ranks: Ranks, parallel: Parallel) -> DeviceMesh:
    """Return the mesh of the first processes; all processes call it, also those that are not in the mesh."""
    sizes = (parallel.pipeline, parallel.data, parallel.shard, parallel.tensor)
    return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=(PIPELINE, DATA, SHARD, TENSOR))
