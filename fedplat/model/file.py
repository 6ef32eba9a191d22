"""A model file, untrusted: its header is parsed strictly, and its values are read in windows.

A file is 8 bytes (the header's length, little-endian), the header (JSON: dtype, shape and byte range by name),
and the bytes. This parser requires that the ranges fill the bytes exactly and that no key occurs twice, so two readers
can never see different models in one file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat import system
from fedplat.config.decoding import prepare_type
from fedplat.errors import ModelError
from fedplat.model.blocks import BLOCK, WINDOW, Blocks, blocks
from fedplat.model.schema import CARRY_KEY, MAX_TENSORS, METADATA_KEY, Carry, Schema, Segment, TensorSpec, check_spec
from fedplat.model.values import Bytes, FloatingBlocks, Read, read_run
from fedplat.texts import format_number, quote


class FilePart(NamedTuple):
    """Bytes of a file: those from `start`, up to its end or `size_bytes` of them."""

    path: Path
    start: int = 0
    size_bytes: int | None = None

    def read(self) -> bytes:
        """Read the bytes. Raises `OSError`."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            return file.read(-1 if self.size_bytes is None else self.size_bytes)


class ModelFile:
    """A safetensors file as `Values`, read in windows anew in every pass.

    The file is not mapped into memory: the pages of a mapping count as the process's memory while the mapping exists,
    and touching them for the first time costs as much as copying into a window that stays in the cache.

    The file must be written by fedplat, with exactly the header of its schema. It may be a part of another file, which
    begins there at `start`.
    """

    def __init__(self, path: str | os.PathLike[str], schema: Schema, start: int = 0) -> None:
        self.path = os.fspath(path)
        self.schema = schema
        self._start = start

    @classmethod
    def open(cls, path: str | os.PathLike[str], start: int = 0, size_bytes: int | None = None) -> ModelFile:
        """Open a file and parse its header; with `size_bytes`, the part of the file that begins at `start`.

        Raises `OSError`, or `ModelError` unless fedplat wrote the file.
        """
        with open(path, "rb") as file:
            if size_bytes is None:
                size_bytes = os.fstat(file.fileno()).st_size - start
            file.seek(start)
            prefix = file.read(8)
            text = file.read(header_size(prefix, size_bytes))
        layout = read_layout(text, size_bytes - 8 - len(text))
        if layout.schema.header != prefix + text:
            raise ModelError("fedplat did not write the header; expected canonical order, spacing and padding")
        return cls(path, layout.schema, start)

    def to_blocks(self, columns: range | None = None) -> Blocks:
        """Return the floating-point entries as float32; with `columns`, only these are read."""
        return FloatingBlocks(self.schema, lambda: self.reader(8 * WINDOW), columns)

    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        """Iterate over the entries of one carried run, `BLOCK` at a time."""
        with self.reader(8 * BLOCK) as read:
            for block in blocks(run.count):
                yield read_run(read, run, block.start, block.stop - block.start)

    @contextlib.contextmanager
    def reader(self, longest: int) -> Generator[Read]:
        """Yield a reader of the flat buffer, for at most `longest` bytes at a time, all into one window."""
        beginning = self._start + len(self.schema.header)
        window = np.empty(min(longest, self.schema.size_bytes), np.uint8)  # untouched pages cost nothing
        descriptor = os.open(self.path, os.O_RDONLY | system.O_BINARY)

        def read(start: int, size: int) -> Bytes:
            part = window[:size]
            rest, position = part.data, beginning + start
            while rest:
                count = system.pread_into(descriptor, rest, position)
                if not count:
                    raise ModelError(f"{self.path} ends after {position} bytes; expected {self._size_bytes}")
                rest, position = rest[count:], position + count
            return part

        try:
            yield read
        finally:
            os.close(descriptor)

    @property
    def _size_bytes(self) -> int:
        return self.schema.file_size_bytes


MAX_HEADER_BYTES = 16 * 2**20
MAX_METADATA = 1_000
"""Maximum number of metadata entries of a file; fedplat writes one."""
MAX_ENTRY_BYTES = 2_000
"""Maximum length of the JSON that describes one tensor: a dtype, a shape and two offsets need a few hundred bytes."""
_CACHED_BYTES = 2**20
# Up to the next colon outside strings. Possessive throughout, so that hostile text is scanned once.
_UP_TO_COLON = re.compile(rb'[^":]*+(?:"(?:[^"\\]++|\\.)*+"[^":]*+)*+:', re.DOTALL)


class FileHeader(msgspec.Struct, frozen=True):
    """A parsed header: the schema, and the file's own tensors in the order of their bytes."""

    schema: Schema
    tensors: tuple[TensorSpec, ...]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_size(prefix: bytes, file_size: int) -> int:
    """Return the length of the header after the first 8 bytes (`prefix`) of a file of `file_size` bytes.

    Raises `ModelError` if the prefix is too short, or the header would be too long or exceed the file.
    """
    if len(prefix) < 8:
        raise ModelError("the file is too short to be a safetensors file")
    size = int.from_bytes(prefix, "little")
    if size > MAX_HEADER_BYTES:
        raise ModelError(f"the header claims {size} bytes; at most {MAX_HEADER_BYTES} are accepted")
    if 8 + size > file_size:
        raise ModelError(f"the header claims {size} bytes; the file has {file_size - 8} after its prefix")
    return size


def read_layout(text: bytes, body_size: int) -> FileHeader:
    """Parse a header into the layout of its `body_size` bytes. Raises `ModelError`, also for a gap or an overlap."""
    # All updates of a job have the same header, and for a small model parsing it is most of the work.
    return (_read_layout_cached if len(text) <= _CACHED_BYTES else _read_layout)(text, body_size)


def _read_layout(text: bytes, body_size: int) -> FileHeader:
    entries, carry = _decode(text)
    tensors: list[TensorSpec] = []
    end = 0
    # Stable: empty tensors share their offset with a neighbour and keep the order of the header.
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        spec = TensorSpec(name, entry.dtype, entry.shape)
        check_spec(spec)
        start, stop = entry.data_offsets
        if start != end or stop - start != spec.size_bytes:
            raise ModelError(
                f"tensor {quote(name)} claims the bytes {format_number(start)} to {format_number(stop)}; "
                f"expected {end} to {end + spec.size_bytes}"
            )
        tensors.append(spec)
        end = stop
    if end != body_size:
        raise ModelError(f"the tensors fill {end} bytes; the file has {body_size}")
    return FileHeader(Schema(tuple(tensors), carry), tuple(tensors))


_read_layout_cached = lru_cache(maxsize=16)(_read_layout)


def _decode(text: bytes) -> tuple[dict[str, _Entry], Carry]:
    """Decode the entries of a header by name, and its carry rule."""
    num_keys = _count_keys(text)  # first, because it bounds the work of decoding
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        num_expected = len(raw)
        metadata = msgspec.json.decode(raw.pop(METADATA_KEY, b"{}"), type=dict[str, str])
        entries = {name: _entry(name, entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        # Without the message of msgspec, which quotes the file.
        raise ModelError("the safetensors header cannot be read; expected one JSON object of names") from exc
    if num_keys != num_expected + len(metadata) + len(_Entry.__struct_fields__) * len(entries):
        raise ModelError("the safetensors header has a key twice; keys must be unique")
    carry = metadata.get(CARRY_KEY, "keep")
    if carry not in ("keep", "max"):
        raise ModelError(f"carry rule {quote(carry)} is unknown; expected 'keep' or 'max'")
    return entries, "max" if carry == "max" else "keep"


def _entry(name: str, text: msgspec.Raw) -> _Entry:
    """Decode the entry of one tensor."""
    if (size := memoryview(text).nbytes) > MAX_ENTRY_BYTES:
        raise ModelError(f"the entry of tensor {quote(name)} has {size} bytes; at most {MAX_ENTRY_BYTES} are accepted")
    try:
        return msgspec.json.decode(text, type=prepare_type(_Entry))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise ModelError(
            f"the entry of tensor {quote(name)} cannot be read; expected exactly a dtype, a shape and two data_offsets"
        ) from exc


def _count_keys(text: bytes) -> int:
    """Count the keys of a JSON document: one colon outside strings per key."""
    count = position = 0
    while match := _UP_TO_COLON.match(text, position):
        count, position = count + 1, match.end()
        if count > 4 * MAX_TENSORS + MAX_METADATA:
            raise ModelError(f"the header has too many keys; at most {MAX_TENSORS} tensors are accepted")
    return count
