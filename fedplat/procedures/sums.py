"""Exact sums: replies of integer tensors with declared bounds and steps, which add up in 64 bits.

A sum of floating-point numbers depends on the order of its parts, and one with 24 bits is too coarse for a Newton step
or a standard error. A reply is therefore of whole steps: each value is rounded to the nearest multiple of its tensor's
step, 2^k. Rounding is not random, so the same values give the same bytes each time, and a repeated reply reveals
nothing new. The declared bounds are the proof that no sum overflows (`ReplySchema.max_sites`): integers within them add
up to the same bits in any order, over any number of partial sums, and under masks (`ReplySchema.encoding`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat import model
from fedplat.errors import ModelError, ProcedureError
from fedplat.secure_aggregation.messages import MAX_GROUP
from fedplat.secure_aggregation.setup import ExactEncoding
from fedplat.texts import format_count, format_numbers, quote

Integers: TypeAlias = npt.NDArray[np.int64]

MAX_ENTRIES = 2**24
"""Maximum number of entries of a reply: 128 MiB."""


class ReplyTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a reply: multiples of the step 2^`exponent`, from -`bound` to `bound`, a multiple of the step too."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    bound: Annotated[float, Meta(gt=0.0, le=1e300)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_ENTRIES)], ...], Meta(max_length=8)] = ()
    exponent: Annotated[int, Meta(ge=-1000, le=1000)] = 0

    def __post_init__(self) -> None:
        steps = Fraction(self.bound) / Fraction(2) ** self.exponent
        if steps.denominator != 1 or not steps < 2**63:
            raise ValueError(
                f"the bound of {self.name} is {self.bound!r}, {float(steps):.6g} steps of 2^{self.exponent}; expected "
                "a whole number of steps below 2^63"
            )

    @property
    def count(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def limit(self) -> int:
        """The bound in steps."""
        return int(Fraction(self.bound) / Fraction(2) ** self.exponent)

    def round(self, values: npt.ArrayLike) -> Integers:
        """Return values in steps, rounded to the nearest, or to the even one of two.

        Raises `ProcedureError` for another shape or type, and for values beyond the bound, which it only counts: the
        message may leave the site.
        """
        array, name = np.asarray(values), quote(self.name)
        if array.shape != self.shape:
            raise ProcedureError(
                f"tensor {name} has the shape {format_numbers(array.shape)}; expected {format_numbers(self.shape)}"
            )
        if array.dtype.kind not in "biuf":
            raise ProcedureError(f"tensor {name} is of the type {array.dtype}; expected numbers")
        is_whole = array.dtype.kind != "f"
        bound = int(self.bound) if is_whole else self.bound
        num_beyond = array.size - int(np.count_nonzero((array >= -bound) & (array <= bound)))
        if num_beyond:
            raise ProcedureError(
                f"{num_beyond:,} of {array.size:,} entries of tensor {name} are not from -{self.bound:g} to "
                f"{self.bound:g}, the declared bounds; correct the data or declare others"
            )
        if not is_whole:
            return np.rint(np.ldexp(array.astype(np.float64), -self.exponent)).astype(np.int64)
        if self.exponent <= 0:
            return array.astype(np.int64) << -self.exponent
        step = Fraction(2) ** self.exponent  # floats would round twice
        return np.array([round(int(each) / step) for each in array.flat], np.int64).reshape(self.shape)


class ReplySchema(Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of a reply, all of which a site sends: one vector of 64-bit integers, in their order."""

    tensors: Annotated[tuple[ReplyTensor, ...], Meta(min_length=1, max_length=10_000)]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the tensor {twice[0]} is declared twice; expected each name once")
        if self.length > MAX_ENTRIES:
            raise ValueError(f"a reply has {self.length:,} entries; expected at most {MAX_ENTRIES:,}")

    @property
    def length(self) -> int:
        """The number of entries of a reply."""
        return sum(tensor.count for tensor in self.tensors)

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the names, shapes, bounds and steps."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).digest()

    @property
    def file_size_bytes(self) -> int:
        """The number of bytes of the file of a reply."""
        return _layout(self).file_size_bytes

    @property
    def max_sites(self) -> int:
        """The largest number of replies that certainly add up without an overflow; 0: not even two fit."""
        return (2**63 - 1) // max(tensor.limit for tensor in self.tensors)

    def check_sites(self, num_sites: int) -> None:
        """Raise `ProcedureError` unless the replies of so many sites certainly add up without an overflow."""
        if num_sites <= self.max_sites:
            return
        widest = max(self.tensors, key=lambda tensor: tensor.limit)
        raise ProcedureError(
            f"the sum of tensor {quote(widest.name)} over {num_sites:,} sites may not fit 64 bits: its bound is "
            f"{widest.bound:g}, in steps of 2^{widest.exponent}; expected at most {self.max_sites:,} sites, a lower "
            "bound or a larger step"
        )

    def encoding(self, max_sites: int) -> ExactEncoding:
        """Return how replies of a group of so many sites add up under masks. Raises `ProcedureError`."""
        if not 1 <= max_sites <= MAX_GROUP:
            raise ProcedureError(f"a group of {max_sites} sites; expected from 1 to {MAX_GROUP}")
        self.check_sites(max_sites)
        return ExactEncoding(self.length, max(tensor.limit for tensor in self.tensors), max_sites)

    def encode(self, values: Mapping[str, npt.ArrayLike]) -> Integers:
        """Return the reply with these values, rounded to steps, shape [`length`]. Raises `ProcedureError`."""
        if odd := sorted(values.keys() ^ {tensor.name for tensor in self.tensors}):
            state = "not declared" if odd[0] in values else "missing"
            raise ProcedureError(f"tensor {quote(odd[0])} is {state} in the reply; expected those of its schema")
        return np.concatenate([tensor.round(values[tensor.name]).reshape(-1) for tensor in self.tensors])

    def check(self, integers: Integers, num_sites: int = 1) -> None:
        """Raise `ProcedureError` unless integers may be the reply of a site, or the sum of those of `num_sites`.

        A receiver calls it for each reply before it adds it, and for a sum of masked ones, where it cannot.
        """
        if integers.dtype != np.int64 or integers.shape != (self.length,):
            raise ProcedureError(
                f"the reply is {integers.dtype} {format_numbers(integers.shape)}; expected int64 ({self.length},)"
            )
        start = 0
        for tensor in self.tensors:
            part, most = integers[start : start + tensor.count], tensor.limit * num_sites
            if int(part.max()) > most or int(part.min()) < -most:
                raise ProcedureError(
                    f"tensor {quote(tensor.name)} of {format_count(num_sites, 'site')} is beyond its declared bound"
                )
            start += tensor.count

    def write(self, integers: Integers) -> bytes:
        """Return the file of a reply: its tensors as integers in the format of a model."""
        self.check(integers)
        return _layout(self).header + integers.tobytes()

    def read(self, content: bytes) -> Integers:
        """Return the reply in a file. Raises `ProcedureError` unless it is exactly one of this schema."""
        layout = _layout(self)
        if len(content) != layout.file_size_bytes or not content.startswith(layout.header):
            try:
                difference = model.Parameters.from_bytes(content).schema.difference_from(layout)
            except ModelError as exc:
                difference = str(exc)
            raise ProcedureError(f"the reply is not of the declared form: {difference or 'its header differs'}")
        integers = np.frombuffer(content, "<i8", offset=len(layout.header)).astype(np.int64, copy=False)
        self.check(integers)
        return integers


@functools.lru_cache(maxsize=16)
def _layout(schema: ReplySchema) -> model.Schema:
    return model.Schema(tuple(model.TensorSpec(each.name, "I64", each.shape) for each in schema.tensors))


@dataclasses.dataclass(frozen=True)
class ReplyTotals:
    """The sum of the replies of `num_sites` sites."""

    schema: ReplySchema
    integers: Integers
    num_sites: int

    def steps(self, name: str) -> Integers:
        """Return the sum of a tensor in steps, exactly."""
        start = 0
        for tensor in self.schema.tensors:
            if tensor.name == name:
                return self.integers[start : start + tensor.count].reshape(tensor.shape)
            start += tensor.count
        raise KeyError(name)

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        """Return the sum of a tensor, rounded once to 64-bit floats."""
        (exponent,) = (tensor.exponent for tensor in self.schema.tensors if tensor.name == name)
        return np.ldexp(self.steps(name).astype(np.float64), exponent)


class ExactSum:
    """The sum of replies as they arrive, or of partial sums of them: the same bits in any order."""

    def __init__(self, schema: ReplySchema) -> None:
        self._schema = schema
        self._total = np.zeros(schema.length, np.int64)
        self._num_sites = 0

    def add(self, reply: Integers) -> None:
        """Add the reply of one more site. Raises `ProcedureError` for one that must not be added."""
        self._schema.check(reply)
        self._add(reply, 1)

    def merge(self, other: ReplyTotals) -> None:
        """Add the sum of other sites, such as those of another gateway, or of a group under masks.

        Raises `ProcedureError` for one that must not be added.
        """
        if other.schema != self._schema:
            raise ProcedureError("the sums are of different replies; expected partial sums of one step")
        self._schema.check(other.integers, other.num_sites)
        self._add(other.integers, other.num_sites)

    def _add(self, integers: Integers, num_sites: int) -> None:
        self._schema.check_sites(self._num_sites + num_sites)
        self._total += integers
        self._num_sites += num_sites

    @property
    def totals(self) -> ReplyTotals:
        """The sum so far."""
        return ReplyTotals(self._schema, self._total.copy(), self._num_sites)


__all__ = ["ExactSum", "Integers", "ReplySchema", "ReplyTensor", "ReplyTotals"]
