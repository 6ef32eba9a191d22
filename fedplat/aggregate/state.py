"""What a rule remembers from round to round, column by column: so it is computed, stored and read again.

A *column* is the same `WINDOW` entries of every vector (the last one has fewer). A state's file has its columns one
after the other, each with its part of every vector in the order of the rule's names: tensors `velocity.0`,
`velocity.1` ... of a safetensors file. So the next state is written in one pass, and read in one, with windows of a
column's size, however large the model is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fedplat.aggregate.algebra import Rule, State
from fedplat.errors import ModelError
from fedplat.model import WINDOW, ModelFile, Parameters, Schema, TensorSpec, Vector, blocks


def columns(size: int) -> Sequence[slice]:
    """The columns of vectors of `size` entries: at least one, so that rules see empty models too."""
    return list(blocks(size, WINDOW)) or [slice(0, 0)]


def first_columns(rule: Rule, size: int) -> Iterator[State]:
    """A rule's first state."""
    if rule.blockwise:
        return (rule.init(column.stop - column.start) for column in columns(size))
    return columns_of(rule.init(size), size)


def columns_of(state: State, size: int) -> Iterator[State]:
    """The columns of a state that is in memory, as views."""
    return ({name: vector[column] for name, vector in state.items()} for column in columns(size))


def joined(parts: Iterable[State]) -> State:
    """The whole vectors of a state's columns."""
    vectors: dict[str, list[Vector]] = {}
    for part in parts:
        for name, vector in part.items():
            vectors.setdefault(name, []).append(vector.copy())  # the next part may take its place
    return {name: np.concatenate(each) for name, each in vectors.items()}


def state_schema(names: Iterable[str], size: int) -> Schema:
    """The schema of a state's file."""
    names = tuple(names)
    lengths = (column.stop - column.start for column in columns(size))
    return Schema(
        tuple(
            TensorSpec(f"{name}.{number}", "F32", (length,)) for number, length in enumerate(lengths) for name in names
        )
    )


def read_columns(path: str | os.PathLike[str], rule: Rule, size: int) -> Iterator[State]:
    """The columns in a state's file, each valid until the next is drawn.

    Raises `ModelError` when it is not the state of this rule for `size` entries, or `OSError`.
    """
    names = tuple(rule.init(0))
    file = ModelFile.open(path)
    if difference := file.schema.difference_from(state_schema(names, size)):
        raise ModelError(f"the remembered state is not one of the job's rule: {difference}")
    with file.reader(4 * len(names) * WINDOW) as read:
        for column in columns(size):
            length = column.stop - column.start
            content = read(4 * len(names) * column.start, 4 * len(names) * length).view(np.float32)
            yield {name: content[number * length :][:length] for number, name in enumerate(names)}


def state_to_bytes(state: State) -> bytes:
    """A state's file; nothing remembered is no bytes."""
    if not state:
        return b""
    size = next(iter(state.values())).size
    parts = [vector.tobytes() for part in columns_of(state, size) for vector in part.values()]
    return b"".join([state_schema(state, size).header, *parts])


def state_from_bytes(data: bytes) -> State:
    """The state that `state_to_bytes` wrote, bit for bit. Raises `ModelError` when it is none."""
    if not data:
        return {}
    parameters = Parameters.from_bytes(data)
    names = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    size = sum(vector.size for vector in parameters.values()) // max(len(names), 1)
    if difference := parameters.schema.difference_from(state_schema(names, size)):
        raise ModelError(f"the bytes are no remembered state: {difference}")
    return joined({name.rpartition(".")[0]: vector} for name, vector in parameters.items())
