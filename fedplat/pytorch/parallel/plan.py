"""What the author of a model knows about its parts: which can be divided, and where a pipeline may cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

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
