"""Means and standard errors over sites are those of the pooled rows, bit for bit however the rows are divided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures import Finished, Means, NumericColumn, ReplyTotals, SiteTable, run
from fedplat.secure_aggregation import encoding
from support.secure_group import SecureGroup, make_exact_setup

COLUMNS = {
    "age": NumericColumn(low=0, high=120, resolution=1),
    "crp": NumericColumn(low=0, high=500, resolution=0.1),
    "year": NumericColumn(low=1990, high=2030, resolution=1),
}
MEANS = Means(COLUMNS)


def draw_rows(num_rows: int = 3000) -> pd.DataFrame:
    rng = np.random.default_rng(39)
    crp = np.round(np.minimum(np.exp(rng.normal(2, 1.2, num_rows)), 500), 1)
    crp[rng.random(num_rows) < 0.1] = np.nan
    year = rng.integers(2005, 2024, num_rows)
    return pd.DataFrame({"age": np.clip(np.round(rng.normal(62, 11, num_rows)), 0, 120), "crp": crp, "year": year})


def divide(rows: pd.DataFrame, num_sites: int, seed: int) -> dict[str, pd.DataFrame]:
    site = np.random.default_rng(seed).integers(0, num_sites, len(rows))
    return {f"site {each}": pd.DataFrame(rows[site == each]) for each in range(num_sites)}


def columns_of(frames: Mapping[str, Any], means: Means = MEANS) -> dict[str, Any]:
    found: Any = run(means, frames).result["columns"]
    return found


def test_results_are_those_of_the_pooled_rows() -> None:
    rows = draw_rows()
    found = columns_of(divide(rows, 5, seed=1))
    for name in COLUMNS:
        column = rows[name].dropna()
        assert found[name]["rows"] == len(column)
        assert found[name]["missing"] == len(rows) - len(column)
        assert found[name]["mean"] == pytest.approx(column.mean(), rel=1e-14)
        assert found[name]["standard_deviation"] == pytest.approx(column.std(ddof=1), rel=1e-12)
        # The standard error of the intercept in a regression on nothing else.
        ones, values = np.ones((len(column), 1)), column.to_numpy(float)
        _, (residual,), _, _ = np.linalg.lstsq(ones, values)
        variance = residual / (len(column) - 1) * np.linalg.inv(ones.T @ ones)[0, 0]
        assert found[name]["standard_error"] == pytest.approx(np.sqrt(variance), rel=1e-10)


def test_results_have_the_same_bytes_however_the_rows_are_divided_and_ordered() -> None:
    rows = draw_rows()
    expected = columns_of({"all": rows})
    for num_sites in (2, 5, 17):
        frames = divide(rows, num_sites, seed=num_sites)
        result = run(MEANS, frames)
        assert result.result["columns"] == expected
        backwards = run(MEANS, {name: frame[::-1] for name, frame in reversed(frames.items())})
        assert backwards.to_json() == result.to_json()


def test_replies_under_masks_give_the_same_result() -> None:
    frames, message = divide(draw_rows(), 4, seed=2), MEANS.begin().message
    schema = MEANS.schema(message)
    exact = schema.encoding(len(frames))
    group = SecureGroup(make_exact_setup(exact), len(frames))
    group.share()
    for site, frame in enumerate(frames.values()):
        group.mask(site, encoding.encode_exact(exact, schema.encode(MEANS.answer(message, SiteTable(frame)))))
    request = group.request()
    for site in range(len(frames)):
        group.answer(site, request)
    group.unmask()
    totals = ReplyTotals(schema, encoding.decode_exact(exact, group.total, len(frames)), len(frames))
    finished = MEANS.advance(b"", totals)
    assert isinstance(finished, Finished)
    assert finished.result == run(MEANS, frames).result


@pytest.mark.parametrize(
    "column",
    [
        [1, None, 3],
        np.array([1.0, np.nan, 3.0]),
        pd.Series([1, None, 3], dtype="Int64"),
        pd.Series([1, None, 3], dtype="float32"),
        pa.chunked_array([[1, None, 3]]),
        np.array([1, None, 3], object),
    ],
)
def test_tables_of_several_libraries_are_read(column: Any) -> None:
    means = Means({"x": NumericColumn(0, 10, 1)}, min_rows=2)
    assert columns_of({"a": {"x": column}}, means)["x"] == {
        "rows": 2,
        "missing": 1,
        "mean": 2.0,
        "standard_deviation": pytest.approx(2**0.5),
        "standard_error": pytest.approx(1.0),
    }


def test_values_are_rounded_to_the_resolution_and_truth_values_count() -> None:
    means = Means({"x": NumericColumn(-1, 1, 0.1), "died": NumericColumn(0, 1, 1)}, min_rows=2)
    table = {"x": [-0.26, 0.74, -1.0, 1.0], "died": [True, False, False, False]}
    found = columns_of({"a": table, "b": {"x": [], "died": []}}, means)
    assert found["x"]["mean"] == pytest.approx((-0.3 + 0.7 - 1 + 1) / 4, rel=1e-15)
    assert found["died"]["mean"] == 0.25


def test_columns_with_few_rows_are_null_with_a_reason() -> None:
    frames = {"a": {"x": [1.0] * 9, "y": [1.0] * 9}, "b": {"x": [2.0], "y": [np.nan]}}
    means = Means({"x": NumericColumn(0, 10, 1), "y": NumericColumn(0, 10, 1)})
    result = json.loads(run(means, frames).to_json())
    assert result["sites"] == 2
    assert result["steps"] == 1
    assert result["result"]["columns"]["x"]["mean"] == 1.1
    assert result["result"]["columns"]["y"] == {
        "rows": None,
        "missing": None,
        "mean": None,
        "standard_deviation": None,
        "standard_error": None,
        "suppressed": "fewer than 10 rows have a value",
    }


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, 999.25, -7], r"2 of 3 rows have values of column 'x' outside its declared range, from 0 to 10"),
        ([1, np.inf, 2], r"1 of 3 rows have values"),
        (["1", "999.25", "3"], "3 of 3 rows have text in column 'x'; expected numbers; if it means that there is no"),
        (pd.Series(["1", None]), "1 of 2 rows have text in column 'x'"),
        (pd.Series(["1", "999.25"]), "2 of 2 rows have text in column 'x'"),
        (pd.to_datetime(pd.Series(["2026-11-28"])), "have values of the type datetime64.* expected numbers"),
        (np.ones((2, 2)), "has 2 dimensions; expected one value for each row"),
        ([1 + 2j], "1 of 1 row have values of the type complex128 in column 'x'; expected numbers"),
        ([1.0] * 101, "has 101 rows; expected at most max_rows = 100"),
        (None, "has 0 dimensions"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_its_site_and_without_its_values(column: Any, message: str) -> None:
    means = Means({"x": NumericColumn(0, 10, 1)}, max_rows=100)
    with pytest.raises(ProcedureError, match=rf"^site 'b': .*{message}") as caught:
        run(means, {"a": {"x": [1.0]}, "b": {"x": column}})
    assert "999.25" not in str(caught.value)


def test_a_missing_column_and_missing_tables_are_refused() -> None:
    for frame in ({"y": [1.0]}, pd.DataFrame({"y": [1.0]}), pa.table({"y": [1.0]})):
        with pytest.raises(ProcedureError, match="site 'a': the table has no column 'age'"):
            run(MEANS, {"a": frame})
    for frames in ({}, [pd.DataFrame()]):
        with pytest.raises(ProcedureError, match="expected the table of each site by its name"):
            run(MEANS, frames)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {}}, "length >= 1"),
        ({"columns": {"x": {"low": 3, "high": 3, "resolution": 1}}}, "expected low below high"),
        ({"columns": {"x": {"low": 0, "high": 1, "resolution": 2}}}, "expected at most the range"),
        ({"columns": {"x": {"low": 0, "high": 1e30, "resolution": 1}}}, "too fine for the range"),
        ({"columns": {"x": {"low": 0, "high": 1e7, "resolution": 1}}}, r"columns\.x: sums of squares of 10,000,001 .*"),
        ({"columns": {"x": {"low": 0, "high": 1}}}, "required field `resolution`"),
        ({"columns": {"x": {"low": 0, "high": 1, "resolution": 1}}, "min_row": 3}, "unknown field `min_row`"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"kind": "means", **options}, Means)


def test_the_widest_sums_that_are_accepted_are_exact() -> None:
    means = Means({"x": NumericColumn(0, 10_000, 0.1)}, max_rows=1000, min_rows=2)
    found = columns_of({"a": {"x": [0.0] * 500}, "b": {"x": [10_000.0] * 500}}, means)["x"]
    assert found["mean"] == 5000.0
    assert found["standard_deviation"] == pytest.approx(np.std([0.0] * 500 + [10_000.0] * 500, ddof=1), rel=1e-15)


def test_what_leaves_is_what_is_disclosed() -> None:
    schema = MEANS.schema(MEANS.begin().message)
    assert [(each.name, each.count, each.bound) for each in MEANS.disclosures()] == [
        (tensor.name, tensor.count, tensor.bound) for tensor in schema.tensors
    ]
    assert str(MEANS.disclosures()[0]) == (
        "rows: how many rows have a value, for each column; 3 numbers from -1e+06 to 1e+06, once"
    )
    with pytest.raises(ProcedureError, match="not one of this procedure"):
        MEANS.schema(Parameters.from_arrays({"step": np.array([2])}))
