"""A guard around the codec of a plugin, whose code may raise any error or yield anything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from fedplat.codecs.codec import Codec, Source
from fedplat.config import user_code
from fedplat.errors import PluginError
from fedplat.model import Blocks, Vector, blocks


def guard(codec: Codec, name: str) -> Codec:
    """Return a codec whose errors are `UserCodeError` and `PluginError`, apart from `CodecError`.

    Its reader yields blocks of float32 with the sizes of `blocks(size)`.
    """
    what = f'the codec "{name}"'

    def write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
        with user_code.wrap_errors(f"{what}: write()"):
            yield from codec.write(vector, rng)

    def read(source: Source, size: int) -> Iterator[Vector]:
        with user_code.wrap_errors(f"{what}: read()"):
            for part, block in itertools.zip_longest(blocks(size), codec.read(source, size)):
                expected = None if part is None else (part.stop - part.start,)
                if block is None or block.dtype != np.float32 or block.shape != expected:
                    found = "nothing" if block is None else f"{block.dtype}{list(block.shape)}"
                    wanted = "nothing more" if expected is None else f"a block of float32{list(expected)}"
                    raise PluginError(f"{what}: read() yielded {found}; expected {wanted}")
                yield block

    def max_bytes(size: int) -> int:
        with user_code.wrap_errors(f"{what}: max_bytes()"):
            most = codec.max_bytes(size)
        if type(most) is not int or most < 0:
            raise PluginError(f"{what}: max_bytes() returned {most!r}; expected a number of bytes")
        return most

    return dataclasses.replace(codec, write=write, read=read, max_bytes=max_bytes)
