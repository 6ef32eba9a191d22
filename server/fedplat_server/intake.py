"""Checks an update that has arrived: is it exactly what the base version's schema says, and finite?

An update's file must begin with the very header of its base version; an encoded one with the lines that follow from
the job's codec and that header (`fedplat.updates`). So nothing of a foreign header is parsed or believed unless the
update is refused anyway, and then only to say why.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedplat import codecs
from fedplat.aggregate import l2_norm
from fedplat.errors import CodecError, ModelError
from fedplat.model import Blocks, ModelFile, Parameters, Schema, Values, header
from fedplat.rounds.states import Reason
from fedplat.updates import Format

_MORE_HEADER = 64 * 2**10
"""How much longer than twice the expected header another one may be, to be read for the sake of a good reason."""


@lru_cache(maxsize=256)
def size_limit(base: Path, codec: codecs.Options | None) -> int:
    """The most bytes that an upload may announce; room above the exact size lets a misfit be refused by name.

    `base` is the file of a version, which never changes.
    """
    if codec is None:
        return 2 * base.stat().st_size + 2**20
    return Format(codec, Parameters.open(base).schema).max_bytes + 2**20


def check_update(update: Path, base: Path, codec: codecs.Options | None) -> float | tuple[Reason, str]:
    """Return the update's L2 norm, or why it is not acceptable. Reads it once at most; memory does not grow with it."""
    expected = Parameters.open(base).schema
    if codec is not None:
        return _check_encoded(update, Format(codec, expected))
    with update.open("rb") as file:
        same = file.read(len(expected.header)) == expected.header
    if not same or update.stat().st_size != expected.file_size_bytes:
        return Reason.REJECTED_SCHEMA, _difference(update, expected)
    return _norm(ModelFile(update, expected).to_blocks())


def open_update(update: Path, base: Values, codec: codecs.Options | None) -> Values:
    """An update that was checked, to be folded."""
    return ModelFile.open(update) if codec is None else Format(codec, base.schema).open(update)


def public_text(error: ModelError, path: Path) -> str:
    """What is wrong with a file, without where the server keeps it."""
    return str(error).replace(str(path), "the file")


def _check_encoded(update: Path, expected: Format) -> float | tuple[Reason, str]:
    """Decodes it once, block by block."""
    try:
        return _norm(expected.open(update).to_blocks())
    except (ModelError, CodecError) as exc:
        return Reason.REJECTED_SCHEMA, str(exc)


def _norm(values: Blocks) -> float | tuple[Reason, str]:
    """The L2 norm of float32 values, which is finite in float64 if and only if all of them are."""
    with np.errstate(invalid="ignore"):
        norm = l2_norm(values)
    return norm if math.isfinite(norm) else (Reason.REJECTED_NONFINITE, "")


def _difference(update: Path, expected: Schema) -> str:
    """Return what differs, by the update's header alone; one that is far longer than expected is not read either."""
    try:
        with update.open("rb") as file:
            size_bytes = update.stat().st_size
            header_bytes = header.header_size(file.read(8), size_bytes)
            if header_bytes > 2 * len(expected.header) + _MORE_HEADER:
                return f"the header has {header_bytes} bytes; the base version's file has {len(expected.header) - 8}"
            layout = header.read_layout(file.read(header_bytes), size_bytes - 8 - header_bytes)
    except ModelError as exc:
        return str(exc)
    return layout.schema.difference_from(expected) or "the header is not byte for byte that of the base version's file"
