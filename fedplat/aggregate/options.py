"""Value ranges of the options records, and their check when a record is created."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fedplat.config.decoding import prepare_type

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
"""A step size: finite in float32, so never infinite or NaN."""
Coefficient = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
"""A factor of a term that may be left out: finite in float32."""
Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""A decay factor: the fraction of the past that is kept from round to round."""
Exponent = Annotated[float, msgspec.Meta(ge=0, le=10)]
"""An exponent of numbers that may be large: the power must stay finite."""
Population = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
"""A number of clients."""
Floor = Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)]
"""A lower bound of a denominator: still above 0 in float32."""


def check(options: msgspec.Struct) -> None:
    """Raise `ValueError` if a field is out of its declared range.

    msgspec checks records that it decodes, but not those created in Python; this function checks the latter.
    """
    for field in msgspec.structs.fields(type(options)):
        value = getattr(options, field.name)
        try:
            msgspec.convert(value, prepare_type(field.type))
        except msgspec.ValidationError as exc:
            raise ValueError(f"{field.name} is {value!r}: {exc}") from exc
