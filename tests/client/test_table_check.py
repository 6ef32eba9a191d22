"""An owner sees on the own machine how a table fits its dictionary: in counts, without a server, and without values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fedplat_client.commands import main

DICTIONARY = """
person = "id"
[columns.age]
type = "number"
low = 0
high = 120
resolution = 1
source = "Alter"
missing = [-99]
[columns.sex]
type = "category"
categories = ["f", "m"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "columns.toml").write_text(DICTIONARY)
    (tmp_path / "rows.csv").write_text('id,Alter,sex\n1,41,f\n2,-99,m\n2,500,x\n3,"3,5",\n')
    (tmp_path / "good.csv").write_text("id;Alter;sex\n1;41;f\n2;-99;m\n")
    return tmp_path


def check(folder: Path, file: str, *options: str) -> Result:
    command = ["table", "check", str(folder / file), "--columns", str(folder / "columns.toml"), *options]
    return CliRunner().invoke(main, command)


def test_counts_are_printed(folder: Path) -> None:
    result = check(folder, "rows.csv")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "column  type      rows  missing  other type  outside",
        "age     number       4        1           1        1",
        "sex     category     4        1           0        1",
        "",
        "1 of 4 rows have text in column 'age'; expected numbers; if it means that there is no value, declare it as "
        "missing",
        "1 of 4 rows have values of column 'sex' outside its declared categories; correct the data, or declare another "
        "category or other = true",
        "1 person has more than 1 row; expected at most that",
    ]
    as_json = json.loads(check(folder, "rows.csv", "--json").stdout)
    assert as_json["columns"]["age"] == {"type": "number", "missing": 1, "other_type": 1, "outside": 1}
    assert (as_json["rows"], len(as_json["mistakes"])) == (4, 3)


def test_a_table_that_fits_has_status_0(folder: Path) -> None:
    result = check(folder, "good.csv", "--delimiter", ";", "--encoding", "latin-1")
    assert result.exit_code == 0
    assert result.stdout.endswith("\nAll rows are as declared.\n")
    without_persons = check(folder, "good.csv", "--delimiter", ";", "--person", "Alter", "--json")
    assert json.loads(without_persons.stdout)["mistakes"] == []


@pytest.mark.parametrize(
    ("file", "options", "status", "message"),
    [
        ("good.csv", (), 1, "such as --delimiter ';'"),
        ("good.csv", ("--delimiter", ";;"), 2, "expected one character"),
        ("good.csv", ("--query", "SELECT 1"), 2, "--query is for files .duckdb"),
        ("rows.xlsx", (), 2, "expected .csv, .parquet, .duckdb"),
        ("none.csv", (), 1, "cannot be read (No such file or directory)"),
        ("columns.toml", ("--columns", "none.toml"), 2, "Error: the table is a file '.toml'"),
        ("good.csv", ("--columns", "none.toml"), 2, "the dictionary none.toml cannot be read: No such file"),
        ("good.csv", ("--columns", "rows.csv"), 2, "the dictionary rows.csv is of no known form"),
    ],
)
def test_what_cannot_be_checked_is_named(
    folder: Path, file: str, options: tuple[str, ...], status: int, message: str
) -> None:
    result = check(folder, file, *options)
    assert result.exit_code == status
    assert message in result.output
