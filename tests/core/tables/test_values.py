"""The same values are read the same way from every library, and what does not fit is counted and not shown."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedplat.errors import ProcedureError
from fedplat.tables.dictionary import SiteCategories, SiteColumn, SiteDates, SiteNumbers, SiteTruthValues
from fedplat.tables.values import ColumnCounts, convert

NUMBER = SiteNumbers(low=0, high=120, resolution=1, missing=(-99, "unknown"))
SEX = SiteCategories(categories=("f", "m"), missing=("unknown", 9), rename={"1": "f", "2": "m"})
STAGE = SiteCategories(categories=("I", "II"), other=True)
DIED = SiteTruthValues(true=("true", "Ja"), false=("false", "nein"), missing=("unknown", 9))
DAY = SiteDates(first=datetime.date(2020, 1, 1), last=datetime.date(2026, 12, 31), missing=("unknown", "1900-01-01"))
BERLIN = datetime.timezone(datetime.timedelta(hours=1))


def read(column: SiteColumn, raw: Any, *, is_text: bool = False) -> tuple[list[Any], ColumnCounts]:
    counts = ColumnCounts()
    return convert(raw, column, counts, is_text=is_text).tolist(), counts


def list_forms(values: list[Any]) -> Iterator[Any]:
    """Yield a column with these values, None for a missing one, as the libraries have it."""
    yield values
    yield np.array(values, object)
    yield pd.Series(values)
    yield pd.Series(values, dtype=object)
    yield pd.Series(values).convert_dtypes()
    yield pd.Series(values, dtype="category")
    yield pa.array(values)
    yield pa.chunked_array([values[:1], values[1:]], pa.array(values).type)


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (NUMBER, [41, None, 0, -99], [41.0, None, 0.0, None]),
        (NUMBER, [41.5, None, 119.9], [41.5, None, 119.9]),
        (NUMBER, [Decimal("41.5"), None], [41.5, None]),
        (NUMBER, [True, None, False], [1.0, None, 0.0]),
        (SEX, ["f", None, "m", "unknown", "", "  ", "1"], [0, 2, 1, 2, 2, 2, 0]),
        (SEX, [1, None, 2, 9], [0, 2, 1, 2]),
        (STAGE, ["I", "III", None, "II"], [0, 2, 3, 1]),
        (DIED, [True, None, False], [1, 2, 0]),
        (DIED, [1, 0, None, 9], [1, 0, 2, 2]),
        (DIED, ["TRUE", "false", "ja", "nein", "", None, "unknown"], [1, 0, 1, 0, 2, 2, 2]),
        (DAY, [datetime.date(2020, 1, 2), None, datetime.date(1900, 1, 1)], [18263.0, None, None]),
        (DAY, [datetime.datetime(2020, 1, 2, 23, 59), None], [18263.0, None]),
        (DAY, ["2020-01-02", "2020-01-02T10:00:00.5", None, "", "unknown"], [18263.0, 18263.0, None, None, None]),
    ],
)
def test_every_library_has_the_same_values(column: SiteColumn, values: list[Any], expected: list[Any]) -> None:
    for raw in list_forms(values):
        found, counts = read(column, raw)
        assert [None if each != each else each for each in found] == expected, type(raw)
        missing = len(column.levels) - 1
        num_missing = sum(each is None or (isinstance(each, int) and each == missing) for each in expected)
        assert (counts.rows, counts.missing, counts.fits) == (len(values), num_missing, True)


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        (NUMBER, ["41", "", "1e1", "7.5", "+3"], [41.0, None, 10.0, 7.5, 3.0]),
        (NUMBER, ["41", " ", " 7 ", "unknown", "-99"], [41.0, None, 7.0, None, None]),
        (SEX, ["f", "", "2"], [0, 2, 1]),
        (DIED, ["True", "", "0", "1"], [1, 2, 0, 1]),
        (DAY, ["2020-01-02", ""], [18263.0, None]),
    ],
)
def test_text_of_a_file_is_read_as_its_declared_type(column: SiteColumn, text: list[str], expected: list[Any]) -> None:
    found, counts = read(column, text, is_text=True)
    assert [None if each != each else each for each in found] == expected
    assert counts.fits


@pytest.mark.parametrize(
    ("column", "raw", "is_text", "sentence"),
    [
        (NUMBER, [1, 999.25, -7], False, "2 of 3 rows have values of column 'x' outside its declared range, from 0 to"),
        (NUMBER, [np.inf, np.nan], False, "1 of 2 rows have values of column 'x' outside"),
        (NUMBER, [10**400], False, "1 of 1 row have values of column 'x' outside"),
        (NUMBER, [1, "999.25"], False, "1 of 2 rows have text in column 'x'; expected numbers; if it means that there"),
        (NUMBER, ["1_0", "nan", "inf", "3,5", "0x1"], True, "5 of 5 rows have text in column 'x'; expected numbers"),
        (NUMBER, ["1e999", "2"], True, "1 of 2 rows have values of column 'x' outside"),
        (NUMBER, [b"1"], False, "1 of 1 row have values of the type"),
        (
            SEX,
            ["f", "w999.25"],
            False,
            "have values of column 'x' outside its declared categories; correct the data, or",
        ),
        (SEX, [1.0, 1.5], False, "1 of 2 rows have numbers that are not whole in column 'x'; expected texts or whole"),
        (SEX, np.array([True]), False, "have truth values in column 'x'"),
        (SEX, np.array([2.0**53]), False, "whole numbers from 2^53 as floats, which are not exact"),
        (SEX, [2**53 + 1], False, "outside its declared categories"),
        (
            DIED,
            ["maybe999.25", "true"],
            False,
            "1 of 2 rows have values of column 'x' outside the declared words for true",
        ),
        (DIED, [2], False, "1 of 1 row have values of column 'x' outside"),
        (
            DAY,
            ["28.11.2026", "2026-04-31"],
            False,
            "2 of 2 rows have text in column 'x'; expected dates without a time",
        ),
        (DAY, ["2026-11-28T00:30:00+02:00", "2026-11-28 00:30Z"], False, "2 of 2 rows have times with a time zone in"),
        (DAY, [datetime.datetime(2026, 11, 28, tzinfo=BERLIN)], False, "times with a time zone"),
        (
            DAY,
            pd.Series(pd.to_datetime(["2026-11-28"])).dt.tz_localize("Europe/Berlin"),
            False,
            "times with a time zone",
        ),
        (DAY, pa.array([0], pa.timestamp("us", "Europe/Berlin")), False, "times with a time zone"),
        (DAY, [20200102], False, "1 of 1 row have numbers in column 'x'; expected dates"),
        (DAY, ["2019-12-31"], False, "outside its declared range, from 2020-01-01 to 2026-12-31"),
    ],
)
def test_what_does_not_fit_is_counted_and_not_shown(column: SiteColumn, raw: Any, is_text: bool, sentence: str) -> None:
    _, counts = read(column, raw, is_text=is_text)
    shown = counts.describe("x", column)
    assert sentence in shown
    assert not counts.fits
    assert "999.25" not in shown


def test_masked_values_are_missing_and_whole_numbers_of_64_bits_are_names() -> None:
    values, counts = read(NUMBER, np.ma.masked_array([1.0, 50.0], [True, False]))
    assert (values[1], counts.missing) == (50.0, 1)
    codes = SiteCategories(categories=("9007199254740993", "9007199254740992"))
    for raw in ([2**53 + 1], np.array([2**53 + 1]), pd.Series([2**53 + 1], dtype="Int64"), pa.array([2**53 + 1])):
        assert read(codes, raw)[0] == [0]


def test_days_are_rounded_down_to_the_resolution() -> None:
    weeks = SiteDates(first=datetime.date(2020, 1, 1), last=datetime.date(2026, 12, 31), resolution_days=7)
    found, _ = read(weeks, ["2020-01-01", "2020-01-07", "2020-01-08"])
    assert found == [18262.0, 18262.0, 18269.0]


@pytest.mark.parametrize("raw", [5, None, [[1], [2, 3]], np.ones((2, 2))])
def test_what_is_no_column_is_refused(raw: Any) -> None:
    with pytest.raises(ProcedureError, match="expected one value for each row"):
        read(NUMBER, raw)
