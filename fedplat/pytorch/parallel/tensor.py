"""Tensor parallelism of a stage: the layers of its plan, the activations between them, and tied parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fedplat.pytorch.parallel.plan import ParallelPlan, Style, list_blocks, match_names

_SEQUENCE = 1
"""The dimension of the sequence in activations: [batch, sequence, ...]."""
_WITH_WHOLE_OUTPUTS = ("colwise_rep", "colwise_gather_output")
_ROWS = ("rowwise", "embedding_rowwise")
_REPLICATED = ("sequence_parallel", "replicated_with_grad_allreduce")


def divide_operations(module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide the layers of a plan among tensor ranks.

    With `sequence`, activations are divided along the sequence from the first to the last block of the stage, except
    between columns and rows. The plan has to be one that `check_tensor_plan` accepts.
    """
    layers = _find_layers(module, plan)
    region = _Region(mesh)
    inside = _divide_sequence(module, plan, region) if sequence else frozenset[str]()
    ties = find_ties(module)
    trained = {name: each.requires_grad for name, each in module.named_parameters(remove_duplicate=False)}
    for name, style in layers.items():
        layer = module.get_submodule(name)
        if (rule := _make_style(layer, style, sequence=name in inside)) is not None:
            parallelize_module(layer, mesh, rule)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trained[name])  # SequenceParallel forgets it
    restore_ties(module, ties)
    _share_inputs(module, layers, region, inside)


def check_tensor_plan(module: nn.Module, plan: ParallelPlan, size: int, *, sequence: bool) -> None:
    """Raise `ValueError` if `size` tensor ranks cannot divide the whole module as its plan says, with a part's name."""
    if not plan.tensor:
        raise ValueError(
            f"the plan of {type(module).__name__} has no tensor styles; expected some, such as "
            'ParallelPlan(tensor={"layers.*.wq": "colwise", "layers.*.wo": "rowwise"}), or tensor = 1'
        )
    layers = _find_layers(module, plan)
    for name, style in layers.items():
        _check_layer(name, module.get_submodule(name), style, size)
    columns = [name for name, style in layers.items() if style == "colwise" and _is_linear(module, name)]
    regions = [_find_region(module, layers, name) for name in columns]
    for region in regions:
        _check_region(module, layers, region)
    inside = _inside_blocks(module, plan) if sequence else frozenset[str]()
    _check_replicated(module, layers, frozenset(inside.union(*(region.parts for region in regions))))
    if not sequence:
        return
    if not inside:
        raise ValueError(
            f"sequence = true divides the activations of blocks; expected blocks in the plan of {type(module).__name__}"
        )
    for name in inside:
        part = module.get_submodule(name)
        if name not in layers and next(part.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"{name} is a {type(part).__name__} without a style, whose inputs sequence = true divides; expected "
                'one in the plan, such as "sequence_parallel"'
            )


def reduce_partial_gradients(module: nn.Module) -> None:
    """Add up, over tensor ranks, the gradients of parameters that all of them have, as soon as they are computed.

    `fully_shard` does it for its own parameters.
    """
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(_Reduce(parameter.placements))


class _Reduce:
    """Gives a gradient the placements of its parameter."""

    def __init__(self, placements: tuple[Placement, ...]) -> None:
        self._placements = placements

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != self._placements:
            return gradient.redistribute(placements=self._placements)
        return gradient


class _Columns(NamedTuple):
    """A layer `columns` whose outputs are divided until `rows` adds them up, and the `parts` that may be between."""

    columns: str
    rows: str
    parts: tuple[str, ...]


class _Region:
    """The blocks of a stage whose activations are divided along the sequence; `length` is that of a rank's part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.length = mesh, 0

    def enter(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a sequence. Raises `ValueError` if its length cannot be divided."""
        length, size = values.shape[_SEQUENCE], self.mesh.size()
        if length % size:
            raise ValueError(
                f"the input of {name} has a sequence of {length}; sequence = true needs a multiple of the {size} "
                "tensor ranks"
            )
        self.length = length // size
        return _place(values, self.mesh, Replicate(), Shard(_SEQUENCE)).to_local()

    def leave(self, values: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence."""
        return _place(values, self.mesh, Shard(_SEQUENCE), Replicate()).to_local()


def _place(values: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> DTensor:
    return DTensor.from_local(values, mesh, [before], run_check=False).redistribute(placements=[after])


def _find_layers(module: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """Return the style of each layer by its name."""
    return {name: style for pattern, style in plan.tensor.items() for name in match_names(module, pattern)}


def _inside_blocks(module: nn.Module, plan: ParallelPlan) -> frozenset[str]:
    """Return the names of the blocks and of all their parts."""
    return frozenset(
        f"{block}.{own}" if own else block
        for block in list_blocks(module, plan)
        for own, _ in module.get_submodule(block).named_modules()
    )


def _check_layer(name: str, layer: nn.Module, style: str, size: int) -> None:
    if style not in get_args(Style):
        raise ValueError(f"{name} has the style {style!r} in the plan; expected {', '.join(get_args(Style))}")
    if style in _REPLICATED:
        return
    if not isinstance(layer, nn.Linear | nn.Embedding) or (
        style == "embedding_rowwise" and not isinstance(layer, nn.Embedding)
    ):
        expected = "Embedding" if style == "embedding_rowwise" else "Linear or Embedding"
        raise ValueError(f"{name} is a {type(layer).__name__}, which {style!r} cannot divide; expected {expected}")
    rows, columns = layer.weight.shape
    divided = columns if (style in _ROWS) == isinstance(layer, nn.Linear) else rows
    if divided % size:
        side = "inputs" if style in _ROWS else "outputs"
        raise ValueError(f"{name} has {divided} {side}; {size} tensor ranks need a multiple of {size}")


def _find_region(module: nn.Module, layers: Mapping[str, str], columns: str) -> _Columns:
    """Return the parts that may be between columns and rows. Raises `ValueError` if no layer adds up the columns.

    What the forward pass calls there is not known; so all in the smallest module with both counts, or in a list or a
    sequence all between them.
    """
    order = [name for name, _ in module.named_modules()]
    place = order.index(columns)
    rows = [name for name, style in layers.items() if style == "rowwise" and _is_linear(module, name)]
    found: list[tuple[int, int, str, str]] = []
    for name in rows:
        region = _common_parent(columns, name)
        follows = order.index(name) > place
        if follows or not _is_ordered(module, region):
            found.append((-len(region), order.index(name) if follows else len(order), name, region))
    if not found:
        raise ValueError(
            f"{columns} has the style 'colwise' in the plan, so each rank has some of its outputs, but no layer after "
            "it is 'rowwise', which adds them up; expected one, or 'colwise_rep' for whole outputs"
        )
    *_, end, region = min(found)
    between = order[place : order.index(end)] if _is_ordered(module, region) else order
    inside = (name for name in between if name == region or name.startswith(f"{region}." if region else ""))
    return _Columns(columns, end, tuple(inside))


def _check_region(module: nn.Module, layers: Mapping[str, str], region: _Columns) -> None:
    """Raise `ValueError` for a trained parameter without a style where each rank has some of a layer's outputs.

    Each rank would compute only its part of that parameter's gradient, and so train other values than the others.
    """
    for name in region.parts:
        if any(_contains(layer, name) for layer in layers):
            continue
        for own, parameter in module.get_submodule(name).named_parameters(recurse=False):
            if parameter.requires_grad:
                raise ValueError(
                    f"{name or type(module).__name__} has the trained parameter {own!r} and no style in the plan, and "
                    f"may be between the columns of {region.columns} and the rows of {region.rows}, where a rank "
                    'computes a part of its gradient; expected a style: "replicated_with_grad_allreduce" if it is '
                    'between them, "sequence_parallel" if it is not'
                )


def _check_replicated(module: nn.Module, layers: Mapping[str, str], divided: frozenset[str]) -> None:
    """Raise `ValueError` for a trained layer whose gradients would be added up though each rank has all of them.

    `divided` are the parts whose activations may be divided. All ranks would have the same gradient, too large by the
    number of ranks, so that no comparison of ranks finds it.
    """
    for name, style in layers.items():
        layer = module.get_submodule(name)
        if style != "replicated_with_grad_allreduce" or any(_contains(name, part) for part in divided):
            continue
        if any(parameter.requires_grad for parameter in layer.parameters()):
            raise ValueError(
                f'{name} has the style "replicated_with_grad_allreduce" in the plan, but is not between the columns of '
                "a layer and the rows of another: each rank computes its whole gradient, and the sum over the ranks "
                'would be too large; expected "sequence_parallel", or no style'
            )


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name), nn.Linear)


def _is_ordered(module: nn.Module, name: str) -> bool:
    """Return whether the parts of a module follow each other; the whole model's are taken to do so."""
    return not name or isinstance(module.get_submodule(name), nn.Sequential | nn.ModuleList)


def _common_parent(first: str, second: str) -> str:
    pairs = zip(first.split(".")[:-1], second.split(".")[:-1], strict=False)
    return ".".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _contains(name: str, part: str) -> bool:
    return part == name or part.startswith(f"{name}.")


def _make_style(layer: nn.Module, style: str, *, sequence: bool) -> ParallelStyle | None:
    whole = Shard(_SEQUENCE) if sequence else Replicate()
    match style:
        case "rowwise" | "embedding_rowwise":
            given = Replicate() if isinstance(layer, nn.Embedding) else Shard(-1)
            return RowwiseParallel(input_layouts=given, output_layouts=whole)
        case "sequence_parallel":
            return SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True) if sequence else None
        case "replicated_with_grad_allreduce":
            # Each rank has the values of its own heads. That they are parts of a whole matters, not of which dimension.
            return SequenceParallel(sequence_dim=0, use_local_output=True)
        case _:
            is_whole = style in _WITH_WHOLE_OUTPUTS or isinstance(layer, nn.Embedding)
            return ColwiseParallel(output_layouts=whole if is_whole else Shard(-1))


def _divide_sequence(module: nn.Module, plan: ParallelPlan, region: _Region) -> frozenset[str]:
    """Divide activations from the first block to the last; return the names of the blocks and of all their parts."""
    blocks = list_blocks(module, plan)
    if not blocks:  # a stage without blocks
        return frozenset()

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not inputs or not isinstance(inputs[0], torch.Tensor):
            raise ValueError(f"sequence = true expects that the first argument of {blocks[0]} is its activations")
        return (region.enter(blocks[0], inputs[0]), *inputs[1:])

    def leave(_: nn.Module, inputs: object, output: Any) -> Any:
        return (region.leave(output[0]), *output[1:]) if isinstance(output, tuple) else region.leave(output)

    module.get_submodule(blocks[0]).register_forward_pre_hook(enter)
    module.get_submodule(blocks[-1]).register_forward_hook(leave)
    return _inside_blocks(module, plan)


def _share_inputs(module: nn.Module, layers: Mapping[str, str], region: _Region, inside: frozenset[str]) -> None:
    """Make the common input of several layers one distributed tensor, so that its gradient is reduced once."""
    shared = dict[str, _SharedInput]()
    for name, style in layers.items():
        layer, parent = module.get_submodule(name), name.rpartition(".")[0]
        if style in _ROWS or style in _REPLICATED or isinstance(layer, nn.Embedding):
            continue
        if parent not in shared:
            shared[parent] = _SharedInput(region, sequence=name in inside)
            module.get_submodule(parent).register_forward_hook(shared[parent].forget, always_call=True)
        layer.register_forward_pre_hook(shared[parent].distribute, prepend=True)


class _SharedInput:
    """The last input of the layers of one parent, and the distributed tensor that was made of it."""

    def __init__(self, region: _Region, *, sequence: bool) -> None:
        self._region, self._sequence = region, sequence
        self._last: tuple[torch.Tensor, int, DTensor] | None = None

    def distribute(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the input of a layer by a distributed tensor, the same one for the same input."""
        first, *others = inputs
        if isinstance(first, DTensor):
            return inputs
        if self._last is None or self._last[0] is not first or self._last[1] != first._version:
            self._last = (first, first._version, self._make(first))
        return (self._last[2], *others)

    def forget(self, parent: nn.Module, inputs: object, output: object) -> None:
        """Release the input at the end of the parent's forward pass."""
        self._last = None

    def _make(self, values: torch.Tensor) -> DTensor:
        if not self._sequence:
            return DTensor.from_local(values, self._region.mesh, [Replicate()], run_check=False)
        if values.shape[_SEQUENCE] != self._region.length:
            raise ValueError(
                f"an input has a sequence of {values.shape[_SEQUENCE]}, other activations {self._region.length} of "
                "each rank; sequence = true cannot divide a model with several sequences"
            )
        return _place(values, self._region.mesh, Shard(_SEQUENCE), Replicate())


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
