"""Compression of updates: codecs between a model's float32 vector and bytes.

`codec.py` defines codecs. Each codec is one file with an options record (the `[compression]` tables of a job file) that
has a `build()` method. `docs/contributing.md` has the steps to add one.

Codecs do not process the integer entries of a model, which are carried separately from the vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from fedplat.codecs.bf16 import Bf16
from fedplat.codecs.codec import Codec, Payload
from fedplat.codecs.eden import Eden
from fedplat.codecs.feedback import ErrorFeedback, with_error_feedback
from fedplat.codecs.plain import Plain
from fedplat.codecs.quantize import Quantize
from fedplat.codecs.topk import TopK
from fedplat.errors import CodecError

Options = Plain | Bf16 | Quantize | TopK | Eden
"""The `[compression]` tables of a job file: a union tagged by its key `codec`."""

CODECS: Mapping[str, type[Options]] = {each.__struct_config__.tag: each for each in get_args(Options)}
"""The options record of each codec, by its name in a job file."""

__all__ = [
    "CODECS",
    "Bf16",
    "Codec",
    "CodecError",
    "Eden",
    "ErrorFeedback",
    "Options",
    "Payload",
    "Plain",
    "Quantize",
    "TopK",
    "with_error_feedback",
]
