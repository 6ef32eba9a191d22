"""What an owner declares is read from Python, TOML and JSON, and is compared with what a procedure declares."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedplat.errors import ProcedureError
from fedplat.procedures import BooleanColumn, CategoryColumn, Column, DateColumn, NumericColumn
from fedplat.tables.dictionary import TableDictionary, load_dictionary
from support.docs.blocks import read

TEXT = """
person = "patient_id"
rows_per_person = 2

[columns.age]
type = "number"
low = 0
high = 120
resolution = 1
unit = "years"
source = "Alter"
missing = [-99, "NA"]

[columns.sex]
type = "category"
categories = ["f", "m"]
rename = { w = "f" }

[columns.died]
type = "boolean"
true = ["ja"]

[columns.admitted]
type = "date"
first = 2020-01-01
last = 2026-12-31
"""


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_files_and_records_are_the_same_dictionary(tmp_path: Path) -> None:
    from_toml = load_dictionary(write(tmp_path, "columns.toml", "\N{BYTE ORDER MARK}" + TEXT))
    raw = msgspec.to_builtins(from_toml)
    assert load_dictionary(str(write(tmp_path, "columns.json", json.dumps(raw)))) == from_toml
    assert load_dictionary(from_toml) is from_toml
    assert load_dictionary(from_toml.columns).columns == from_toml.columns
    assert load_dictionary(raw["columns"]).columns == from_toml.columns
    assert from_toml.rows_per_person == 2
    plain = load_dictionary({"age": NumericColumn(0, 120, 1), "sex": CategoryColumn(("f", "m"))})
    assert plain.columns["age"].source == ""


def test_the_dictionary_of_the_docs_is_one(tmp_path: Path) -> None:
    (block,) = (each for each in read("docs/procedures.md") if each.marker == "file: columns.toml")
    found = load_dictionary(write(tmp_path, "columns.toml", block.text))
    assert [*found.columns] == ["age", "sex", "smoker", "admitted"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "columns.toml",
            TEXT.replace("low = 0", "lo = 0"),
            r"columns\.age\.lo = 0: there is no such key; did you mean",
        ),
        (
            "columns.toml",
            TEXT.replace('"number"', '"numbr"'),
            r"columns\.age\.type .* expected one of number, category",
        ),
        ("columns.toml", TEXT.replace('type = "number"', ""), r"columns\.age\.type: this key is required and missing"),
        ("columns.toml", TEXT.replace("low = 0", "low = 200"), "expected low below high"),
        ("columns.toml", TEXT.replace('"m"]', '"f"]'), "'f' is listed twice"),
        ("columns.toml", TEXT.replace('"m"]', '"other"]'), "expected other = true"),
        ("columns.toml", TEXT.replace('"m"]', '"missing"]'), "'missing' is reserved"),
        ("columns.toml", TEXT.replace('"m"]', '" "]'), "a category is blank"),
        ("columns.toml", TEXT.replace('w = "f"', 'w = "x"'), "'x' is not a category"),
        ("columns.toml", TEXT.replace('["ja"]', '["FALSE"]'), "true, false: both have 'false'"),
        ("columns.toml", TEXT.replace("2026-12-31", "2019-12-31"), "expected first before last"),
        ("columns.toml", TEXT.replace("rows_per_person = 2", "rows_per_person = 0"), "rows_per_person = 0"),
        ("columns.toml", "columns = {}", "expected at least one column"),
        ("columns.toml", "person = ", r"the dictionary columns\.toml cannot be read: Invalid value"),
        ("columns.toml", b"\xff", r"cannot be read: .*utf-8"),
        ("columns.json", "[]", "is no table"),
        ("columns.json", "{", "cannot be read"),
        ("columns.yaml", "", r"no known form; expected a file \.toml or \.json"),
        ("columns.json", b" " * (4 * 2**20 + 1), "is larger than"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(ProcedureError, match=message):
        load_dictionary(write(tmp_path, name, content))


def test_what_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcedureError, match=r"cannot be read: No such file"):
        load_dictionary(tmp_path / "columns.toml")
    wrong: Any
    for wrong in ([NumericColumn(0, 1, 1)], 5):
        with pytest.raises(ProcedureError, match="expected columns by their names"):
            load_dictionary(wrong)
    with pytest.raises(ProcedureError, match=r"columns\.x = 5: expected a table"):
        load_dictionary({"x": 5})  # pyright: ignore[reportArgumentType]


DAYS = DateColumn(datetime.date(2020, 1, 1), datetime.date(2026, 12, 31), 7)


@pytest.mark.parametrize(
    ("site", "column", "difference"),
    [
        (NumericColumn(0, 120, 1), NumericColumn(0, 120, 1), ""),
        (NumericColumn(0, 120, 0.1), NumericColumn(0, 120, 0.5), ""),
        (NumericColumn(0, 120, 1), NumericColumn(0, 120, 0.5), "its resolution is 1, and the procedure has 0.5"),
        (NumericColumn(0, 120, 1), NumericColumn(0, 120, 1.5), "expected the same, or a multiple"),
        (NumericColumn(0, 120, 1), NumericColumn(0, 130, 1), "its range is from 0 to 120, and the procedure has one"),
        (NumericColumn(0, 9, 1, "g/l"), NumericColumn(0, 9, 1, "mg/l"), "its unit is 'g/l', and the procedure has 'mg"),
        (NumericColumn(0, 9, 1, "g/l"), NumericColumn(0, 9, 1), "its unit is 'g/l', and the procedure has none"),
        (NumericColumn(0, 1, 1), BooleanColumn(), "its type is number, and the procedure has boolean"),
        (BooleanColumn(), BooleanColumn(), ""),
        (BooleanColumn(), CategoryColumn(("false",)), "its type is boolean"),
        (CategoryColumn(("f", "m")), CategoryColumn(("m", "f"), other=True), ""),
        (CategoryColumn(("f", "m")), CategoryColumn(("m", "f", "x")), "it does not have the procedure's category 'x'"),
        (CategoryColumn(("f", "m", "secret")), CategoryColumn(("m", "f")), "1 of its 3 categories are not the proc"),
        (CategoryColumn(("f",), other=True), CategoryColumn(("f",)), "it has other = true, and the procedure does"),
        (CategoryColumn(("f",)), DAYS, "its type is category, and the procedure has date"),
        (DAYS, DateColumn(DAYS.first, DAYS.last, 14), ""),
        (DAYS, DateColumn(DAYS.first, DAYS.last, 1), "its resolution is 7 days, and the procedure has 1"),
        (DAYS, DateColumn(DAYS.first, DAYS.first, 7), "its range is from 2020-01-01 to 2026-12-31"),
        (DAYS, NumericColumn(0, 1, 1), "its type is date"),
    ],
)
def test_differences_of_a_site_are_named(site: Column, column: Column, difference: str) -> None:
    declared = TableDictionary(load_dictionary({"x": site}).columns).columns["x"]
    found = "; ".join(column.differences_from(declared))
    assert (found == "") if not difference else (difference in found)
    assert "secret" not in found
