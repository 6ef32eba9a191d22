"""No compression: float32 unchanged. With zstd as the outer stage it is the lossless codec."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from fedplat.codecs.codec import Codec, Source, read_array
from fedplat.codecs.zstd import zstd
from fedplat.errors import CodecError
from fedplat.model import Blocks, Vector, blocks


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="codec", tag="none"):
    """Options of the codec without compression: 32 bits per parameter."""

    zstd: bool = False
    """True if the payload is compressed with zstd: about 28 bits, since the exponents of an update are similar."""

    def build(self) -> Codec:
        """Return the codec with these options."""
        codec = Codec(write=_write, read=_read, max_bytes=lambda size: 4 * size)
        return zstd(codec, item_bytes=4) if self.zstd else codec


def _write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    return (block.astype("<f4", copy=False).tobytes() for block in vector)


def _read(source: Source, size: int) -> Iterator[Vector]:
    for block in blocks(size):
        values = read_array(source, "<f4", block.stop - block.start).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise CodecError("the payload has NaN or infinite entries")
        yield values
