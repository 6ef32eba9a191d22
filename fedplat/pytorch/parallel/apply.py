"""The place of this process in a layout, and its application to a stage of a module: tensor parallelism, sharding."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel.plan import ParallelPlan, list_blocks
from fedplat.pytorch.parallel.tensor import check_tensor_plan, check_ties, divide_operations

_log = logging.getLogger(__name__)
Precision: TypeAlias = Literal["fp32", "fp16", "bf16"]


def check_plan(module: nn.Module, plan: ParallelPlan, parallel: Parallel) -> None:
    """Raise `ValueError` if a layout cannot divide the whole module as its plan says, with the name of a part."""
    if parallel.tensor > 1:
        check_tensor_plan(module, plan, parallel.tensor, sequence=parallel.sequence)
    if parallel.num_parts > 1 or parallel.offload == "cpu":
        check_ties(module, list_blocks(module, plan))


def parallelize(module: nn.Module, plan: ParallelPlan, layout: Layout, precision: Precision = "fp32") -> None:
    """Divide a stage, whose parameters may be on the meta device, among the ranks that have it.

    The plan has to be one that `check_plan` accepts.
    """
    mesh, parallel = layout.mesh, layout.parallel
    assert mesh is not None
    blocks = list_blocks(module, plan)
    if parallel.shard > 1 and not blocks:
        _log.warning(
            "%s has no blocks, so each rank gathers all of it in each pass; "
            "expected a ModuleList or Sequential in it, or names in ParallelPlan(blocks=...)",
            type(module).__name__,
        )
    if parallel.tensor > 1:
        divide_operations(module, plan, mesh[TENSOR], sequence=parallel.sequence)
    if parallel.recompute == "blocks":
        for name in blocks or dict(module.named_children()):  # a part whose `forward` is not called is not recomputed
            _recompute(module.get_submodule(name))
    if parallel.num_parts > 1 or parallel.offload == "cpu" or precision == "bf16":
        _shard(module, blocks, layout, precision)


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the units that are sharded, with the module itself."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _recompute(block: nn.Module) -> None:
    """Keep only the inputs of a block; its backward pass computes the rest again. Its parts keep their names."""
    forward = block.forward

    def recompute(*inputs: Any, **options: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    block.forward = recompute


def _shard(module: nn.Module, blocks: list[str], layout: Layout, precision: Precision) -> None:
    parallel, mesh = layout.parallel, layout.mesh
    assert mesh is not None
    policy = last = MixedPrecisionPolicy()
    if precision == "bf16":  # gradients are added up in float32, and so is the loss
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        last = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    offload = OffloadPolicy()
    if parallel.offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=layout.ranks.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": mesh[DATA, SHARD] if parallel.data > 1 else mesh[SHARD],
        # None: all but the outermost unit, whose backward pass is the first. A pipeline would gather again and again.
        "reshard_after_forward": None if parallel.reshard and parallel.pipeline == 1 else False,
        "offload_policy": offload,
    }
    for unit in (*(module.get_submodule(name) for name in blocks), module):
        unit.register_forward_hook(_return_no_view)
        fully_shard(unit, mp_policy=last if unit is module else policy, **options)
    for unit in sharded_modules(module):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _return_no_view(_: nn.Module, inputs: object, output: Any) -> Any:
    """Return outputs that are not views, without copies: `fully_shard` has hooks on them and warns about views."""
    if isinstance(output, torch.Tensor) and output._base is not None and output.requires_grad:
        return _Alias.apply(output)
    if type(output) is tuple:
        return tuple(_return_no_view(_, inputs, each) for each in output)
    return output


class _Alias(torch.autograd.Function):
    """The same values, for which autograd has no base."""

    @staticmethod
    @override
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0]


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
