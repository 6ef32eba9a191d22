"""Value ranges of the options records, and their check where a record is made."""

from __future__ import annotations

from typing import Annotated

import msgspec

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
"""A step size: finite in float32, so never infinite or NaN."""
Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""How much of the past is kept from round to round."""
Exponent = Annotated[float, msgspec.Meta(ge=0, le=10)]
"""A power of numbers that may be large: what comes out must stay finite."""
Population = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
"""A number of clients."""
Floor = Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)]
"""A denominator's floor: still above 0 in float32."""


def check(options: msgspec.Struct) -> None:
    """Raises `ValueError` when a field is out of its declared range.

    msgspec checks records that it decodes, and not those that are made in Python; this makes the two equal.
    """
    for field in msgspec.structs.fields(type(options)):
        value = getattr(options, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as exc:
            raise ValueError(f"{field.name} is {value!r}: {exc}") from exc
