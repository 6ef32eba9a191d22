"""Conversion of the columns of a table, as a library or a file has them, to arrays with one type for each declaration.

The same data gives the same arrays, whether a frame of pandas has it, a table of pyarrow, or a file of text. What does
not fit is counted and never shown: the counts may leave the site, and the values must not.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from fedplat import texts
from fedplat.errors import ProcedureError
from fedplat.tables.columns import Floats, count_days
from fedplat.tables.dictionary import Marker, SiteCategories, SiteColumn, SiteDates, SiteNumbers, SiteTruthValues

Array: TypeAlias = npt.NDArray[Any]

TEXT, ZONED = "text", "times with a time zone"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_DAY = re.compile(r"(\d{4}-\d\d-\d\d)([T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?)?", re.ASCII)
_ZONED_DAY = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d[\d:.]* ?(Z|UTC|[+-]\d\d(:?\d\d)?)", re.ASCII)
_TRUTH_TYPES, _NUMBER_TYPES = (bool, np.bool_), (int, float, Decimal, np.integer, np.floating)
_EXACT = 2**53
"""Floats are exact for all whole numbers up to it; beyond, two codes of a category may have become one."""
_MAX_CACHED = 100_000
_NAMES_OF_RANGES: Mapping[type[SiteColumn], str] = {
    SiteNumbers: "another range",
    SiteDates: "another range",
    SiteCategories: "another category or other = true",
    SiteTruthValues: "other words",
}


@dataclasses.dataclass
class ColumnCounts:
    """What the rows of a column have, in counts."""

    rows: int = 0
    missing: int = 0
    invalid: int = 0
    """Rows with a value of another type than the declared one."""
    outside: int = 0
    """Rows with a value of the type, outside the declared range or categories."""
    found: str = ""
    """What the first of the invalid rows has, such as `text`."""

    @property
    def fits(self) -> bool:
        """True if all rows are as declared."""
        return not self.invalid and not self.outside

    def describe(self, name: str, column: SiteColumn | None) -> str:
        """Return what does not fit as a sentence without values."""
        rows, shown = texts.format_count(self.rows, "row"), texts.quote(name)
        if self.invalid:
            expected = column.expected if column is not None else "numbers"
            hint = "; if it means that there is no value, declare it as missing" if self.found == TEXT else ""
            return f"{self.invalid:,} of {rows} have {self.found} in column {shown}; expected {expected}{hint}"
        assert column is not None
        return (
            f"{self.outside:,} of {rows} have values of column {shown} outside {column.range}; correct the data, or "
            f"declare {_NAMES_OF_RANGES[type(column)]}"
        )


@dataclasses.dataclass(frozen=True)
class Unfit:
    """A value that does not fit: `found` is what it is instead of the declared type; "": of the type, and outside."""

    found: str = ""


_Read: TypeAlias = Callable[[Any], float | Unfit]
"""Reads one value; NaN for a missing one."""


def convert(raw: Any, column: SiteColumn | None, counts: ColumnCounts, *, is_text: bool = False) -> Array:
    """Return the values of a column as declared, or as numbers without a range, and count its rows.

    Values that do not fit look like missing ones, so the array is of use only if `counts.fits`. With `is_text`
    everything is text, as in a CSV file. Raises `ProcedureError` for what is no column.
    """
    array = to_array(raw)
    counts.rows += array.size
    match column:
        case SiteCategories() | SiteTruthValues():
            read = _read_categories(column) if isinstance(column, SiteCategories) else _read_truth_values(column)
            codes = _read_unique(array, read, counts)
            return np.where(np.isnan(codes), len(column.levels) - 1, codes).astype(np.int64)
        case SiteDates():
            return column.round(_check_range(_convert_days(raw, array, column, counts), column, counts))
        case _:
            numbers = _convert_numbers(array, column.missing if column is not None else (), counts, is_text=is_text)
            return numbers if column is None else _check_range(numbers, column, counts)


def to_array(raw: Any) -> Array:
    """Return a column as an array of numbers, days or objects, shape [rows]. Raises `ProcedureError`."""
    if isinstance(raw, np.ma.MaskedArray):
        mask, raw = np.ma.getmaskarray(raw), raw.data.astype(object)
        raw[mask] = None  # asarray would read what is masked
    is_text = isinstance(raw, (list, tuple)) and any(isinstance(each, str) for each in cast(Sequence[object], raw))
    try:
        # Without `object` each text takes the space of the longest one, and [1, "a"] is two texts.
        array = np.array(raw, object) if is_text else np.asarray(raw)
        if _has_rounded(array, raw):
            array = np.array(_list_values(raw), object)
    except (TypeError, ValueError) as exc:
        raise ProcedureError(f"it cannot be read ({texts.name_type(exc)}); expected one value for each row") from exc
    if array.ndim != 1:
        raise ProcedureError(f"it has {array.ndim} dimensions; expected one value for each row")
    return array


def _has_rounded(array: Array, raw: Any) -> bool:
    """Return whether NumPy has whole numbers of a column as floats, because others are missing, and not exactly."""
    kind = str(getattr(raw, "dtype", getattr(raw, "type", ""))).lower()
    return array.dtype.kind == "f" and kind.startswith(("int", "uint")) and bool(np.any(np.abs(array) >= _EXACT))


def _list_values(raw: Any) -> list[Any]:
    """Return a column of pyarrow, polars or pandas as a list."""
    return next(getattr(raw, name) for name in ("to_pylist", "to_list", "tolist") if hasattr(raw, name))()


def name_code(value: object) -> str | Unfit | None:
    """Return a text or a whole number as text, None for a missing value."""
    if isinstance(value, str):
        return None if not value or value.isspace() else str(value)
    if _has_no_value(value):
        return None
    if isinstance(value, _TRUTH_TYPES) or not isinstance(value, _NUMBER_TYPES):
        return Unfit(_name_value_type(value))
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if not math.isfinite(value) or value != int(value):
        return Unfit("numbers that are not whole")
    if not isinstance(value, Decimal) and abs(value) >= _EXACT:
        return Unfit("whole numbers from 2^53 as floats, which are not exact")
    return str(int(value))


def _convert_numbers(array: Array, markers: Iterable[Marker], counts: ColumnCounts, *, is_text: bool) -> Floats:
    absent = [float(each) for each in markers if not isinstance(each, str) or _NUMBER.fullmatch(each)]
    words = frozenset(each for each in markers if isinstance(each, str))
    if array.dtype.kind in "biuf":
        numbers = array.astype(np.float64)
        missing = np.isnan(numbers)
    else:
        numbers = _parse_numbers(array) if is_text else None
        if numbers is None:
            numbers = _read_all(array, _read_numbers(words, is_text=is_text), counts)
            missing = np.zeros(array.size, bool)  # counted already
        else:
            missing = np.isnan(numbers)
    if absent:
        missing |= np.isin(numbers, absent)
        numbers[missing] = np.nan
    counts.missing += int(np.count_nonzero(missing))
    return numbers


def _parse_numbers(array: Array) -> Floats | None:
    """Return texts as numbers at once, NaN for empty ones; None if any is something else."""
    items: list[str] = array.tolist()
    if not set("".join(items)) <= _NUMBER_CHARACTERS:
        return None
    try:
        return np.fromiter((float(each or "nan") for each in items), np.float64, len(items))
    except ValueError:
        return None


def _read_numbers(words: frozenset[str], *, is_text: bool) -> _Read:
    def read(value: Any) -> float | Unfit:
        if isinstance(value, str):
            text = value.strip()
            if not text or text in words:
                return math.nan
            return float(text) if is_text and _NUMBER.fullmatch(text) else Unfit(TEXT)
        if _has_no_value(value):
            return math.nan
        if not isinstance(value, _TRUTH_TYPES + _NUMBER_TYPES):
            return Unfit(_name_value_type(value))
        try:
            return float(value)
        except OverflowError:  # a whole number of more than a thousand bits
            return math.inf if value > 0 else -math.inf

    return read


def _read_categories(column: SiteCategories) -> _Read:
    codes = {name: float(code) for code, name in enumerate(column.categories)}
    codes |= {name: codes[category] for name, category in column.rename.items()}
    codes |= dict.fromkeys(map(_name_marker, column.missing), math.nan)
    rest = float(len(column.categories)) if column.other else Unfit()

    def read(value: Any) -> float | Unfit:
        name = name_code(value)
        if name is None:
            return math.nan
        return name if isinstance(name, Unfit) else codes.get(name, rest)

    return read


def _read_truth_values(column: SiteTruthValues) -> _Read:
    codes: dict[str, float] = {"0": 0.0, "1": 1.0}
    codes |= {each.lower(): code for code, words in ((0.0, column.false), (1.0, column.true)) for each in words}
    codes |= dict.fromkeys((_name_marker(each).lower() for each in column.missing), math.nan)

    def read(value: Any) -> float | Unfit:
        if isinstance(value, _TRUTH_TYPES):
            return float(value)
        name = name_code(value)
        if name is None:
            return math.nan
        return name if isinstance(name, Unfit) else codes.get(name.strip().lower(), Unfit())

    return read


def _convert_days(raw: Any, array: Array, column: SiteDates, counts: ColumnCounts) -> Floats:
    if array.dtype.kind != "M":
        return _read_unique(array, _read_days(column), counts)
    if _has_zone(raw):
        counts.invalid, counts.found = counts.invalid + array.size, counts.found or ZONED
        return np.full(array.size, np.nan)
    absent = np.isnat(array)
    days = np.where(absent, np.nan, array.astype("datetime64[D]").astype(np.int64))
    absent |= np.isin(days, [day for each in column.missing if isinstance(day := _parse_day(str(each)), float)])
    counts.missing += int(np.count_nonzero(absent))
    return np.where(absent, np.nan, days)


def _read_days(column: SiteDates) -> _Read:
    words = {str(each) for each in column.missing}
    absent = {day for each in words if isinstance(day := _parse_day(each), float)}

    def read(value: Any) -> float | Unfit:
        if isinstance(value, str):
            text = value.strip()
            if not text or text in words:
                return math.nan
            day = _parse_day(text)
        elif _has_no_value(value):
            return math.nan
        elif isinstance(value, datetime.datetime):
            day = Unfit(ZONED) if value.tzinfo is not None else count_days(value.date())
        elif isinstance(value, datetime.date):
            day = count_days(value)
        else:
            return Unfit(_name_value_type(value))
        return math.nan if day in absent else day

    return read


def _parse_day(text: str) -> float | Unfit:
    """Return an ISO 8601 date, or the day of a time without a zone, in days since 1970."""
    match = _DAY.fullmatch(text)
    if match is None:
        return Unfit(ZONED if _ZONED_DAY.fullmatch(text) else TEXT)
    try:
        return count_days(datetime.date.fromisoformat(match[1]))
    except ValueError:  # the 31st of April
        return Unfit(TEXT)


def _read_unique(array: Array, read: _Read, counts: ColumnCounts) -> Floats:
    """Read a column of few different values, each of them once."""
    if array.dtype.kind in "iuf":
        unique, places = np.unique(array, return_inverse=True)
        read = {place: read(value) for place, value in enumerate(unique.tolist())}.__getitem__
        return _read_all(places, read, counts)
    cache: dict[str, float | Unfit] = {}

    def read_once(value: Any) -> float | Unfit:
        if type(value) is not str:  # 1, 1.0 and True are one key
            return read(value)
        found = cache.get(value)
        if found is None:
            found = read(value)
            if len(cache) < _MAX_CACHED:
                cache[value] = found
        return found

    return _read_all(array, read_once, counts)


def _read_all(array: Array, read: _Read, counts: ColumnCounts) -> Floats:
    values = np.empty(array.size, np.float64)
    other = None if array.dtype.kind in "OUbi" else Unfit(f"values of the type {array.dtype}")
    for place, item in enumerate(array.tolist()):
        found = other or read(item)
        if isinstance(found, Unfit):
            values[place] = math.nan
            counts.outside += not found.found
            counts.invalid += bool(found.found)
            counts.found = counts.found or found.found
        else:
            values[place] = found
            counts.missing += found != found
    return values


def _check_range(values: Floats, column: SiteNumbers | SiteDates, counts: ColumnCounts) -> Floats:
    """Count what is outside the range of a column. NaN is not."""
    counts.outside += int(np.count_nonzero((values < column.low) | (values > column.high)))
    return values


def _has_no_value(value: Any) -> bool:
    """Return whether an object stands for a missing value: None, NaN, or the NA and NaT of pandas."""
    if value is None:
        return True
    if isinstance(value, (float, np.floating)):
        return bool(value != value)
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return type(value).__name__ in ("NAType", "NaTType")


def _has_zone(raw: Any) -> bool:
    """Return whether the times of a column have a zone, which NumPy drops: of polars, or of pyarrow."""
    zones = (getattr(getattr(raw, "dtype", None), "time_zone", None), getattr(getattr(raw, "type", None), "tz", None))
    return any(zone is not None for zone in zones)


def _name_marker(marker: Marker) -> str:
    name = name_code(marker)
    return name if isinstance(name, str) else str(marker)


def _name_value_type(value: object) -> str:
    if isinstance(value, _TRUTH_TYPES):
        return "truth values"
    if isinstance(value, _NUMBER_TYPES):
        return "numbers"
    return TEXT if isinstance(value, str) else f"values of the type {texts.name_type(value)}"
