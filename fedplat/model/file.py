"""A model file that is read in windows: memory does not grow with its size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import ModelError
from fedplat.model import header
from fedplat.model.blocks import BLOCK, WINDOW, Blocks, blocks
from fedplat.model.schema import Schema, Segment
from fedplat.model.values import Bytes, FloatingBlocks, Read, read_run


class ModelFile:
    """A safetensors file as `Values`, read in windows anew in every pass.

    The file is not mapped into memory: the pages of a mapping count as the process's memory while the mapping exists,
    and touching them for the first time costs as much as copying into a window that stays in the cache.

    The file must be written by fedplat, with exactly the header of its schema.
    """

    def __init__(self, path: str | os.PathLike[str], schema: Schema) -> None:
        self.path = os.fspath(path)
        self.schema = schema

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Open a file and parse its header. Raises `OSError`, or `ModelError` unless fedplat wrote the file."""
        with open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            text = file.read(header.header_size(prefix, size_bytes))
        layout = header.read_layout(text, size_bytes - 8 - len(text))
        if layout.schema.header != prefix + text:
            raise ModelError("fedplat did not write the header; expected canonical order, spacing and padding")
        return cls(path, layout.schema)

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
        beginning = len(self.schema.header)
        window = np.empty(min(longest, self.schema.size_bytes), np.uint8)  # untouched pages cost nothing
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

        def read(start: int, size: int) -> Bytes:
            part = window[:size]
            rest, position = part.data, beginning + start
            while rest:
                count = os.preadv(descriptor, [rest], position)
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
