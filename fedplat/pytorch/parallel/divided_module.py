"""The module of a layout: each rank has its own parts of it, and reads and writes only those of the model's file."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from fedplat import errors, local_options, model
from fedplat.aggregate.local import CONTROL, LocalAlgorithm
from fedplat.client_state import ClientState
from fedplat.pytorch import convert, training
from fedplat.pytorch.parallel import algorithms, apply
from fedplat.pytorch.parallel.plan import ParallelPlan, find_plan, split_stages
from fedplat.pytorch.parallel.tensor import find_ties, reduce_partial_gradients, restore_ties
from fedplat.pytorch.training.learner import has_batch_norm


class DividedModule(training.Trainee):
    """A `Trainee` whose module is divided among the ranks of a layout; `ParallelTrainee` can also evaluate it.

    All ranks call its methods. Only this rank's stages exist here, and of their tensors only its slices.
    """

    def __init__(
        self,
        learner: training.Learner,
        layout: apply.Layout,
        plan: ParallelPlan | None = None,
        precision: apply.Precision = "fp32",
        seed: int = 0,
    ) -> None:
        """Raise `ValueError` if the layout cannot divide the module, with the name of the part."""
        self.learner, self.layout, self.device = learner, layout, layout.ranks.device
        self.personal, self.base, self.precision = frozenset[str](), None, precision
        layout.parallel.check_precision(precision)
        whole = make_empty(learner, seed)
        _check_module(whole, learner, layout)
        self._ties = {name: same[0] for same in find_ties(whole) for name in same[1:]}
        self._whole = {name: tensor.to("meta") for name, tensor in whole.state_dict().items()}
        self.shapes = {name: tensor.shape for name, tensor in self._whole.items()}
        self.plan = find_plan(whole, plan)
        if layout.mesh is not None:
            apply.check_plan(whole, self.plan, layout.parallel)
        self.stages = split_stages(whole, self.plan, layout.parallel.num_stages, layout.stages)
        for stage in self.stages:
            if layout.mesh is not None:
                apply.parallelize(stage, self.plan, layout, precision)
            materialize(stage, self.device, is_offloaded=layout.parallel.offload == "cpu")
            if layout.parallel.tensor > 1 and not apply.sharded_modules(stage):
                reduce_partial_gradients(stage)
        self.module = self.stages[0] if len(self.stages) == 1 else nn.ModuleList(self.stages)
        self.has_batch_norm = False

    @override
    def forget(self) -> None:
        """Do nothing: a divided module is made anew for each training."""

    @override
    def shared_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by their names in the whole model; those that are divided are `DTensor`s."""
        return {name: tensor for stage in self.stages for name, tensor in stage.state_dict().items()}

    @override
    def parameters(self) -> dict[str, nn.Parameter]:
        named = (pair for stage in self.stages for pair in stage.named_parameters())
        return {name: value for name, value in named if value.requires_grad}

    @override
    def start_weights(self, parameters: model.Parameters) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters().items()}

    @override
    def step_options(self, options: local_options.LocalOptions) -> local_options.LocalOptions:
        """Return the options without bf16 if the sharded units convert their parameters and inputs themselves.

        Raises `ValueError` for a precision that layouts do not have.
        """
        self.layout.parallel.check_precision(options.precision)
        converts = self.precision == "bf16" and self.layout.mesh is not None
        return msgspec.structs.replace(options, precision="fp32") if converts else options

    @override
    def check_algorithm(self, options: local_options.LocalOptions, algorithm: LocalAlgorithm) -> None:
        self.layout.parallel.check_precision(options.precision)
        algorithms.refuse_algorithm(options, algorithm)

    @override
    def load(self, parameters: model.Parameters, client_state: ClientState) -> None:
        """Copy this rank's slices of the model into the module. Raises `ModelError`, on all ranks alike."""
        stored = self._stored_names(parameters)
        found = {name: parameters[name].shape for name in parameters if not name.startswith(CONTROL)}
        found |= {name: parameters[stored[name]].shape for name in stored}
        for name in sorted(found.keys() | self.shapes.keys()):
            if found.get(name) != self.shapes.get(name):
                raise errors.ModelError(
                    f"the model does not fit the module: {name!r} has the shape {_describe(found.get(name))} in the "
                    f"model and {_describe(self.shapes.get(name))} in the module"
                )
        with torch.no_grad():
            for name, tensor in self.shared_tensors().items():
                local, index = _local_part(tensor)
                local.copy_(convert.as_tensor(np.array(parameters[stored.get(name, name)][index])))

    def _stored_names(self, parameters: model.Parameters) -> dict[str, str]:
        """Return the names of tied parameters that the model lacks, with the name that it has them under."""
        pairs = [*self._ties.items(), *((first, name) for name, first in self._ties.items())]
        return {name: other for name, other in pairs if name not in parameters and other in parameters}

    @override
    def save(self, parameters: model.Parameters, client_state: ClientState) -> None:
        """Gather the model tensor by tensor; rank 0 copies it into `parameters`, those of the others do not change."""
        ranks, own = self.layout.ranks, self.shared_tensors()
        for name, owner in self._owners().items():
            values = _gather(own[name]).detach().cpu().contiguous() if name in own else None
            if ranks.is_first and values is None:
                values = torch.empty_like(self._whole[name], device="cpu")
                distributed.recv(values, group=ranks.group, group_src=owner)
            elif ranks.rank == owner and owner:
                assert values is not None
                distributed.send(values, group=ranks.group, group_dst=0)
            if ranks.is_first and name in parameters:
                assert values is not None
                parameters[name][...] = convert.to_arrays({name: values})[name]

    def _owners(self) -> dict[str, int]:
        """Return the first rank that has each tensor, in the order of the whole model."""
        mine = msgspec.msgpack.encode(list(self.shared_tensors()))
        names = [msgspec.msgpack.decode(each, type=list[str]) for each in self.layout.ranks.all_gather(mine)]
        return {name: next(rank for rank, has in enumerate(names) if name in has) for name in self.shapes}


def make_empty(learner: training.Learner, seed: int = 0) -> nn.Module:
    """Create the module with its parameters on the meta device, which have no values; its buffers have theirs."""
    with training.use_seed(torch.device("cpu"), seed), _empty_parameters():
        return learner.model()


def materialize(module: nn.Module, device: torch.device, *, is_offloaded: bool = False) -> None:
    """Give the parameters of a module memory, with values that are not set, and move its buffers to a device.

    The parameters are on the device too, or on the CPU if they are offloaded. Only those: `fully_shard` moves them for
    each computation, but not the buffers.
    """
    buffers, ties = dict(module.named_buffers(remove_duplicate=False)), find_ties(module)
    module.to_empty(device=torch.device("cpu") if is_offloaded else device)
    restore_ties(module, ties)
    for name, buffer in buffers.items():
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, buffer.to(device))


@contextmanager
def _empty_parameters() -> Generator[None]:
    """Move each parameter to the meta device as soon as a module has it, so that one of them exists at a time."""
    register = nn.Module.register_parameter
    known = WeakTensorKeyDictionary()  # a parameter that two modules share stays one

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            parameter = cast(nn.Parameter, known.setdefault(parameter, empty))
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_empty):
        yield


def _check_module(module: nn.Module, learner: training.Learner, layout: apply.Layout) -> None:
    """Raise `ValueError` if a module cannot be divided."""
    name = type(module).__name__
    if learner.personal:
        raise ValueError("personal tensors need a single process; expected a trainer without personal, or parallel")
    if learner.share != "all":
        raise ValueError(f'share = "{learner.share}" needs the whole module in a process; expected share = "all"')
    if has_batch_norm(module):
        raise ValueError(
            f"{name} has BatchNorm, whose statistics would be those of a part of each batch; expected another "
            'normalisation, such as GroupNorm or LayerNorm, or parallel = "data"'
        )


def _local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return the values that this rank has, and their place in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (...,)  # type: ignore[return-value]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    index = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    return tensor.to_local(), index


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _describe(shape: Any) -> str:
    return "no such tensor" if shape is None else str(list(shape))
