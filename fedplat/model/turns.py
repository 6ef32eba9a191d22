"""Groups of tensors that take turns: in each round clients train and send one group, and the others rest.

RoLoRA alternates between the factors of adapters in this way (Chen et al. 2025, arXiv 2502.01755, Algorithm 1). What
rests keeps its value. It is not in the updates of the round, for which the server adds zeros, so that every aggregation
rule sees updates of the whole model.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.errors import ModelError
from fedplat.model import FLOATING, Parameters, Schema, Segment, Values, Vector
from fedplat.model.blocks import BLOCK, Blocks, blocks, part_of


class Turn(msgspec.Struct, frozen=True):
    """The turn of a round: of the tensors of all `groups`, one group is trained. Rounds count from 1.

    The groups are names with wildcards. Without any, no tensor rests; so does a tensor of no group in any round.

    >>> turn = Turn.of("*lora_B*, *lora_A*", 1)
    >>> turn.list_resting(["q.lora_A", "q.lora_B", "head"])
    ['q.lora_A']
    """

    groups: tuple[str, ...] = ()
    round: int = 1

    @classmethod
    def of(cls, alternate: str, round: int) -> Turn:
        """Return the turn of a round; `alternate` has the groups, separated by commas."""
        return cls(tuple(name for part in alternate.split(",") if (name := part.strip())), round)

    def list_resting(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that rest, in order: none if a group has no member."""
        names = list(names)
        members = [{name for name in names if fnmatch.fnmatchcase(name, group)} for group in self.groups]
        if not members or not all(members):
            return []
        others, trained = set[str]().union(*members), members[(self.round - 1) % len(members)]
        return [name for name in names if name in others - trained]

    def select_uploaded(self, schema: Schema) -> Schema:
        """Return the schema of an update in this round, for a model; tensors of integers do not rest."""
        return _list_uploaded(self, schema) if self.groups else schema.uploaded

    def leave_out(self, update: Parameters) -> Parameters:
        """Return an update without the tensors that rest.

        Raises `ModelError` for one that has changed: a trainer that does not take turns would lose its work.
        """
        schema = self.select_uploaded(update.schema)
        if schema is update.schema:
            return update
        kept = {tensor.name for tensor in schema.tensors}
        for name in update:
            if name not in kept and update[name].astype(np.float32).any():
                raise ModelError(
                    f"tensor {name!r} rests in round {self.round} (config.alternate), and the trainer has changed it; "
                    "expected a trainer that keeps its value"
                )
        result = Parameters.zeros(schema)
        result.assign({name: update[name] for name in kept})
        return result

    def columns(self, schema: Schema) -> tuple[range, ...]:
        """Return the columns of the tensors that rest in the float32 vector of a model, in order."""
        uploaded = {tensor.name for tensor in self.select_uploaded(schema).tensors}
        rests = {tensor.name for tensor in schema.uploaded.tensors} - uploaded
        return tuple(columns for name, columns in _list_columns(schema) if name in rests)


@functools.lru_cache(maxsize=64)
def _list_uploaded(turn: Turn, schema: Schema) -> Schema:
    whole = schema.uploaded
    resting = frozenset(turn.list_resting(tensor.name for tensor in whole.tensors if tensor.dtype in FLOATING))
    kept = tuple(tensor for tensor in whole.tensors if tensor.name not in resting)
    return Schema(kept, whole.carry) if resting else whole


def _list_columns(schema: Schema) -> Iterator[tuple[str, range]]:
    start = 0
    for tensor in schema.tensors:
        if tensor.dtype in FLOATING:
            yield tensor.name, range(start, start + tensor.count)
            start += tensor.count


def spread(update: Values, schema: Schema) -> Values:
    """Return an update of fewer tensors as one of a schema, with zeros for the floating-point tensors it does not have.

    It is read when the result is, block by block. One that has them all is returned as it is.
    """
    return update if update.schema == schema else _Spread(update, schema)


def spread_vector(vector: Vector, uploaded: Schema, schema: Schema) -> Vector:
    """Return the entries of a vector of `uploaded` tensors in one of a schema, with zeros elsewhere."""
    if uploaded == schema:
        return vector
    result, own, start = np.zeros(schema.num_floating, np.float32), {each.name for each in uploaded.tensors}, 0
    for name, columns in _list_columns(schema):
        if name in own:
            result[columns.start : columns.stop] = vector[start : start + len(columns)]
            start += len(columns)
    return result


class _Spread(Values):
    def __init__(self, update: Values, schema: Schema) -> None:
        own = {tensor.name for tensor in update.schema.tensors}
        self._update, self._schema = update, schema
        self._places = [columns for name, columns in _list_columns(schema) if name in own and columns]

    @property
    @override
    def schema(self) -> Schema:
        return self._schema

    @override
    def to_blocks(self, columns: range | None = None) -> Blocks:
        return part_of(_SpreadBlocks(self._update.to_blocks(), self._places, self._schema.num_floating), columns)

    @override
    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        return self._update.read_carried(next(own for own in self._update.schema.segments if own.dtype == run.dtype))


class _SpreadBlocks:
    """The entries of a vector at their places in a longer one, and zeros elsewhere."""

    def __init__(self, values: Blocks, places: Sequence[range], size: int) -> None:
        self._values, self._places, self._size = values, places, size

    @property
    def size(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Vector]:
        out, entries = np.empty(min(BLOCK, self._size), np.float32), iter(self._values)
        block = np.empty(0, np.float32)
        places = iter(self._places)
        place = next(places, None)
        for part in blocks(self._size):
            out[: part.stop - part.start] = 0.0
            while place is not None and place.start < part.stop:
                if not block.size:
                    block = next(entries)
                count = min(block.size, len(place), part.stop - place.start)
                first = place.start - part.start
                out[first : first + count], block = block[:count], block[count:]
                place = place[count:] or next(places, None)
            yield out[: part.stop - part.start]
