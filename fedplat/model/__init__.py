"""A model is one flat buffer: `Schema` is its layout, `Parameters` are named views of the bytes.

The bytes are the data section of a safetensors file, so storing, sending and hashing a model copies nothing.
fedplat parses the container itself (`file.py`) because the safetensors library cannot return the flat buffer; the
library is the oracle in the tests. Every model has exactly one file: tensors are in *canonical order* (by decreasing
item size, then dtype, then the order in which they were passed), without gaps. So each view is aligned, each dtype is
one contiguous run, and two files of equal schema have equal headers, byte for byte.

Averaging uses only `Parameters.to_blocks()`: all floating-point entries as one float32 vector, read block by block
(float16, bfloat16 and float64 are converted). Entries of other dtypes (counters such as BatchNorm's) are carried, not
averaged, by the schema's `carry` rule: "keep" leaves the base version's value, "max" is the largest value of the merged
updates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import ModelError
from fedplat.model import file
from fedplat.model.blocks import BLOCK, WINDOW, Blocks, Vector, VectorBlocks, blocks, is_finite, part_of, windows
from fedplat.model.difference import Difference, Part, subtract
from fedplat.model.file import ModelFile
from fedplat.model.schema import DTYPES, FLOATING, SERVER, Carry, Schema, Segment, TensorSpec
from fedplat.model.values import (
    Bytes,
    FlatModel,
    FloatingBlocks,
    Read,
    Values,
    add_step,
    all_finite,
    apply_step,
    limit_spreads,
    read_array,
    read_base_values,
    read_run,
)

__all__ = [
    "BLOCK",
    "DTYPES",
    "FLOATING",
    "SERVER",
    "WINDOW",
    "Blocks",
    "Bytes",
    "Carry",
    "Difference",
    "FlatModel",
    "ModelFile",
    "Parameters",
    "Read",
    "Schema",
    "Segment",
    "TensorSpec",
    "Values",
    "Vector",
    "VectorBlocks",
    "add_step",
    "all_finite",
    "apply_step",
    "blocks",
    "is_finite",
    "limit_spreads",
    "part_of",
    "read_array",
    "read_base_values",
    "read_run",
    "windows",
]


class Parameters(Mapping[str, npt.NDArray[Any]]):
    """The values of a model: named views of one flat buffer.

    >>> parameters = Parameters.from_arrays({"weight": np.ones((2, 3), np.float32)})
    >>> parameters["weight"] *= 2  # a view: the buffer changes
    >>> parameters.to_vector()
    array([2., 2., 2., 2., 2., 2.], dtype=float32)
    """

    def __init__(self, schema: Schema, buffer: Bytes) -> None:
        if buffer.dtype != np.uint8 or buffer.shape != (schema.size_bytes,):
            raise ModelError(f"the buffer is {buffer.dtype} {buffer.shape}; expected uint8 ({schema.size_bytes},)")
        self.schema = schema
        self.buffer = buffer

    @classmethod
    def zeros(cls, schema: Schema) -> Parameters:
        """Return parameters with all entries 0."""
        return cls(schema, np.zeros(schema.size_bytes, np.uint8))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], carry: Carry = "keep") -> Parameters:
        """Copy named arrays, or tensors of PyTorch, into one flat buffer. Raises `ModelError`."""
        contiguous = {name: np.asarray(read_array(name, array), order="C") for name, array in arrays.items()}
        parameters = cls.zeros(Schema.of(contiguous, carry))
        parameters.assign(contiguous)
        return parameters

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview | Bytes) -> Parameters:
        """Parse a safetensors file in memory; shares the memory of `data` if the file is canonical.

        Raises `ModelError` if the bytes are not exactly one well-formed file.
        """
        content = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        if content.dtype != np.uint8 or content.ndim != 1:
            raise ModelError(f"the file is {content.dtype} {list(content.shape)}; expected a vector of uint8")
        size = file.header_size(content[:8].tobytes(), len(content))
        layout = file.read_layout(content[8 : 8 + size].tobytes(), len(content) - 8 - size)
        body = content[8 + size :]
        if layout.schema.tensors == layout.tensors:
            # Other software may write a header of any length, but views must be aligned.
            return cls(layout.schema, body if body.ctypes.data % 8 == 0 else body.copy())
        # Written by other software: lay the tensors out in canonical order.
        parameters = cls.zeros(layout.schema)
        start = 0
        for spec in layout.tensors:
            end = start + spec.size_bytes
            parameters[spec.name].reshape(-1).view(np.uint8)[:] = body[start:end]
            start = end
        return parameters

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False) -> Parameters:
        """Map a safetensors file into memory. Raises `ModelError` or `OSError`.

        `writable` parameters may be changed: only what is changed is copied, and the file stays as it is.
        """
        if os.stat(path).st_size < 8:
            raise ModelError(f"{os.fspath(path)} is too short to be a safetensors file")
        return cls.from_bytes(np.asarray(np.memmap(path, np.uint8, mode="c" if writable else "r")))

    def assign(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy named arrays, or tensors, into the buffer.

        Raises `ModelError` unless names, shapes and dtypes are the schema's.
        """
        for name, array in self._read_arrays(arrays):
            self[name][...] = array

    def _read_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield arrays with the names, shapes and dtypes of the schema, in canonical order. Raises `ModelError`."""
        if missing := [name for name in self if name not in arrays]:
            raise ModelError(f"tensor {missing[0]!r} is missing ({len(missing)} in all)")
        if extra := [name for name in arrays if name not in self._index]:
            raise ModelError(f"tensor {extra[0]!r} is not part of the model ({len(extra)} in all)")
        for tensor in self.schema.tensors:
            array, dtype = read_array(tensor.name, arrays[tensor.name]), DTYPES[tensor.dtype]
            if array.shape != tensor.shape or array.dtype != dtype:
                raise ModelError(
                    f"tensor {tensor.name!r} is {array.dtype} {list(array.shape)}; "
                    f"expected {dtype} {list(tensor.shape)}"
                )
            yield tensor.name, array

    @cached_property
    def _index(self) -> dict[str, int]:
        return {tensor.name: position for position, tensor in enumerate(self.schema.tensors)}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        position = self._index[name]
        spec, start = self.schema.tensors[position], self.schema.offsets[position]
        return self.buffer[start : start + spec.size_bytes].view(DTYPES[spec.dtype]).reshape(spec.shape)

    def __setitem__(self, name: str, array: npt.ArrayLike) -> None:
        """Copy values of the same shape into the view, so that `parameters["weight"] *= 2` works too."""
        view, values = self[name], np.asarray(array)
        if values.shape != view.shape:
            raise ModelError(f"tensor {name!r} has shape {list(view.shape)}; got values of shape {list(values.shape)}")
        view[...] = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self.schema.tensors)

    def segment(self, run: Segment) -> npt.NDArray[Any]:
        """Return a one-dimensional view of one run of equal dtype."""
        return self.buffer[run.offset : run.offset + run.size_bytes].view(DTYPES[run.dtype])

    def copy(self) -> Parameters:
        """Return a writable copy."""
        return Parameters(self.schema, self.buffer.copy())

    def to_vector(self) -> Vector:
        """Return all floating-point entries as float32, shape [num_floating]; a view if all of them are float32.

        A float64 entry beyond the range of float32 becomes infinite; `is_finite` detects this beforehand.
        """
        runs = [run for run in self.schema.segments if run.dtype in FLOATING]
        if len(runs) == 1 and runs[0].dtype == "F32":
            return self.segment(runs[0])
        vector = np.empty(self.schema.num_floating, np.float32)
        for block, values in zip(blocks(vector.size), self.to_blocks(), strict=True):
            vector[block] = values
        return vector

    def to_blocks(self, columns: range | None = None) -> Blocks:
        """Return the entries of `to_vector` block by block: views of float32 entries, others converted when read."""
        return FloatingBlocks(self.schema, lambda: self.reader(0), columns)

    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        """Iterate over the entries of one carried run in blocks, which are views."""
        values = self.segment(run)
        return (values[block] for block in blocks(values.size))

    def reader(self, longest: int) -> AbstractContextManager[Read]:
        """Return a reader of the flat buffer that returns views of any length."""
        return nullcontext(self._read)

    def _read(self, start: int, size: int) -> Bytes:
        return self.buffer[start : start + size]

    def plus(self, step: Vector) -> Parameters:
        """Return a copy with `step` (float32 [num_floating]) added; computed in float32 or a wider dtype.

        A result beyond the range of its dtype becomes infinite, without a warning.
        """
        if step.shape != (self.schema.num_floating,):
            raise ModelError(f"the step has shape {step.shape}; expected ({self.schema.num_floating},)")
        result = self.copy()
        start = 0
        for run in self.schema.segments:
            if run.dtype in FLOATING:
                view = result.segment(run)
                for block in blocks(run.count):
                    part = view[block]
                    part[...] = add_step(part, step[start : start + part.size])
                    start += part.size
        return result

    @property
    def uploaded(self) -> Parameters:
        """These parameters without the server-owned tensors: a copy, or themselves if the server owns none."""
        schema = self.schema.uploaded
        if schema is self.schema:
            return self
        parameters = Parameters.zeros(schema)
        parameters.assign({tensor.name: self[tensor.name] for tensor in schema.tensors})
        return parameters

    def minus(self, base: Parameters) -> Parameters:
        """Return the update from `base` to these parameters, without server-owned tensors.

        Floating-point entries are differences; other entries are copied from these parameters.
        """
        if problem := self.schema.difference_from(base.schema):
            raise ModelError(problem)
        if base.schema.uploaded is not base.schema:
            return self.uploaded.minus(base.uploaded)
        result = Parameters(self.schema, np.empty_like(self.buffer))
        for run in self.schema.segments:
            subtract(run.dtype, self.segment(run), base.segment(run), result.segment(run))
        return result

    def difference_to(self, trained: Mapping[str, npt.NDArray[Any]]) -> Difference:
        """Return the file of the update to trained values (see `minus`), computed when it is read.

        They may be arrays or tensors of PyTorch. Neither they nor these parameters may change until then. Raises
        `ModelError` unless names, shapes and dtypes are the schema's.
        """
        schema = self.schema
        if schema.uploaded is not schema:
            own = {name: array for name, array in trained.items() if not name.startswith(SERVER)}
            return self.uploaded.difference_to(own)
        if isinstance(trained, Parameters) and trained.schema == schema:
            parts = [Part(run.dtype, run.offset, trained.segment(run).view(np.uint8)) for run in schema.segments]
        else:
            parts = [
                Part(tensor.dtype, offset, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
                for tensor, offset, (_, array) in zip(
                    schema.tensors, schema.offsets, self._read_arrays(trained), strict=True
                )
            ]
        return Difference(schema, parts, self.buffer)

    def is_finite(self) -> bool:
        """Return whether no floating-point entry is NaN or infinite, in its own dtype or as float32."""
        return is_finite(self.to_blocks())

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        """The bytes of the safetensors file, without a copy of the values."""
        return (memoryview(self.schema.header), self.buffer.data)

    def to_bytes(self) -> bytes:
        """Return the safetensors file."""
        return self.schema.header + self.buffer.tobytes()

    def __eq__(self, other: object) -> bool:
        """Return whether schema and bytes are equal."""
        if not isinstance(other, Parameters):
            return NotImplemented
        return self.schema == other.schema and np.array_equal(self.buffer, other.buffer)

    def __repr__(self) -> str:
        return f"Parameters({self.schema!r})"
