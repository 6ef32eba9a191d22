"""Conditions over the declared columns of a table, such as `age >= 40 and diagnosis in ['J43', 'J44']`.

The language is that of `fedplat.config.expressions`. A column of numbers is compared with numbers, one of categories
with its declared categories, one of days with texts such as `'2026-11-28'`, and one of truth values with 1 and 0. A
comparison is false where the row has no value, so `not age >= 40` is also true of rows without an age.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat import texts
from fedplat.config.expressions import (
    Condition,
    ExpressionError,
    Junction,
    Language,
    MembershipTest,
    NamedValue,
    Negation,
    Scalar,
    Term,
    ValueComparison,
)
from fedplat.tables.columns import BooleanColumn, CategoryColumn, Column, DateColumn, Floats, NumericColumn, count_days

Rows: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Columns as a table yields them."""
Mask: TypeAlias = npt.NDArray[np.bool_]

_LANGUAGE = Language("column", "age >= 40 and sex == 'f'", "age >= 40", "stage in ['I', 'II']")


class RowFilter:
    """The rows for which a condition is true; all rows for an empty text.

    Raises `ValueError` for what is no condition over the declared columns.
    """

    def __init__(self, text: str, columns: Mapping[str, Column]) -> None:
        self.names: tuple[str, ...] = ()
        self._condition = None
        if not text.strip():
            return
        condition = _LANGUAGE.parse(text)
        self.names = tuple(dict.fromkeys(_list_names(condition)))
        if absent := [name for name in self.names if name not in columns]:
            raise ExpressionError(f"the column {texts.quote(absent[0])} is not declared; expected one that is")
        self._condition = _compile({name: columns[name] for name in self.names}, condition)

    def select(self, rows: Rows) -> Mask | None:
        """Return for which rows the condition is true, shape [rows]; None for all."""
        return None if self._condition is None else self._condition(rows)


def _list_names(condition: Condition) -> Iterator[str]:
    match condition:
        case Junction(parts=parts):
            for part in parts:
                yield from _list_names(part)
        case Negation(part=part):
            yield from _list_names(part)
        case MembershipTest(value=value):
            yield from [value.name] if isinstance(value, NamedValue) else []
        case ValueComparison(left=left, right=right):
            yield from (term.name for term in (left, right) if isinstance(term, NamedValue))


def _compile(columns: Mapping[str, Column], condition: Condition) -> Callable[[Rows], Mask]:
    match condition:
        case Junction(parts=parts, every=is_every):
            masks = [_compile(columns, part) for part in parts]
            combine = np.logical_and if is_every else np.logical_or
            return lambda rows: combine.reduce([mask(rows) for mask in masks])
        case Negation(part=part):
            mask = _compile(columns, part)
            return lambda rows: ~mask(rows)
        case MembershipTest(value=value, members=members, wanted=wanted):
            if not isinstance(value, NamedValue):
                raise ExpressionError("a list is compared with a constant; expected a column")
            read, name = _reader(columns[value.name]), value.name
            keys = [_read_constant(name, columns[name], member) for member in members]

            def contains(rows: Rows) -> Mask:
                values = read(rows[name])
                found = np.isin(values, keys)
                return found if wanted else ~found & ~np.isnan(values)

            return contains
        case ValueComparison(left=left, compare=compare, right=right):
            first, second = _terms(columns, left, right, compare)

            def holds(rows: Rows) -> Mask:
                a, b = first(rows), second(rows)
                return np.asarray(compare(a, b) & ~(np.isnan(a) | np.isnan(b)))

            return holds


def _terms(
    columns: Mapping[str, Column], left: Term, right: Term, compare: Callable[[Any, Any], Any]
) -> tuple[Callable[[Rows], Floats], Callable[[Rows], Floats]]:
    """Return both sides of a comparison as numbers."""
    named = [term for term in (left, right) if isinstance(term, NamedValue)]
    if not named:
        raise ExpressionError("two constants are compared; expected a column")
    declared = [columns[term.name] for term in named]
    if len(named) == 2 and not (
        type(declared[0]) is type(declared[1]) and isinstance(declared[0], NumericColumn | DateColumn)
    ):
        raise ExpressionError(
            f"the columns {' and '.join(texts.quote(term.name) for term in named)} are compared; expected two of "
            "numbers, or two of days"
        )
    if isinstance(declared[0], CategoryColumn | BooleanColumn) and compare not in (operator.eq, operator.ne):
        raise ExpressionError(f"the column {texts.quote(named[0].name)} has no order; expected ==, !=, in or not in")

    def make(term: Term) -> Callable[[Rows], Floats]:
        if isinstance(term, NamedValue):
            name, read = term.name, _reader(columns[term.name])
            return lambda rows: read(rows[name])
        constant = np.float64(_read_constant(named[0].name, declared[0], term))
        return lambda _: constant  # pyright: ignore[reportReturnType]

    return make(left), make(right)


def _reader(column: Column) -> Callable[[npt.NDArray[Any]], Floats]:
    """Return what makes numbers of a column's values, NaN for missing ones."""
    if isinstance(column, NumericColumn | DateColumn):
        return lambda values: values
    missing = len(column.levels) - 1
    return lambda values: np.where(values == missing, np.nan, values)


def _read_constant(name: str, column: Column, value: Scalar) -> float:
    """Return a constant as the number that stands for it in a column."""
    shown = texts.quote(name)
    match column, value:
        case NumericColumn(), float():
            return value
        case BooleanColumn(), float() if value in (0.0, 1.0):
            return value
        case CategoryColumn(), str() if value in column.levels[:-1]:
            return float(column.levels.index(value))
        case DateColumn(), str():
            try:
                return count_days(datetime.date.fromisoformat(value))
            except ValueError:
                pass
        case _:
            pass
    raise ExpressionError(f"the column {shown} is compared with {value!r}; expected {_EXPECTED[type(column)]}")


_EXPECTED: Mapping[type[Column], str] = {
    NumericColumn: "a number",
    BooleanColumn: "1 for true or 0 for false",
    CategoryColumn: "one of its declared categories",
    DateColumn: "a day such as '2026-11-28'",
}
