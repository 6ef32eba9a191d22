"""Files and frames with the same rows give the same arrays, read in pieces; what is no table is refused."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedplat.errors import MissingExtraError, ProcedureError
from fedplat.procedures import BooleanColumn, CategoryColumn, Column, DateColumn, Means, NumericColumn, SiteTable, run
from fedplat.tables import CsvFile, DuckDBTable, ParquetFile, files

COLUMNS: dict[str, Column] = {
    "age": NumericColumn(0, 120, 0.5),
    "sex": CategoryColumn(("f", "m"), other=True),
    "code": CategoryColumn(("9007199254740993", "7")),
    "died": BooleanColumn(),
    "day": DateColumn(datetime.date(2020, 1, 1), datetime.date(2026, 12, 31)),
}
ROWS: dict[str, list[Any]] = {
    "age": [41.5, None, 67.0, 3.0, 80.0],
    "sex": ["f", "m", None, "x", "f"],
    "code": [2**53 + 1, 7, None, 7, 7],
    "died": [True, False, None, True, False],
    "day": [datetime.date(2020, 2, 29), None, datetime.date(2026, 12, 31), datetime.date(2020, 1, 1), None],
}
LINES = """age,sex,code,died,day
41.5,f,9007199254740993,True,2020-02-29

,m,7,false,""
67,,,,2026-12-31
3.0,x,7,1,2020-01-01
8e1,f,7,0,
"""


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BATCH_ROWS", 2)


def write_csv(path: Path) -> Path:
    path.write_text(LINES, "utf-8-sig")
    return path


def write_parquet(path: Path) -> Path:
    parquet.write_table(pa.table(ROWS).set_column(1, "sex", pa.array(ROWS["sex"]).dictionary_encode()), path)
    return path


def write_database(path: Path, *names: str) -> Path:
    with duckdb.connect(str(path)) as database:
        for name in names:
            columns = "age DECIMAL(4,1), sex VARCHAR, code HUGEINT, died BOOLEAN, day DATE"
            database.execute(f"CREATE TABLE {name} ({columns})")
            database.executemany(f"INSERT INTO {name} VALUES (?, ?, ?, ?, ?)", [*zip(*ROWS.values(), strict=True)])
    return path


FORMS: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: ROWS,
    "pandas": lambda _: pd.DataFrame({**ROWS, "code": pd.Series(ROWS["code"], dtype="Int64")}),
    "nullable": lambda _: pd.DataFrame({**ROWS, "code": pd.Series(ROWS["code"], dtype="Int64")}).convert_dtypes(),
    "polars": lambda _: pl.DataFrame(ROWS),
    "categorical": lambda _: pl.DataFrame(
        {**ROWS, "code": pl.Series(ROWS["code"]).cast(pl.String).cast(pl.Categorical)}
    ),
    "csv": lambda folder: write_csv(folder / "rows.csv"),
    "text": lambda folder: str(write_csv(folder / "rows.CSV")),
    "parquet": lambda folder: write_parquet(folder / "rows.parquet"),
    "duckdb": lambda folder: write_database(folder / "rows.duckdb", "rows"),
    "table": lambda folder: DuckDBTable(write_database(folder / "r.db", "a", '"a ""b"'), table='a "b'),
    "query": lambda folder: DuckDBTable(write_database(folder / "r.db", "a", "b"), query="SELECT * FROM b;"),
}


@pytest.mark.parametrize(
    "form", [pytest.param(each, marks=pytest.mark.slow if each in ("table", "query") else ()) for each in FORMS]
)
def test_all_forms_have_the_same_rows(form: str, tmp_path: Path) -> None:
    expected = [np.array([41.5, np.nan, 67.0, 3.0, 80.0]), [0, 1, 3, 2, 0], [0, 1, 2, 1, 1], [1, 0, 2, 1, 0]]
    expected.append(np.array([18321.0, np.nan, 20818.0, 18262.0, np.nan]))
    batches = list(SiteTable(FORMS[form](tmp_path)).read_batches(COLUMNS))
    assert [each["age"].size for each in batches] == (
        [5] if form in ("dict", "pandas", "nullable", "polars", "categorical") else [2, 2, 1]
    )
    for name, values in zip(COLUMNS, expected, strict=True):
        assert np.array_equal(
            np.concatenate([each[name] for each in batches]), values, equal_nan=name in ("age", "day")
        )


def test_whole_numbers_of_64_bits_are_read_as_they_are() -> None:
    integers = [2**53 + 1, None]
    for column in (pd.Series(integers, dtype="Int64"), pl.Series(integers), pa.array(integers)):
        assert SiteTable({"code": column}).read("code", COLUMNS["code"]).tolist() == [0, 2]
    with pytest.raises(ProcedureError, match=r"1 of 2 rows have whole numbers from 2\^53 as floats"):
        SiteTable({"code": pd.Series(integers)}).read("code", COLUMNS["code"])  # pandas has rounded it


def test_procedures_run_over_files(tmp_path: Path) -> None:
    means = Means({"age": NumericColumn(0, 120, 0.5)}, min_rows=2)
    expected = run(means, {"a": ROWS, "b": ROWS}).to_json()
    assert run(means, {"a": FORMS["csv"](tmp_path), "b": FORMS["parquet"](tmp_path)}).to_json() == expected


def test_tables_without_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("age,sex\n")
    parquet.write_table(
        pa.table({"age": pa.array([], pa.float64()), "sex": pa.array([], pa.string())}), tmp_path / "r.parquet"
    )
    with duckdb.connect(str(tmp_path / "r.duckdb")) as database:
        database.execute("CREATE TABLE t (age DOUBLE, sex VARCHAR)")
    for name in ("rows.csv", "r.parquet", "r.duckdb"):
        for column in ("age", "sex"):
            assert SiteTable(tmp_path / name).read(column, COLUMNS[column]).size == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has no names of columns; expected them in its first line"),
        (b"age,age\n1,2\n", "the table has 2 columns for 'age'"),
        (b"age;sex\n1;f\n", "the table has no column 'age'"),
        (b"age,sex\n1,f\n2\n", "line 3 of the file has 1 field; expected 2, as in the first line"),
        (b'age,sex\n1,"f\n', r"the file of the table cannot be read \(Error\)"),
        ("age,säx\n1,f\n".encode("latin-1"), "bytes that are not utf-8; expected another encoding"),
        ("age,sex\n1,ä\n".encode("utf-16"), "bytes that are not utf-8"),
        (b"age,sex\n999.25,f\nx,f\n-1,f\n", "1 of 3 rows have text in column 'age'"),
        (b"age,sex\n1,f\n2,f\n999.25,f\n", "1 of 3 rows have values of column 'age' outside"),  # in the last batch
    ],
)
def test_files_of_text_that_are_no_tables_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ProcedureError, match=message) as caught:
        SiteTable(tmp_path / "rows.csv").read("age", COLUMNS["age"])
    assert "999.25" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_delimiter_and_encoding_are_options(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes("jahre;größe\n1;2\n".encode("latin-1"))
    assert SiteTable(CsvFile(path, ";", "latin-1")).read("größe").tolist() == [2.0]
    for options, message in (((";;",), "expected one character"), ((";", "utf-9"), "encoding 'utf-9' is unknown")):
        with pytest.raises(ProcedureError, match=message):
            CsvFile(path, *options)


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    for suffix in (".csv", ".parquet", ".duckdb"):
        (tmp_path / f"rows{suffix}").write_bytes(b"\0\0no such format\0")
        for path in (tmp_path / f"rows{suffix}", tmp_path / f"none{suffix}", tmp_path):
            table = SiteTable(path) if path.suffix else SiteTable(CsvFile(path))
            with pytest.raises(ProcedureError) as caught:
                table.read("age", COLUMNS["age"])
            assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ProcedureError, match=r"'.xlsx'; expected \.csv, \.parquet, \.duckdb, or a data frame"):
        SiteTable(tmp_path / "rows.xlsx")
    write_database(tmp_path / "two.duckdb", "a", "b")
    with pytest.raises(
        ProcedureError, match="the database has 2 tables; expected one, or the name of a table, or a query"
    ):
        SiteTable(tmp_path / "two.duckdb").read("age")
    with pytest.raises(ProcedureError, match="both a table and a query"):
        DuckDBTable(tmp_path / "two.duckdb", "a", "SELECT 1")


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        """Find no package."""

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    for kind, package in ((ParquetFile, "pyarrow"), (DuckDBTable, "duckdb")):
        with pytest.raises(MissingExtraError, match=f"needs {package}; install it with: .*{package}"):
            kind("rows")
    assert CsvFile("rows.csv").is_text


@pytest.mark.slow
def test_memory_holds_some_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of Python at its peak, for a file of 5 MB with two columns, of which one is read."""
    import tracemalloc

    monkeypatch.setattr(files, "_BATCH_ROWS", 500)
    path = tmp_path / "rows.csv"
    with path.open("w") as file:
        file.write("age,text\n")
        file.writelines(f"{number % 100},{'x' * 230}\n" for number in range(20_000))
    table, seen = SiteTable(path), 0
    tracemalloc.start()
    for batch in table.read_batches({"age": COLUMNS["age"]}):
        seen += batch["age"].size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == 20_000
    assert peak < path.stat().st_size / 10
