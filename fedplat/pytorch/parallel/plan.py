"""What the author of a model knows about its parts, and the stages of a pipeline that are cut by it.

A stage is a copy of the module without the parts of other stages: a removed entry of a `ModuleList`, `ModuleDict` or
`Sequential` passes its input on, and any other removed attribute is None. So `forward` has to skip attributes that are
None, and to pass a single tensor from part to part.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import nn

Style: TypeAlias = Literal[
    "colwise",
    "rowwise",
    "colwise_rep",
    "colwise_gather_output",
    "embedding_rowwise",
    "sequence_parallel",
    "replicated_with_grad_allreduce",
]
"""Styles of Hugging Face's tensor plans.

`colwise` divides the outputs of a linear layer, or the vectors of an embedding; `rowwise` the inputs, or with
`embedding_rowwise` the vocabulary. `colwise_rep` and `colwise_gather_output` are `colwise` with gathered outputs. A
`sequence_parallel` layer, such as a normalisation, has divided inputs with `sequence = true`; a
`replicated_with_grad_allreduce` layer, such as a normalisation of queries, has those of its rank's heads.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The parts of a module by the patterns of their names, such as `layers.*.attention.wq`.

    ```python
    plan = ParallelPlan(
        tensor={"layers.*.wq": "colwise", "layers.*.wo": "rowwise"},
        stages=["embedding", "layers.*", "norm", "output"],
    )
    ```
    """

    tensor: Mapping[str, Style] = field(default_factory=dict[str, Style])
    """The style of each layer that tensor ranks divide, in the spelling of Hugging Face's `base_model_tp_plan`."""
    stages: tuple[str, ...] = ()
    """The modules in the order of the forward pass, with wildcards; a pipeline cuts only between them."""
    blocks: tuple[str, ...] = ()
    """The modules that are sharded and recomputed as a unit; by default those in `stages` that have wildcards.

    Of a plan without both, they are the members of each outermost `ModuleList` and `Sequential`.
    """


def find_plan(module: nn.Module, given: ParallelPlan | None) -> ParallelPlan:
    """Return the plan of a module: the given one, or one from Hugging Face's attributes, or an empty one.

    Raises `ValueError` for a pattern without a match.
    """
    plan = given or _from_hugging_face(module)
    for pattern in (*plan.tensor, *plan.stages, *plan.blocks):
        if not match_names(module, pattern):
            raise ValueError(
                f"the plan's {pattern!r} matches no part of {type(module).__name__}; its parts are "
                + ", ".join(name for name, _ in list(module.named_modules())[1:20])
            )
    return plan


def match_names(module: nn.Module, pattern: str) -> list[str]:
    """Return the names of the parts that match, in the module's order; a `*` matches one level of a name."""
    parts = pattern.split(".")
    return [
        name
        for name, _ in module.named_modules()
        if name and len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    ]


def list_blocks(module: nn.Module, plan: ParallelPlan) -> list[str]:
    """Return the names of the modules that are sharded and recomputed as a unit, without those of other stages."""
    patterns = plan.blocks or tuple(pattern for pattern in plan.stages if "*" in pattern)
    if patterns:
        names = [name for pattern in patterns for name in match_names(module, pattern)]
    else:
        names = [name for name in _list_members(module) if not _shares_weights(module, name)]
    return [name for name in names if next(module.get_submodule(name).parameters(), None) is not None]


def _list_members(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the members of each outermost list of modules."""
    names: list[str] = []
    for name, part in module.named_children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            names.append(prefix + name)
        else:
            names += _list_members(part, f"{prefix}{name}.")
    return names


def _shares_weights(module: nn.Module, name: str) -> bool:
    """Return whether a part has a weight that is also elsewhere: such a part cannot be sharded alone."""
    own = {id(weight) for weight in module.get_submodule(name).parameters()}
    return any(
        id(weight) in own
        for other, weight in module.named_parameters(remove_duplicate=False)
        if not other.startswith(f"{name}.")
    )


def _from_hugging_face(module: nn.Module) -> ParallelPlan:
    """Return the plan that a model of `transformers` has, without the patterns that match no part of it.

    `_tp_plan` and `_pp_plan` have names relative to the model, those of its configuration (`base_model_tp_plan`)
    relative to its base model. The classes in `_no_split_modules` are blocks.
    """
    tensor = {pattern: style for pattern, style in _read(module, "tp_plan").items() if match_names(module, pattern)}
    order = [name for name, _ in module.named_modules()]
    parts = sorted((name for name in _read(module, "pp_plan") if name in order), key=order.index)
    stages = [f"{name}.*" if isinstance(module.get_submodule(name), nn.ModuleList) else name for name in parts]
    kinds = cast(Iterable[str], getattr(module, "_no_split_modules", None) or ())
    blocks = [name for name, part in module.named_modules() if name and type(part).__name__ in kinds]
    return ParallelPlan(tensor=tensor, stages=tuple(stages), blocks=tuple(blocks))


def _read(module: nn.Module, name: str) -> Mapping[str, Any]:
    if own := getattr(module, f"_{name}", None):
        return cast(Mapping[str, Any], own)
    base = getattr(getattr(module, "config", None), f"base_model_{name}", None) or {}
    prefix = getattr(module, "base_model_prefix", "")
    place = f"{prefix}." if prefix and hasattr(module, prefix) else ""
    return {f"{place}{pattern}": value for pattern, value in cast(Mapping[str, Any], base).items()}


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
