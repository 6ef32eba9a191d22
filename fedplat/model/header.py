"""Reads the header of a safetensors file that anyone may have sent: strict, and cheap to refuse.

A file is 8 bytes (the header's length, little-endian), the header (JSON: dtype, shape and byte range by name),
and the bytes. Here the ranges must fill the bytes exactly, and no key may occur twice, so two readers can never
see two models in one file.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from fedplat.errors import ModelError
from fedplat.model.schema import CARRY_KEY, MAX_TENSORS, METADATA_KEY, Carry, Schema, TensorSpec, check_spec
from fedplat.texts import numeral, quote

MAX_HEADER_BYTES = 16 * 2**20
MAX_METADATA = 1_000
"""Entries of a file's metadata; fedplat writes one."""
MAX_ENTRY_BYTES = 2_000
"""Length of the JSON that describes one tensor: a dtype, a shape and two offsets need a few hundred."""
_CACHED_BYTES = 2**20
# Up to the next colon that is in no string. Possessive throughout, so that hostile text is scanned once.
_UP_TO_COLON = re.compile(rb'[^":]*+(?:"(?:[^"\\]++|\\.)*+"[^":]*+)*+:', re.DOTALL)


class FileHeader(msgspec.Struct, frozen=True):
    """What a header says: the schema, and the file's own tensors in the order of their bytes."""

    schema: Schema
    tensors: tuple[TensorSpec, ...]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_size(prefix: bytes, file_size: int) -> int:
    """Length of the header that follows the first 8 bytes of a file of `file_size` bytes."""
    if len(prefix) < 8:
        raise ModelError("the file is too short to be a safetensors file")
    size = int.from_bytes(prefix, "little")
    if size > MAX_HEADER_BYTES:
        raise ModelError(f"the header claims {size} bytes; at most {MAX_HEADER_BYTES} are accepted")
    if 8 + size > file_size:
        raise ModelError(f"the header claims {size} bytes; the file has {file_size - 8} after its prefix")
    return size


def read_layout(text: bytes, body_size: int) -> FileHeader:
    """The layout that a header describes; its tensors fill the `body_size` bytes without gap or overlap."""
    # All updates of a job have the same header: reading it once is most of the work for a small model.
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
                f"tensor {quote(name)} claims the bytes {numeral(start)} to {numeral(stop)}; "
                f"expected {end} to {end + spec.size_bytes}"
            )
        tensors.append(spec)
        end = stop
    if end != body_size:
        raise ModelError(f"the tensors fill {end} bytes; the file has {body_size}")
    return FileHeader(Schema(tuple(tensors), carry), tuple(tensors))


_read_layout_cached = lru_cache(maxsize=16)(_read_layout)


def _decode(text: bytes) -> tuple[dict[str, _Entry], Carry]:
    """The entries of a header by name, and its carry rule."""
    num_keys = _count_keys(text)  # first, since it bounds what is decoded
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        num_expected = len(raw)
        metadata = msgspec.json.decode(raw.pop(METADATA_KEY, b"{}"), type=dict[str, str])
        entries = {name: _entry(name, entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        # Without the words of msgspec, which quote what the file says.
        raise ModelError("the safetensors header cannot be read; expected one JSON object of names") from exc
    if num_keys != num_expected + len(metadata) + len(_Entry.__struct_fields__) * len(entries):
        raise ModelError("the safetensors header has a key twice; keys must be unique")
    carry = metadata.get(CARRY_KEY, "keep")
    if carry not in ("keep", "max"):
        raise ModelError(f"carry rule {quote(carry)} is unknown; expected 'keep' or 'max'")
    return entries, "max" if carry == "max" else "keep"


def _entry(name: str, text: msgspec.Raw) -> _Entry:
    """What a header says of one tensor."""
    if (size := memoryview(text).nbytes) > MAX_ENTRY_BYTES:
        raise ModelError(f"the entry of tensor {quote(name)} has {size} bytes; at most {MAX_ENTRY_BYTES} are accepted")
    try:
        return msgspec.json.decode(text, type=_Entry)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise ModelError(
            f"the entry of tensor {quote(name)} cannot be read; expected exactly a dtype, a shape and two data_offsets"
        ) from exc


def _count_keys(text: bytes) -> int:
    """The number of keys in a JSON document: it has one colon per key outside its strings."""
    count = position = 0
    while found := _UP_TO_COLON.match(text, position):
        count, position = count + 1, found.end()
        if count > 4 * MAX_TENSORS + MAX_METADATA:
            raise ModelError(f"the header has too many keys; at most {MAX_TENSORS} tensors are accepted")
    return count
