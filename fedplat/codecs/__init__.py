"""Compression of updates: codecs between a model's float32 vector and bytes.

`codec.py` defines codecs. Each codec has an options record (the `[compression]` tables of a job file) with a `build()`
method. `docs/contributing.md` has the steps to add one.

Codecs do not process the integer entries of a model, which are carried separately from the vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from fedplat.codecs.codec import Codec, ErrorFeedback, Payload, with_error_feedback
from fedplat.codecs.eden import Eden
from fedplat.codecs.quantize import Bf16, Plain, Quantize
from fedplat.codecs.topk import TopK
from fedplat.config.plugins import Kind, by_name, define
from fedplat.errors import CodecError


@runtime_checkable
class CodecOptions(Protocol):
    """The `[compression]` tables of a job file: the options of a codec, selected by the key `codec`."""

    def build(self) -> Codec:
        """Return the codec with these options."""
        ...


CODECS: Mapping[str, type[CodecOptions]] = by_name(Plain, Bf16, Quantize, TopK, Eden)
"""The options record of each built-in codec, by its name in a job file."""

KIND = define(Kind("codecs", "codec", "a codec", CodecOptions, ("build",), CODECS))

__all__ = [
    "CODECS",
    "Bf16",
    "Codec",
    "CodecError",
    "CodecOptions",
    "Eden",
    "ErrorFeedback",
    "Payload",
    "Plain",
    "Quantize",
    "TopK",
    "with_error_feedback",
]
