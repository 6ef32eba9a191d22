"""Conditions over columns select the rows that pandas selects, and compare only what can be compared."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from fedplat.tables.columns import BooleanColumn, CategoryColumn, Column, DateColumn, NumericColumn
from fedplat.tables.conditions import RowFilter

COLUMNS: dict[str, Column] = {
    "age": NumericColumn(0, 120, 1),
    "year": NumericColumn(0, 3000, 1),
    "stage": CategoryColumn(("I", "II"), other=True),
    "sex": CategoryColumn(("f", "m")),
    "died": BooleanColumn(),
    "seen": DateColumn(datetime.date(2020, 1, 1), datetime.date(2026, 12, 31)),
    "left": DateColumn(datetime.date(2020, 1, 1), datetime.date(2026, 12, 31)),
}
NAN = np.nan
ROWS = {
    "age": np.array([30.0, 40.0, NAN, 50.0]),
    "year": np.array([30.0, 1.0, 2.0, NAN]),
    "stage": np.array([0, 1, 2, 3]),  # I, II, other, missing
    "sex": np.array([0, 1, 2, 0]),
    "died": np.array([0, 1, 2, 1]),
    "seen": np.array([18262.0, 18263.0, NAN, 18264.0]),  # from 2020-01-01
    "left": np.array([18262.0, 18262.0, 18262.0, NAN]),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("age >= 40", [0, 1, 0, 1]),
        ("not age >= 40", [1, 0, 1, 0]),
        ("age != 40", [1, 0, 0, 1]),
        ("30 < age <= 50", [0, 1, 0, 1]),
        ("age in [30, 50]", [1, 0, 0, 1]),
        ("age not in [30]", [0, 1, 0, 1]),
        ("age not in []", [1, 1, 0, 1]),
        ("age == year", [1, 0, 0, 0]),
        ("age > -1", [1, 1, 0, 1]),
        ("stage == 'I'", [1, 0, 0, 0]),
        ("stage != 'I'", [0, 1, 1, 0]),
        ("'other' == stage", [0, 0, 1, 0]),
        ("stage in ('I', 'II')", [1, 1, 0, 0]),
        ("stage not in ['I']", [0, 1, 1, 0]),
        ("died == 1", [0, 1, 0, 1]),
        ("died in [0]", [1, 0, 0, 0]),
        ("seen < '2020-01-02'", [1, 0, 0, 0]),
        ("'2020-01-02' <= seen", [0, 1, 0, 1]),
        ("seen > left", [0, 1, 0, 0]),
        ("seen in ['2020-01-03']", [0, 0, 0, 1]),
        ("age >= 40 and sex == 'f' or died == 0", [1, 0, 0, 1]),
        ("age >= 40 and (sex == 'f' or died == 0)", [0, 0, 0, 1]),
    ],
)
def test_rows_are_selected(text: str, expected: list[int]) -> None:
    mask = RowFilter(text, COLUMNS).select(ROWS)
    assert mask is not None
    assert mask.dtype == bool
    assert mask.astype(int).tolist() == expected


def test_an_empty_text_selects_all_rows() -> None:
    assert RowFilter(" ", COLUMNS).select(ROWS) is None
    assert RowFilter("age > 1 and (not sex == 'f' or year == age)", COLUMNS).names == ("age", "sex", "year")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight > 3", "the column 'weight' is not declared"),
        ("age == 'old'", "'age' is compared with 'old'; expected a number"),
        ("stage == 'III'", "'stage' is compared with 'III'; expected one of its declared categories"),
        ("stage in ['I', 3]", r"'stage' is compared with 3\.0; expected one of its declared categories"),
        ("sex == 'other'", "expected one of its declared categories"),
        ("sex == 'missing'", "expected one of its declared categories"),
        ("died == 2", "expected 1 for true or 0 for false"),
        ("died == 'true'", "expected 1 for true or 0 for false"),
        ("seen > '28.11.2026'", "expected a day such as '2026-11-28'"),
        ("seen > 2026", "expected a day such as"),
        ("sex > 'f'", "the column 'sex' has no order; expected ==, !=, in or not in"),
        ("died < 1", "has no order"),
        ("age == seen", "the columns 'age' and 'seen' are compared; expected two of numbers, or two of days"),
        ("stage == sex", "the columns 'stage' and 'sex' are compared"),
        ("1 == 1", "two constants are compared"),
        ("1 in [1]", "a list is compared with a constant"),
        ("age", "'age' is not a condition; expected a comparison such as age >= 40"),
        ("age in stage", r"'stage' is not a list; expected, for instance: stage in \['I', 'II'\]"),
        ("age.mean() > 3", r"'age.mean\(\)' is not a column, text or number"),
        ("age is 3", "the operator Is is not supported"),
        ("age >", "is not an expression over columns"),
        ("age > 1 and " * 99 + "age > 1", "at most 1000 are accepted"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowFilter(text, COLUMNS)
