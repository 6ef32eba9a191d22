"""Parameters that a module has under several names, such as the weights of an embedding and of the output."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor, Placement


def find_ties(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [same for same in names.values() if len(same) > 1]


def restore_ties(module: nn.Module, ties: Iterable[list[str]]) -> None:
    """Make parameters one again. Raises `ValueError` if they have become parts of different kinds."""
    for first, *others in ties:
        parameter = module.get_parameter(first)
        for name in others:
            if _placements(parameter) != _placements(module.get_parameter(name)):
                raise ValueError(
                    f"{first} and {name} are the same parameter, but the plan divides them in different ways; expected "
                    'styles that fit, such as "embedding_rowwise" for the embedding and "colwise_rep" for the output'
                )
            parent, _, own = name.rpartition(".")
            module.get_submodule(parent).register_parameter(own, parameter)


def check_ties(module: nn.Module, blocks: Iterable[str]) -> None:
    """Raise `ValueError` if a block, which is sharded as a unit, shares a parameter with another part."""
    blocks = list(blocks)
    for names in find_ties(module):
        units = {next((block for block in blocks if name.startswith(f"{block}.")), "") for name in names}
        if len(units) > 1:
            raise ValueError(
                f"{' and '.join(names)} are the same parameter, but belong to different blocks, which are sharded "
                "separately; expected it in one block or in none, or a plan without blocks"
            )


def _placements(parameter: nn.Parameter) -> tuple[Placement, ...]:
    return parameter.placements if isinstance(parameter, DTensor) else ()
