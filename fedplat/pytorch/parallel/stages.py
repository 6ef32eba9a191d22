"""The stages of a pipeline: parts of a module that keep the names of the whole.

A stage is a copy of the module without the parts of other stages: a removed entry of a `ModuleList`, `ModuleDict` or
`Sequential` passes its input on, and any other removed attribute is None. So `forward` has to skip attributes that are
None, and to pass a single tensor from part to part.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from fedplat.pytorch.parallel.plan import ParallelPlan, match_names


class PassThrough(nn.Module):
    """In place of a removed part: returns its first argument."""

    def forward(self, values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return `values`."""
        return values


def split_stages(module: nn.Module, plan: ParallelPlan, num_stages: int, wanted: list[int]) -> list[nn.Module]:
    """Return the stages with the numbers `wanted`, of `num_stages` with parts of about equal numbers of parameters.

    Raises `ValueError` if the plan has too few parts, or if a tensor of the module is in none or in several of them.
    """
    if num_stages == 1:
        return [module]
    names = [name for pattern in plan.stages for name in match_names(module, pattern)]
    _check_parts(module, names, num_stages)
    groups = _divide(module, names, num_stages)
    stages: list[nn.Module] = []
    for number in wanted:
        stage = copy.deepcopy(module)  # without values: the parameters are on the meta device
        for other in range(num_stages):
            for name in groups[other] if other != number else ():
                _remove(stage, name)
        stages.append(stage)
    return stages


def _divide(module: nn.Module, names: list[str], num_stages: int) -> list[list[str]]:
    """Divide the parts into consecutive groups so that the largest has as few parameters as possible."""
    sizes = [sum(each.numel() for each in module.get_submodule(name).parameters()) + 1 for name in names]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    count = len(names)
    # best[k][i]: the smallest possible maximum of the first i parts in k groups, and where its last group begins
    best = np.full((num_stages + 1, count + 1), np.inf)
    begin = np.zeros((num_stages + 1, count + 1), np.int64)
    best[0, 0] = 0
    for groups in range(1, num_stages + 1):
        for end in range(groups, count + 1):
            costs = [max(best[groups - 1, first], float(ends[end] - ends[first])) for first in range(end)]
            begin[groups, end] = int(np.argmin(costs))
            best[groups, end] = costs[begin[groups, end]]
    cuts = [count]
    for groups in range(num_stages, 0, -1):
        cuts.append(int(begin[groups, cuts[-1]]))
    cuts.reverse()
    return [names[first:last] for first, last in itertools.pairwise(cuts)]


def _check_parts(module: nn.Module, names: list[str], num_stages: int) -> None:
    kind = type(module).__name__
    if len(names) < num_stages:
        raise ValueError(
            f"the plan of {kind} has {len(names)} parts in its stages; {num_stages} stages need at least as many"
        )
    for tensor in module.state_dict():
        owners = [name for name in names if tensor.startswith(f"{name}.")]
        if len(owners) != 1:
            where = f"are in {' and '.join(owners)}" if owners else "are in none of the plan's stages"
            raise ValueError(f"the values {tensor!r} of {kind} {where}; expected each in exactly one part")
    seen: dict[int, str] = {}
    for name in names:
        for parameter in module.get_submodule(name).parameters():
            if seen.setdefault(id(parameter), name) != name:
                raise ValueError(
                    f"the parts {seen[id(parameter)]!r} and {name!r} of {kind} share a parameter, which only one stage "
                    "can have; expected a model without tied weights"
                )


def _remove(stage: nn.Module, name: str) -> None:
    parent_name, _, own = name.rpartition(".")
    parent = stage.get_submodule(parent_name)
    if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        parent.register_module(own, PassThrough())
    else:
        setattr(parent, own, None)
