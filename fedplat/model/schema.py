"""The layout of a model's flat buffer: names, dtypes and shapes in canonical order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.errors import ModelError
from fedplat.texts import format_numbers, quote

Carry = Literal["keep", "max"]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "BOOL": np.dtype(np.bool_),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""NumPy dtypes by safetensors name."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATING = frozenset({"F64", "F32", "BF16", "F16"})

MAX_TENSORS = 100_000
MAX_RANK = 32
MAX_NAME_BYTES = 1_000
"""Maximum length of a tensor's name in bytes of UTF-8."""
_MAX_TENSOR_BYTES = 2**62
SERVER = "server/"
"""Prefix of the names of server-owned tensors, which clients download with the model and never upload."""
METADATA_KEY = "__metadata__"
CARRY_KEY = "fedplat.carry"
"""The key of the metadata in a safetensors header, and the key of the carry rule in the metadata."""

MESSAGE_KEY = "__records__"
"""The tensor that makes a file that of a Flower message, and has what is not an array in it (`fedplat.flower`)."""


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, dtype (safetensors name) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return self.count * DTYPES[self.dtype].itemsize


class Segment(msgspec.Struct, frozen=True):
    """A contiguous run of entries of equal dtype in the flat buffer; offset and size in bytes."""

    dtype: str
    offset: int
    size_bytes: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.size_bytes // DTYPES[self.dtype].itemsize


class StatisticsSpec(msgspec.Struct, frozen=True):
    """Running statistics of a normalisation layer: their columns in the model's float32 vector.

    `is_spread` is true for a variance or a deviation, which is at least 0.
    """

    name: str
    columns: range
    is_spread: bool


_AVERAGED = "running|moving|ema|avg|average"
_MEANS, _SPREADS = "mean", "var|variance|std"
_STATISTICS = re.compile(
    rf"(?:.*[./])?(?:batch_stats[./](?:.*[./])?(?:{_MEANS}|(?P<flax>{_SPREADS}))"
    rf"|(?:{_AVERAGED})_(?:{_MEANS}|(?P<after>{_SPREADS}))|(?:{_MEANS}|(?P<before>{_SPREADS}))_(?:{_AVERAGED}))"
)
"""The names of running statistics: those of PyTorch, Keras and Flax, and of layers that name theirs in another way."""


class Schema:
    """The tensors of a model in canonical order, and how its integer entries are carried."""

    def __init__(self, tensors: tuple[TensorSpec, ...], carry: Carry = "keep") -> None:
        if len(tensors) > MAX_TENSORS:
            raise ModelError(f"the model has {len(tensors)} tensors; at most {MAX_TENSORS} are accepted")
        for tensor in tensors:
            check_spec(tensor)
        names = [tensor.name for tensor in tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelError(f"the tensor {quote(twice)} appears twice; names must be unique")
        if carry not in ("keep", "max"):
            raise ModelError(f"carry rule {quote(carry)} is unknown; expected 'keep' or 'max'")
        ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.dtype))
        self.tensors: tuple[TensorSpec, ...] = tuple(ordered)
        self.carry: Carry = carry

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]], carry: Carry = "keep") -> Schema:
        """Return the schema of named arrays. Raises `ModelError` for a dtype that safetensors does not have."""
        specs: list[TensorSpec] = []
        for name, array in arrays.items():
            dtype = _NAMES.get(array.dtype)
            if dtype is None:
                raise ModelError(
                    f"tensor {quote(name)} has dtype {array.dtype}; expected one of {', '.join(map(str, _NAMES))}"
                )
            specs.append(TensorSpec(name, dtype, tuple(array.shape)))
        # The messages and updates of a job have the same tensors, and for a small model the schema is most of the work.
        return (_make_cached if len(specs) <= _CACHED_TENSORS else cls)(tuple(specs), carry)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor in the flat buffer, in bytes."""
        offsets: list[int] = []
        end = 0
        for tensor in self.tensors:
            offsets.append(end)
            end += tensor.size_bytes
        return tuple(offsets)

    @cached_property
    def size_bytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The runs of equal dtype, in order."""
        runs: list[Segment] = []
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            if runs and runs[-1].dtype == tensor.dtype:
                last = runs.pop()
                runs.append(Segment(last.dtype, last.offset, last.size_bytes + tensor.size_bytes))
            else:
                runs.append(Segment(tensor.dtype, offset, tensor.size_bytes))
        return tuple(runs)

    @cached_property
    def num_floating(self) -> int:
        """Length of the model's float32 vector."""
        return sum(run.count for run in self.segments if run.dtype in FLOATING)

    @cached_property
    def uploaded(self) -> Schema:
        """The schema of an update: the tensors that the server does not own; this one if it owns none."""
        own = tuple(tensor for tensor in self.tensors if not tensor.name.startswith(SERVER))
        return self if len(own) == len(self.tensors) else Schema(own, self.carry)

    @cached_property
    def statistics(self) -> tuple[StatisticsSpec, ...]:
        """The running statistics among the floating-point tensors, such as those of BatchNorm."""
        found: list[StatisticsSpec] = []
        start = 0
        for tensor in self.tensors:
            if tensor.dtype not in FLOATING:
                continue
            stop = start + tensor.count
            if (match := _STATISTICS.fullmatch(tensor.name)) and not tensor.name.startswith(
                "control/"
            ):  # not SCAFFOLD's
                found.append(StatisticsSpec(tensor.name, range(start, stop), match.lastgroup is not None))
            start = stop
        return tuple(found)

    @cached_property
    def spreads(self) -> tuple[range, ...]:
        """The columns of the running statistics that are at least 0."""
        return tuple(each.columns for each in self.statistics if each.is_spread)

    @cached_property
    def header(self) -> bytes:
        """The safetensors header that every file of this schema begins with."""
        entries: dict[str, Any] = {METADATA_KEY: {CARRY_KEY: self.carry}}
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (offset, offset + tensor.size_bytes),
            }
        text = msgspec.json.encode(entries)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def file_size_bytes(self) -> int:
        """Size in bytes of a file of this schema: header and flat buffer."""
        return len(self.header) + self.size_bytes

    def difference_from(self, expected: Schema) -> str:
        """Describe the first difference from `expected`; empty if the schemas are equal."""
        if self == expected:
            return ""
        tensors = {tensor.name: tensor for tensor in self.tensors}
        expected_tensors = {tensor.name: tensor for tensor in expected.tensors}
        if missing := [name for name in expected_tensors if name not in tensors]:
            return f"tensor {quote(missing[0])} is missing ({len(missing)} in all)"
        if extra := [name for name in tensors if name not in expected_tensors]:
            return f"tensor {quote(extra[0])} is not part of the model ({len(extra)} in all)"
        for name, tensor in tensors.items():
            other = expected_tensors[name]
            if tensor != other:
                return (
                    f"tensor {quote(name)} is {tensor.dtype} {format_numbers(tensor.shape)}; "
                    f"expected {other.dtype} {format_numbers(other.shape)}"
                )
        if self.tensors != expected.tensors:
            return "the tensors are in another order; expected the order of the base version's file"
        return f"the carry rule is {self.carry!r}; expected {expected.carry!r}"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Schema) and (self.tensors, self.carry) == (other.tensors, other.carry)

    def __hash__(self) -> int:
        return hash((self.tensors, self.carry))

    def __repr__(self) -> str:
        return f"Schema({len(self.tensors)} tensors, {self.size_bytes} bytes, carry={self.carry!r})"


_CACHED_TENSORS = 1_000
_make_cached = lru_cache(maxsize=16)(Schema)


def check_spec(tensor: TensorSpec) -> None:
    """Raise `ModelError` unless a model can have such a tensor."""
    name = quote(tensor.name)
    if tensor.dtype not in DTYPES:
        raise ModelError(f"tensor {name} has dtype {quote(tensor.dtype)}; expected one of {', '.join(DTYPES)}")
    if not tensor.name or tensor.name == METADATA_KEY or not 0 < _num_bytes(tensor.name) <= MAX_NAME_BYTES:
        raise ModelError(f"{name} cannot be the name of a tensor; expected 1 to {MAX_NAME_BYTES} bytes of UTF-8")
    if len(tensor.shape) > MAX_RANK or any(extent < 0 for extent in tensor.shape):
        raise ModelError(f"tensor {name} has the impossible shape {format_numbers(tensor.shape[:MAX_RANK])}")
    # NumPy refuses such extents even if a zero among them makes the tensor empty.
    extents = math.prod(extent for extent in tensor.shape if extent)
    if extents * DTYPES[tensor.dtype].itemsize > _MAX_TENSOR_BYTES:
        raise ModelError(f"tensor {name} of shape {format_numbers(tensor.shape)} is too large for any machine")


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # a lone surrogate, which no file can hold
        return 0
