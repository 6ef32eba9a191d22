"""The layout of a module's parameters in one flat vector, and arithmetic on lists of tensors with one call each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np
import torch

from fedplat.client_state import ClientState
from fedplat.model import FLOATING, Bytes, Parameters, Schema
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training import algorithm, learner

_NOTE = "personal"


class UnsuitableError(Exception):
    """The module cannot be trained on flat vectors; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Base:
    """A model at the start of a training; shared by all clients and never changed.

    `weights` are the shared trainable parameters, `control` their control variates in the same order (empty if the
    model has none), `state` the module's other tensors: buffers, and parameters that are not trained.
    """

    parameters: Parameters
    weights: torch.Tensor
    control: torch.Tensor
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Run:
    """Entries [start, stop) of the vector, stored without gaps at `offset` (in bytes) of the model's buffer."""

    offset: int
    start: int
    stop: int


class ParameterLayout:
    """Trainable parameters in sequence: first the shared ones, then those that stay on the client.

    Raises `UnsuitableError` for parameters that are not of type float32, or that have two names in the module.
    """

    def __init__(self, trainee: learner.Trainee) -> None:
        trained, state = trainee.parameters(), trainee.module.state_dict()
        _check(trained, state)
        self.shared_names = [name for name in trained if name not in trainee.personal]
        self.num_shared = sum(trained[name].numel() for name in self.shared_names)
        self.names = [*self.shared_names, *(name for name in trained if name in trainee.personal)]
        self.shapes = [tuple(trained[name].shape) for name in self.names]
        self.sizes = [prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)
        self.state_names = [name for name in state if name not in trained and name not in trainee.left_out]
        self.personal = trainee.personal
        self._first = {name: state[name].detach().clone() for name in trainee.personal}
        self._runs: dict[int, list[_Run]] = {}

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters in vectors [..., size], each [..., *shape].

        A vector with only the shared entries has no views of personal parameters.
        """
        num_names = len(self.names) if vector.shape[-1] == self.size else len(self.shared_names)
        parts = vector.split(self.sizes[:num_names], dim=-1)
        return [part.view((*part.shape[:-1], *shape)) for part, shape in zip(parts, self.shapes, strict=False)]

    def as_dict(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the result of `views` by parameter name."""
        return dict(zip(self.names, self.views(vector), strict=False))

    def base(self, parameters: Parameters, with_control: bool) -> Base:
        """Convert a model to vectors."""
        weights = torch.empty(self.num_shared)
        for run in self._runs_of(parameters.schema):
            weights[run.start : run.stop] = _floats(parameters, run)
        tensors = backend.to_torch(parameters)
        state = {name: tensors[name].clone() for name in self.state_names if name not in self.personal}
        control = torch.empty(0)
        if with_control:
            found = algorithm.select_control(tensors, self.shared_names)
            control = torch.cat([tensor.reshape(-1) for tensor in found.values()])
        return Base(parameters, weights, control, state)

    def load_personal(self, weights: torch.Tensor, client_state: ClientState) -> dict[str, torch.Tensor]:
        """Copy the client's personal values (initially the module's) into its weights; return all of them."""
        if not self.personal:
            return {}
        note = client_state.get(_NOTE)
        own = self._first if note is None else backend.to_torch(note)
        for name, view in self.as_dict(weights).items():
            if name in own:
                view.copy_(own[name])
        return own

    def save(self, weights: torch.Tensor, state: Mapping[str, torch.Tensor], client_state: ClientState) -> None:
        """Store a client's personal values, which are among its weights and its state, in its client state."""
        if self.personal:
            values = {**self.as_dict(weights), **state}
            client_state.put(_NOTE, backend.store_tensors({name: values[name] for name in sorted(self.personal)}))

    def update(
        self, base: Base, weights: torch.Tensor, state: Mapping[str, torch.Tensor], buffer: Bytes | None = None
    ) -> Parameters:
        """Return the update of a client with the trained `weights` and `state`, the module's other tensors.

        Floating-point entries are differences, others are copied. The update uses the memory of `buffer` if given.
        """
        update = Parameters(base.parameters.schema, np.empty_like(base.parameters.buffer) if buffer is None else buffer)
        runs = self._runs_of(update.schema)
        if 4 * self.num_shared != len(update.buffer):
            update.buffer.fill(0)
        for run in runs:
            torch.sub(weights[run.start : run.stop], base.weights[run.start : run.stop], out=_floats(update, run))
        for spec in update.schema.tensors:
            if spec.name in state:
                trained = backend.to_arrays({spec.name: state[spec.name]})[spec.name]
                update[spec.name] = trained - base.parameters[spec.name] if spec.dtype in FLOATING else trained
        return update

    def _runs_of(self, schema: Schema) -> list[_Run]:
        """Return the runs of the shared weights in a model; nearly always one, so that a copy is one call."""
        if id(schema) not in self._runs:
            self._runs = {id(schema): list(self._find(schema))}
            self._schema = schema  # kept alive, so that no other schema gets its id
        return self._runs[id(schema)]

    def _find(self, schema: Schema) -> Iterator[_Run]:
        offsets = {spec.name: offset for spec, offset in zip(schema.tensors, schema.offsets, strict=True)}
        ends = np.cumsum([0, *self.sizes]).tolist()
        spans = zip(self.shared_names, pairwise(ends), strict=False)
        pieces = [_Run(offsets[name], *span) for name, span in spans]
        open_run = pieces[0] if pieces else None
        for piece in pieces[1:]:
            assert open_run is not None
            if piece.offset == open_run.offset + 4 * (open_run.stop - open_run.start):
                open_run = _Run(open_run.offset, open_run.start, piece.stop)
            else:
                yield open_run
                open_run = piece
        if open_run is not None:
            yield open_run


def refuse_server_tensors(parameters: Parameters) -> None:
    """Raise `UnsuitableError` for a model with tensors of the server, which are terms of a module's outputs."""
    if parameters.schema.uploaded is not parameters.schema:
        raise UnsuitableError("the job's rule adds tensors of the server to the model, which need one client at a time")


def _check(trained: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise UnsuitableError(f"parameter {name!r} is {parameter.dtype}; expected float32")
    places = {parameter.data_ptr(): name for name, parameter in trained.items() if parameter.numel()}
    for name, value in state.items():
        if (first := places.get(value.data_ptr(), name)) != name:
            raise UnsuitableError(f"parameter {first!r} is also {name!r}; expected one name for each")
    if not trained:
        raise UnsuitableError("the module has no parameters that are trained")


def _floats(parameters: Parameters, run: _Run) -> torch.Tensor:
    values = parameters.buffer[run.offset : run.offset + 4 * (run.stop - run.start)].view(np.float32)
    # torch.frombuffer warns about read-only arrays, even if they are never written.
    return torch.frombuffer(values, dtype=torch.float32) if values.flags.writeable else torch.tensor(values)


# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false


Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


def add_tensors(targets: Tensors, values: Tensors, factor: float) -> None:
    """Add values, times a factor, to the targets in place."""
    torch._foreach_add_(targets, values, alpha=factor)


def copy_tensors(targets: Tensors, values: Tensors) -> None:
    """Copy values into the targets."""
    torch._foreach_copy_(targets, values)


def scale_tensors(values: Tensors, factor: float) -> Tensors:
    """Return the values times a factor."""
    return torch._foreach_mul(values, factor)


def add_pairs(left: Tensors, right: Tensors) -> Tensors:
    """Return the pairwise sums of two lists."""
    return torch._foreach_add(left, right)
