"""The file of an encoded update, which a client sends if its job compresses updates.

```
fedplat encoded update 1            three lines of ASCII: the format,
{"codec":"bf16","zstd":false}       the codec's options,
5f0c...                             and the SHA-256 of the header of the base version's file
payload                             the floating-point entries, written by the codec
carried                             the other entries unchanged, if the schema's carry rule uses them
```
The lines and the length of the carried entries follow from the job and the base version. So a reader compares them byte
for byte, and never relies on declarations in the file. Without compression the file is the safetensors file of the
update, which begins differently.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat import codecs
from fedplat.codecs import with_error_feedback
from fedplat.codecs.codec import guard
from fedplat.config.decoding import prepare_type
from fedplat.config.plugins import BUILTIN, Plugins, build_checked, name_of
from fedplat.errors import CodecError, ModelError
from fedplat.model import DTYPES, FLOATING, Blocks, ModelFile, Schema, Segment, Values, Vector, blocks, part_of

MAGIC = b"fedplat encoded update 1\n"
_LONGEST_LINE = 1000


def options_to_text(options: codecs.CodecOptions) -> str:
    """Encode a codec's name and options as one line of JSON; equal options result in equal text."""
    return msgspec.json.encode(options).decode()


def options_from_text(text: str, plugins: Plugins = BUILTIN) -> codecs.CodecOptions:
    """Parse the text of `options_to_text`. Raises `CodecError` if this version does not support the codec or option."""
    try:
        return msgspec.json.decode(text, type=prepare_type(codecs.CodecOptions), dec_hook=plugins.decode)
    except (msgspec.DecodeError, ValueError) as exc:
        names = ", ".join(plugins.names(codecs.KIND))
        raise CodecError(f"the codec {text[:200]!r} is not supported ({exc}); supported codecs: {names}") from exc


@dataclasses.dataclass(frozen=True)
class Format:
    """The file format of encoded updates of one job: its codec, and the schema of its model.

    >>> import numpy as np
    >>> from fedplat.model import Parameters
    >>> update = Parameters.from_arrays({"weight": np.array([1.0, -2.5], np.float32)})
    >>> format = Format(codecs.Bf16(), update.schema)
    >>> content = b"".join(format.encode(update, np.random.default_rng(1)))
    >>> [block.tolist() for block in format.decode(content).to_blocks()]
    [[1.0, -2.5]]
    """

    options: codecs.CodecOptions
    schema: Schema

    @cached_property
    def codec(self) -> codecs.Codec:
        """The codec with its options; the codec of a plugin has a guard."""
        if type(self.options) in codecs.CODECS.values():
            return self.options.build()
        return guard(build_checked(self.options, codecs.Codec, "codec"), name_of(self.options))

    @property
    def needs_feedback(self) -> bool:
        """True if clients encode with error feedback."""
        return self.codec.needs_feedback

    @cached_property
    def prefix(self) -> bytes:
        """The lines that every file begins with."""
        digest = hashlib.sha256(self.schema.header).hexdigest()
        return MAGIC + f"{options_to_text(self.options)}\n{digest}\n".encode()

    @property
    def max_bytes(self) -> int:
        """The maximum size of a file in bytes."""
        payload = self.codec.max_bytes(self.schema.num_floating)
        return len(self.prefix) + payload + self._carried_bytes

    @cached_property
    def _carried(self) -> Mapping[Segment, int]:
        """The runs that are sent unchanged, with their offsets among these; empty unless the carry rule is "max"."""
        runs = [run for run in self.schema.segments if run.dtype not in FLOATING and self.schema.carry == "max"]
        ends = itertools.accumulate(run.size_bytes for run in runs)
        return {run: end - run.size_bytes for run, end in zip(runs, ends, strict=True)}

    @property
    def _carried_bytes(self) -> int:
        return sum(run.size_bytes for run in self._carried)

    def encode(self, update: Values, rng: np.random.Generator) -> Iterator[bytes]:
        """Yield the file of an update of this schema in pieces. Raises `CodecError` for entries that are not finite."""
        return self.frame_payload(self.codec.encode(update.to_blocks(), rng), update)

    def encode_with_feedback(
        self, update: Values, residual: Vector | None, rng: np.random.Generator
    ) -> tuple[Iterator[bytes], Vector]:
        """Encode an update plus the residual, the part of earlier updates that the codec omitted (None: nothing).

        Returns the file, in pieces, and the next residual, float32 [num_floating]. Raises the errors of `encode`.
        """
        feedback = with_error_feedback(self.codec)
        if residual is None:
            residual = feedback.init(self.schema.num_floating)
        payload, next_residual = feedback.encode(residual, update.to_blocks(), rng)
        return self.frame_payload([payload], update), next_residual

    def frame_payload(self, payload: Iterable[bytes], update: Values) -> Iterator[bytes]:
        """Yield the file of an update, in pieces, around its payload."""
        assert update.schema == self.schema
        yield self.prefix
        yield from payload
        for run in self._carried:
            for part in update.read_carried(run):
                yield part.tobytes()

    def decode(self, content: codecs.Payload) -> Values:
        """Return the update in an untrusted file; the payload is decoded when the blocks are read.

        Raises `ModelError` if the file is not an encoded update of this job and base version, and `CodecError` if its
        payload is too long or, while the blocks are read, if the payload is invalid otherwise.
        """
        return self._decode(content)

    def _decode(self, content: codecs.Payload) -> _Decoded:
        view = memoryview(content.data if isinstance(content, np.ndarray) else content)
        start, end = len(self.prefix), len(view) - self._carried_bytes
        if bytes(view[:start]) != self.prefix:
            raise ModelError(self._misfit(bytes(view[: len(MAGIC) + 2 * _LONGEST_LINE])))
        if end < start:
            raise ModelError(f"the encoded update has {len(view)} bytes; expected {len(view) + start - end} or more")
        values = self.codec.decode(view[start:end], self.schema.num_floating)
        return _Decoded(self.schema, values, self._carried, view[end:])

    def open(self, path: str | os.PathLike[str], start: int = 0, size_bytes: int | None = None) -> Values:
        """Map a file into memory and return its update. Raises the errors of `decode`, or `OSError`.

        With `size_bytes`, the update is the part of the file that begins at `start`. Pages that were read do not stay
        in the process's memory: a hundred updates may be open at once.
        """
        if size_bytes is None:
            size_bytes = os.stat(path).st_size - start
        if not size_bytes:
            return self.decode(b"")
        before = start % mmap.ALLOCATIONGRANULARITY
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), before + size_bytes, access=mmap.ACCESS_READ, offset=start - before)
        decoded = self._decode(memoryview(mapped)[before:])
        return dataclasses.replace(decoded, values=_MappedBlocks(decoded.values, mapped))

    def _misfit(self, beginning: bytes) -> str:
        """Describe why a file does not begin with the prefix."""
        expected = options_to_text(self.options)
        if not beginning.startswith(MAGIC):
            return f"the update is not encoded as this version of fedplat does it; expected the codec {expected}"
        actual, _, rest = beginning.removeprefix(MAGIC).partition(b"\n")
        if actual != expected.encode():
            return f"the update is encoded with {actual[:200].decode('ascii', 'replace')!a}; expected {expected}"
        if len(rest) < 65:
            return "the encoded update ends within its first lines"
        return "the encoded update belongs to other tensors; expected the names, shapes and dtypes of the base version"


def open_update(
    path: str | os.PathLike[str],
    base: Values,
    codec: codecs.CodecOptions | None,
    start: int = 0,
    size_bytes: int | None = None,
) -> Values:
    """Open the file of an update that was validated: encoded, or the safetensors file of the update itself.

    With `size_bytes`, it is the part of the file that begins at `start`.
    """
    if codec is None:
        return ModelFile.open(path, start, size_bytes)
    return Format(codec, base.schema).open(path, start, size_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Decoded:
    """The `Values` of an update in a file, which is read anew in each pass."""

    schema: Schema
    values: Blocks
    starts: Mapping[Segment, int]
    rest: memoryview

    def to_blocks(self, columns: range | None = None) -> Blocks:
        return part_of(self.values, columns)  # decodes the columns before them too: payloads have no index

    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        entries = np.frombuffer(self.rest, DTYPES[run.dtype], run.count, self.starts[run])
        return (entries[block] for block in blocks(run.count))


_MAX_RESIDENT_BLOCKS = 16
"""Blocks of a mapped file after which its pages are released from the process's memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class _MappedBlocks:
    """Blocks in a mapped file; pages are released from the process after reading, and stay in the page cache."""

    values: Blocks
    mapped: mmap.mmap

    @property
    def size(self) -> int:
        return self.values.size

    def __iter__(self) -> Iterator[Vector]:
        for number, block in enumerate(self.values, 1):
            yield block
            if number % _MAX_RESIDENT_BLOCKS == 0 and hasattr(self.mapped, "madvise"):
                self.mapped.madvise(mmap.MADV_DONTNEED)
