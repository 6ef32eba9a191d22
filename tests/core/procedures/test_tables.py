"""A table is read when it is asked for, as its owner declares it, and an error counts rows and shows none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedplat.errors import ProcedureError
from fedplat.procedures import CategoryColumn, Means, NumericColumn, SiteTable, TableDictionary, run
from fedplat.tables.dictionary import SiteCategories, SiteNumbers

AGE = NumericColumn(0, 120, 1)
SEX = CategoryColumn(("f", "m"))
DICTIONARY = TableDictionary(
    {
        "age": SiteNumbers(low=0, high=120, resolution=1, source="Alter", missing=(-99,)),
        "sex": SiteCategories(categories=("m", "f"), source="G", rename={"w": "f"}),
    },
    person="id",
)
FRAME = {"Alter": [41, -99, 67], "G": ["w", "m", None], "id": ["a", "b", "c"], "extra": [1, 2, 3]}


class Untouchable:
    """A frame that raises on any access."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(name)


def test_nothing_of_a_table_is_read_before_it_is_asked_for() -> None:
    table = SiteTable(Untouchable(), DICTIONARY)
    table.check({"age": AGE, "sex": SEX})
    for name, column, message in (
        ("age", NumericColumn(0, 121, 1), "'age' is declared differently in the dictionary of the table: its range is"),
        ("weight", AGE, "the dictionary of the table has no column 'weight'"),
    ):
        with pytest.raises(ProcedureError, match=message):
            table.check({name: column})
        with pytest.raises(ProcedureError, match=message):
            table.read(name, column)
        with pytest.raises(ProcedureError, match=message):
            run(Means({name: column}), {"a": table})
    with pytest.raises(AssertionError):
        table.read("age", AGE)


def test_columns_have_the_names_and_values_of_the_dictionary() -> None:
    table = SiteTable(FRAME, DICTIONARY)
    assert np.array_equal(table.read("age", AGE), [41, np.nan, 67], equal_nan=True)
    assert np.array_equal(table.read("age"), [41, np.nan, 67], equal_nan=True)
    assert table.read("sex", SEX).tolist() == [0, 1, 2]
    assert table.read("sex").tolist() == [1, 0, 2]  # in the order of the dictionary
    assert table.read("sex", CategoryColumn(("f", "m"), other=True)).tolist() == [0, 1, 3]
    for hidden in ("Alter", "extra", "id"):
        with pytest.raises(ProcedureError, match="the dictionary of the table has no column"):
            table.read(hidden)
    (batch,) = table.read_batches({"sex": SEX, "age": AGE})
    assert [*batch] == ["sex", "age"]


def test_a_table_without_a_dictionary_has_what_a_procedure_declares() -> None:
    table = SiteTable({"age": [41, None], "sex": ["f", "m"]})
    assert table.read("sex", SEX).tolist() == [0, 1]
    assert table.read("age")[0] == 41.0
    with pytest.raises(ProcedureError, match="2 of 2 rows have text in column 'sex'; expected numbers"):
        table.read("sex")
    with pytest.raises(ProcedureError, match="has no dictionary"):
        table.count()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "a", "a"], "^1 person has more than 1 row; expected at most that$"),
        ([7, 7, 8], "1 person has more than 1 row"),
        (["a", "", None], "^2 rows have no value in the column of persons$"),
        (["a", "b"], "different numbers of rows"),
        ([["a"], ["b"], ["c"]], "expected one value for each row"),
    ],
)
def test_rows_of_a_person_are_bounded(ids: Any, message: str) -> None:
    with pytest.raises(ProcedureError, match=message):
        SiteTable({**FRAME, "id": ids}, DICTIONARY).read("age")
    with pytest.raises(ProcedureError, match=message):
        SiteTable({"age": [1, 2, 3], "key": ids}, person="key").read("age")
    if len(ids) == 3 and None not in ids and not isinstance(ids[0], list):
        twice = TableDictionary(DICTIONARY.columns, person="id", rows_per_person=3)
        assert SiteTable({**FRAME, "id": ids}, twice).read("age").size == 3


def test_a_table_without_its_column_of_persons_is_refused() -> None:
    with pytest.raises(ProcedureError, match=r"^the table has the column of persons 0 times; expected it once$"):
        SiteTable({"age": [1]}, person="key").read("age")


def test_columns_with_one_name_and_lost_ones_are_refused() -> None:
    twice = pd.DataFrame([[1, 2]], columns=["age", "age"])
    for frame in (twice, pa.table([[1], [2]], names=["age", "age"])):
        with pytest.raises(ProcedureError, match="the table has 2 columns for 'age'"):
            SiteTable(frame).read("age")
    with pytest.raises(ProcedureError, match="no column 'age'; the table has no column 'sex'"):
        list(SiteTable({"x": []}).read_batches({"age": AGE, "sex": SEX}))
    structured = np.array([(1,)], [("age", "i8")])
    assert SiteTable(structured).read("age").tolist() == [1.0]
    with pytest.raises(ProcedureError, match="no column 'x'"):
        SiteTable(structured).read("x")


def test_all_that_does_not_fit_is_named_at_once_and_counted_over_all_rows() -> None:
    frame = {"Alter": [41, 500, "x"], "G": ["w", "m", "?"], "id": [1, 2, 2]}
    with pytest.raises(ProcedureError) as caught:
        list(SiteTable(frame, DICTIONARY).read_batches({"age": AGE, "sex": SEX}))
    assert str(caught.value) == (
        "1 of 3 rows have text in column 'age'; expected numbers; if it means that there is no value, declare it as "
        "missing; 1 of 3 rows have values of column 'sex' outside its declared categories; correct the data, or "
        "declare another category or other = true; 1 person has more than 1 row; expected at most that"
    )


def test_an_owner_gets_the_counts_of_all_declared_columns() -> None:
    counts = SiteTable({"Alter": [41, 500, "x", None], "id": [1, 2, 2, ""]}, DICTIONARY).count()
    age = counts.columns["age"]
    assert (counts.rows, age.missing, age.invalid, age.outside) == (4, 1, 1, 1)
    assert counts.num_found == {"sex": 0}
    assert (counts.unidentified_rows, counts.repeated_persons) == (1, 1)
    mistakes = counts.list_mistakes()
    assert mistakes[0] == "the table has no column 'sex'"
    assert mistakes[2:] == [
        "1 row has no value in the column of persons",
        "1 person has more than 1 row; expected at most that",
    ]
    assert not SiteTable(FRAME, DICTIONARY).count().list_mistakes()


def test_an_empty_site_has_no_rows() -> None:
    for frame in ({"Alter": [], "G": [], "id": []}, pd.DataFrame({"Alter": [], "G": [], "id": []})):
        table = SiteTable(frame, DICTIONARY)
        assert table.read("age", AGE).size == table.read("sex", SEX).size == 0
        assert not table.count().list_mistakes()
