"""The state of a rule between rounds, which is computed, stored and read column by column.

A *column* is the same `WINDOW` entries of every vector (the last column may have fewer). A state file has the rule's
scalars and then its columns one after the other, each with its part of every vector in the order of the rule's names:
tensors `velocity.0`, `velocity.1` ... of a safetensors file. So the next state is written in one pass and read in one
pass, with windows of a column's size, independent of the size of the model. The memory of a rule that keeps one is the
last tensor, of bytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from fedplat.aggregate.algebra import Rule, State
from fedplat.errors import ModelError
from fedplat.model import WINDOW, ModelFile, Parameters, Schema, TensorSpec, Vector, blocks

_MEMORY = "memory"


def columns(size: int) -> Sequence[slice]:
    """Return the columns of vectors of `size` entries: at least one, so that rules are applied to empty models too."""
    return list(blocks(size, WINDOW)) or [slice(0, 0)]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a state, which can be read repeatedly."""

    draw: Callable[[], Iterator[State]]

    def __iter__(self) -> Iterator[State]:
        """Iterate over the columns, in order; each is valid until the next is drawn."""
        return self.draw()


@dataclasses.dataclass(frozen=True)
class StoredColumns:
    """One vector of a state as `Blocks`, read column by column."""

    state: Iterable[State]
    name: str
    size: int

    def __iter__(self) -> Iterator[Vector]:
        return (window[block] for window in self.windows() for block in blocks(window.size))

    def windows(self) -> Iterator[Vector]:
        """Iterate over the elements, `WINDOW` at a time."""
        return (column[self.name] for column in self.state)


def first_columns(rule: Rule, size: int) -> Columns:
    """Return a rule's initial state as columns."""
    if rule.blockwise:
        return Columns(lambda: (rule.init(column.stop - column.start) for column in columns(size)))
    return columns_of(rule.init(size), size)


def columns_of(state: State, size: int) -> Columns:
    """Return the columns of a state in memory, as views."""
    return Columns(lambda: ({name: vector[column] for name, vector in state.items()} for column in columns(size)))


def concatenate_columns(parts: Iterable[State]) -> State:
    """Concatenate the columns of a state to whole vectors."""
    vectors: dict[str, list[Vector]] = {}
    for part in parts:
        for name, vector in part.items():
            vectors.setdefault(name, []).append(vector.copy())  # the next part may overwrite it
    return {name: np.concatenate(each) for name, each in vectors.items()}


def state_schema(names: Iterable[str], size: int, scalars: Iterable[str] = (), memory_bytes: int = 0) -> Schema:
    """Return the schema of a state file with vectors of these `names` and `size`, these scalars and a memory."""
    names = tuple(names)
    lengths = (column.stop - column.start for column in columns(size))
    numbers = [TensorSpec(name, "F64", ()) for name in scalars]
    vectors = [
        TensorSpec(f"{name}.{number}", "F32", (length,)) for number, length in enumerate(lengths) for name in names
    ]
    memory = [TensorSpec(_MEMORY, "U8", (memory_bytes,))] if memory_bytes else []
    return Schema((*numbers, *vectors, *memory))


def scalars_to_bytes(scalars: Mapping[str, float]) -> bytes:
    """Encode the scalars of a state file, which precede its columns."""
    return np.array(list(scalars.values()), np.float64).tobytes()


def read_scalars(path: str | os.PathLike[str], rule: Rule, size: int) -> Mapping[str, float]:
    """Read the scalars of a state file. Raises the errors of `read_columns`."""
    names = tuple(rule.start(0).scalars)
    with _open_state_file(path, rule, size).reader(8 * len(names)) as read:
        return dict(zip(names, read(0, 8 * len(names)).view(np.float64).tolist(), strict=True))


def read_memory(path: str | os.PathLike[str], rule: Rule, size: int) -> bytes:
    """Read the memory of a state file; b"" if the rule keeps none. Raises the errors of `read_columns`."""
    if not rule.keeps_memory:
        return b""
    file = _open_state_file(path, rule, size)
    length = _memory_bytes(file.schema)
    with file.reader(length) as read:
        return read(file.schema.size_bytes - length, length).tobytes()


def read_columns(path: str | os.PathLike[str], rule: Rule, size: int, shard: range | None = None) -> Columns:
    """Return the columns of a state file: all of them, or those of a shard.

    Reading them raises `OSError`, or `ModelError` if the file is not a state of this rule for `size` entries.
    """
    return Columns(lambda: _read(path, rule, size, range(size) if shard is None else shard))


def column_start(rule: Rule, first: int) -> int:
    """Return the byte offset, after the header of a state file, of the column that begins with entry `first`."""
    return 8 * len(rule.start(0).scalars) + 4 * len(rule.init(0)) * first


def _read(path: str | os.PathLike[str], rule: Rule, size: int, shard: range) -> Iterator[State]:
    names = tuple(rule.init(0))
    with _open_state_file(path, rule, size).reader(4 * len(names) * WINDOW) as read:
        for column in columns(len(shard)):
            length = column.stop - column.start
            start = column_start(rule, shard.start + column.start)
            content = read(start, 4 * len(names) * length).view(np.float32)
            yield {name: content[number * length :][:length] for number, name in enumerate(names)}


def state_to_bytes(state: State, scalars: Mapping[str, float] | None = None, memory: bytes = b"") -> bytes:
    """Encode a state file; an empty state without scalars and memory is no bytes."""
    scalars = scalars or {}
    if not (state or scalars or memory):
        return b""
    size = next(iter(state.values())).size if state else 0
    parts = [vector.tobytes() for part in columns_of(state, size) for vector in part.values()]
    return b"".join([state_schema(state, size, scalars, len(memory)).header, scalars_to_bytes(scalars), *parts, memory])


def state_from_bytes(data: bytes) -> tuple[State, Mapping[str, float]]:
    """Decode the result of `state_to_bytes`, bit for bit. Raises `ModelError` if the bytes are not a state file."""
    if not data:
        return {}, {}
    parameters = Parameters.from_bytes(data)
    scalars = [spec.name for spec in parameters.schema.tensors if spec.dtype == "F64"]
    memory = _memory_bytes(parameters.schema)
    vectors = {spec.name: parameters[spec.name] for spec in parameters.schema.tensors if spec.dtype == "F32"}
    names = dict.fromkeys(name.rpartition(".")[0] for name in vectors)
    size = sum(vector.size for vector in vectors.values()) // max(len(names), 1)
    if difference := parameters.schema.difference_from(state_schema(names, size, scalars, memory)):
        raise ModelError(f"the bytes are not a state file: {difference}")
    state = concatenate_columns({name.rpartition(".")[0]: vector} for name, vector in vectors.items())
    return state, {name: float(parameters[name]) for name in scalars}


def memory_from_bytes(data: bytes) -> bytes:
    """Decode the memory in the result of `state_to_bytes`. Raises `ModelError` if the bytes are not a state file."""
    parameters = Parameters.from_bytes(data) if data else Parameters.from_arrays({})
    return parameters[_MEMORY].tobytes() if _memory_bytes(parameters.schema) else b""


def _open_state_file(path: str | os.PathLike[str], rule: Rule, size: int) -> ModelFile:
    file = ModelFile.open(path)
    memory = _memory_bytes(file.schema) if rule.keeps_memory else 0
    if difference := file.schema.difference_from(state_schema(rule.init(0), size, rule.start(0).scalars, memory)):
        raise ModelError(f"the state file is not a state of the job's rule: {difference}")
    return file


def _memory_bytes(schema: Schema) -> int:
    """Return the length of the memory in a file of this schema, 0 without one."""
    last = schema.tensors[-1] if schema.tensors else None
    return last.count if last is not None and (last.name, last.dtype) == (_MEMORY, "U8") else 0
