"""Declared columns: the type of the values, and what they may be, as a procedure and the owner of a table declare them.

What a column is read as follows from its type: numbers and dates (days since 1970) are 64-bit floats, NaN where a row
has no value; the values of categories and truth values are the places in `levels`, of which the last is `missing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat import texts

Finite = Annotated[float, Meta(ge=-1e100, le=1e100)]
Label = Annotated[str, Meta(min_length=1, max_length=200)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Floats: TypeAlias = npt.NDArray[np.float64]

MISSING, OTHER = "missing", "other"
"""Levels of rows without a value, and of those with one outside the declared categories."""
_MAX_STEPS = 2**50
"""Most steps from 0 to an end of a range: so a value of 64 bits divided by the resolution is right to a step."""
_EPOCH = date(1970, 1, 1)


class NumericColumn(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="number"):
    """The declared range of a column of numbers, and its resolution, to which values are rounded."""

    low: Finite
    """Least value that a row may have."""
    high: Finite
    """Largest value that a row may have."""
    resolution: Annotated[float, Meta(gt=0.0, le=1e100)]
    """Step of the values, such as 1 for whole years or 0.1 for a laboratory value with one decimal."""
    unit: Annotated[str, Meta(max_length=60)] = ""
    """Unit of the values, such as `"mg/l"`. All sites have to declare the same text."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low:g}, high = {self.high:g}: expected low below high")
        if max(abs(self.low), abs(self.high)) > _MAX_STEPS * self.resolution:
            raise ValueError(f"resolution = {self.resolution:g}: it is too fine for the range; expected a larger one")
        if self.high - self.low < self.resolution:
            raise ValueError(
                f"resolution = {self.resolution:g}: expected at most the range, from {self.low:g} to {self.high:g}"
            )

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that rows are counted by: numbers themselves are not."""
        return ("present", MISSING)

    @property
    def expected(self) -> str:
        """The type of the values, for people."""
        return "numbers"

    @property
    def range(self) -> str:
        """The range, for people."""
        return f"its declared range, from {self.low:g} to {self.high:g}"

    @property
    def middle(self) -> int:
        """The middle of the range, in steps of the resolution."""
        return (self._count(self.low) + self._count(self.high)) // 2

    @property
    def reach(self) -> int:
        """The largest distance of a value from the middle, in steps of the resolution."""
        return max(self.middle - self._count(self.low), self._count(self.high) - self.middle)

    def _count(self, value: float) -> int:
        return int(np.rint(value / self.resolution))

    def count_steps(self, values: Floats) -> npt.NDArray[np.int64]:
        """Return the distances of values, none of them NaN, from the middle of the range, in steps."""
        return np.rint(values / self.resolution).astype(np.int64) - self.middle

    def differences_from(self, site: Column) -> Iterator[str]:
        """Yield in words how a site has declared the column differently from this, the procedure's declaration."""
        if not isinstance(site, NumericColumn):
            yield _name_types(self, site)
            return
        if self.unit != site.unit:
            yield f"its unit is {_name_unit(site.unit)}, and the procedure has {_name_unit(self.unit)}"
        if (self.low, self.high) != (site.low, site.high):
            yield (
                f"its range is from {site.low:g} to {site.high:g}, and the procedure has one from {self.low:g} to "
                f"{self.high:g}"
            )
        multiple = self.resolution / site.resolution
        if round(multiple) < 1 or abs(multiple - round(multiple)) > 1e-9 * multiple:
            yield (
                f"its resolution is {site.resolution:g}, and the procedure has {self.resolution:g}; expected the same, "
                "or a multiple"
            )


class CategoryColumn(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="category"):
    """The declared categories of a column of texts or whole numbers."""

    categories: Annotated[tuple[Label, ...], Meta(min_length=1, max_length=10_000)]
    """The values, as text: `["1", "2"]` also stands for the numbers 1 and 2."""
    other: bool = False
    """Whether a row may have another value, which is then counted as `other`; by default it is an error."""

    def __post_init__(self) -> None:
        twice = sorted({each for each in self.categories if self.categories.count(each) > 1})
        if twice:
            raise ValueError(f"categories: {texts.quote(twice[0])} is listed twice; expected each category once")
        if OTHER in self.categories:
            raise ValueError("categories: 'other' is reserved; expected other = true, which counts all other values")
        if any(not each.strip() for each in self.categories):
            raise ValueError("categories: a category is blank; expected none, since a blank text is a missing value")
        if MISSING in self.categories:
            raise ValueError("categories: 'missing' is reserved for rows without a value; expected another name")

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that rows are counted by."""
        return (*self.categories, *((OTHER,) if self.other else ()), MISSING)

    @property
    def expected(self) -> str:
        """The type of the values, for people."""
        return "texts or whole numbers"

    @property
    def range(self) -> str:
        """The range, for people."""
        return "its declared categories"

    def differences_from(self, site: Column) -> Iterator[str]:
        """Yield in words how a site has declared the column differently from this, the procedure's declaration."""
        if not isinstance(site, CategoryColumn):
            yield _name_types(self, site)
            return
        if absent := sorted({*self.categories} - {*site.categories}):
            yield f"it does not have the procedure's category {texts.quote(absent[0])}; expected the same categories"
        if extra := {*site.categories} - {*self.categories}:  # their names stay at the site
            yield f"{len(extra)} of its {len(site.categories)} categories are not the procedure's; expected the same"
        if site.other and not self.other:
            yield "it has other = true, and the procedure does not"


class BooleanColumn(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="boolean"):
    """A column of truth values, or of the numbers 0 and 1."""

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that rows are counted by."""
        return ("false", "true", MISSING)

    @property
    def expected(self) -> str:
        """The type of the values, for people."""
        return "truth values"

    @property
    def range(self) -> str:
        """The range, for people."""
        return "the declared words for true and false, and 1 and 0"

    def differences_from(self, site: Column) -> Iterator[str]:
        """Yield in words how a site has declared the column differently from this, the procedure's declaration."""
        if not isinstance(site, BooleanColumn):
            yield _name_types(self, site)


class DateColumn(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="date"):
    """The declared range of a column of days, and its resolution, to which days are rounded down."""

    first: date
    """First day that a row may have."""
    last: date
    """Last day that a row may have."""
    resolution_days: Annotated[int, Meta(ge=1, le=36_525)] = 1
    """Step in days: a value becomes the first day of its step, counted from `first`."""

    def __post_init__(self) -> None:
        if not self.first <= self.last:
            raise ValueError(f"first = {self.first}, last = {self.last}: expected first before last")

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that rows are counted by: days themselves are not."""
        return ("present", MISSING)

    @property
    def expected(self) -> str:
        """The type of the values, for people."""
        return "dates without a time zone, such as 2026-11-28"

    @property
    def range(self) -> str:
        """The range, for people."""
        return f"its declared range, from {self.first} to {self.last}"

    @property
    def low(self) -> float:
        """The first day, in days since 1970."""
        return count_days(self.first)

    @property
    def high(self) -> float:
        """The last day, in days since 1970."""
        return count_days(self.last)

    def round(self, days: Floats) -> Floats:
        """Return the first days of the steps of values, NaN where they are NaN."""
        return self.low + np.floor((days - self.low) / self.resolution_days) * self.resolution_days

    def differences_from(self, site: Column) -> Iterator[str]:
        """Yield in words how a site has declared the column differently from this, the procedure's declaration."""
        if not isinstance(site, DateColumn):
            yield _name_types(self, site)
            return
        if (self.first, self.last) != (site.first, site.last):
            yield (
                f"its range is from {site.first} to {site.last}, and the procedure has one from {self.first} to "
                f"{self.last}"
            )
        if self.resolution_days % site.resolution_days:
            yield (
                f"its resolution is {site.resolution_days} days, and the procedure has {self.resolution_days}; "
                "expected the same, or a multiple"
            )


Column: TypeAlias = NumericColumn | CategoryColumn | BooleanColumn | DateColumn
"""A declared column."""


def count_days(day: date) -> float:
    """Return a day as the number of days since 1970."""
    return float((day - _EPOCH).days)


def _name_types(declared: Column, site: Column) -> str:
    types = (str(each.__struct_config__.tag) for each in (site, declared))
    return "its type is {}, and the procedure has {}".format(*types)


def _name_unit(unit: str) -> str:
    return texts.quote(unit) if unit else "none"
