"""Counts over sites are those of pandas over the pooled rows, and small cells are null and never 0."""

from __future__ import annotations

import datetime
import json
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures import BooleanColumn, CategoryColumn, Column, Counts, DateColumn, Means, NumericColumn, run
from fedplat.testing import check_procedure

SEX = CategoryColumn(("f", "m"), other=True)
COLUMNS: dict[str, Column] = {
    "sex": SEX,
    "died": BooleanColumn(),
    "crp": NumericColumn(0, 500, 0.1),
    "admitted": DateColumn(datetime.date(2020, 1, 1), datetime.date(2026, 12, 31)),
}
OTHERS: dict[str, Column] = {"age": NumericColumn(0, 120, 1), "ward": CategoryColumn(("A", "B"))}


def draw_rows(num_rows: int = 2000) -> pd.DataFrame:
    rng = np.random.default_rng(39)
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 2000, num_rows), "D")
    rows = pd.DataFrame(
        {
            "sex": rng.choice(["f", "m", "x", "y"], num_rows, p=[0.5, 0.4, 0.06, 0.04]),
            "died": rng.random(num_rows) < 0.2,
            "crp": np.round(rng.random(num_rows) * 100, 1),
            "admitted": days,
            "age": rng.integers(20, 90, num_rows),
            "ward": rng.choice(["A", "B"], num_rows),
        }
    ).astype({"died": object, "sex": object, "ward": object})
    for name in ("sex", "died", "crp", "admitted", "ward"):
        rows.loc[rng.random(num_rows) < 0.05, name] = None
    return rows


ROWS: Any = draw_rows()
FRAMES = {name: ROWS[start::3] for start, name in enumerate("abc")}
LEVELS: dict[str, Any] = {
    "sex": ROWS["sex"].replace({"x": "other", "y": "other"}).fillna("missing"),
    "died": ROWS["died"].map({True: "true", False: "false"}).fillna("missing"),
    "ward": ROWS["ward"].fillna("missing"),
}


def count(procedure: Counts) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(procedure, FRAMES).to_json())["result"]
    return found


def fill(counts: dict[str, Any], column: Column) -> dict[str, Any]:
    """Return counts of pandas with 0 for levels that no row has."""
    return {level: counts.get(level, 0) for level in column.levels}


def test_counts_are_those_of_the_pooled_rows() -> None:
    found = count(Counts(COLUMNS, tables=(("sex", "died"),), min_cell=1))
    assert found["rows"] == len(ROWS)
    for name in ("sex", "died"):
        assert found["columns"][name] == fill(LEVELS[name].value_counts().to_dict(), COLUMNS[name])
    for name in ("crp", "admitted"):
        num_missing = int(ROWS[name].isna().sum())
        assert found["columns"][name] == {"present": len(ROWS) - num_missing, "missing": num_missing}
    (table,) = found["tables"]
    expected = pd.crosstab(LEVELS["died"], LEVELS["sex"]).to_dict()
    assert table == {"columns": ["sex", "died"], "counts": {each: expected[each] for each in SEX.levels}}
    assert "suppressed" not in found


def test_rows_are_selected_and_grouped() -> None:
    where = "age >= 40 and sex in ['f', 'm'] and admitted < '2024-01-01' and not died == 1"
    found = count(Counts(COLUMNS, where=where, by=("ward",), others=OTHERS, min_cell=1))
    is_selected = (ROWS["age"] >= 40) & ROWS["sex"].isin(["f", "m"]) & (ROWS["admitted"] < "2024-01-01")
    is_selected &= LEVELS["died"] != "true"
    assert found["by"] == ["ward"]
    assert found["rows"] == LEVELS["ward"][is_selected].value_counts().to_dict()
    expected = pd.crosstab(LEVELS["died"][is_selected], LEVELS["ward"][is_selected]).to_dict()
    assert found["columns"]["died"] == {ward: fill(expected[ward], COLUMNS["died"]) for ward in ("A", "B", "missing")}


def test_small_cells_are_null_with_a_reason() -> None:
    frame = {"sex": ["f"] * 40 + ["m"] * 30 + ["x"] * 3, "died": [True] * 5 + [False] * 68}
    counts = Counts({"sex": SEX, "died": BooleanColumn()}, tables=(("sex", "died"),))
    result: Any = json.loads(run(counts, {"a": frame}).to_json())["result"]
    assert result["rows"] == 73
    assert result["columns"]["sex"] == {"f": 40, "m": None, "other": None, "missing": 0}
    assert result["columns"]["died"] == {"false": None, "true": None, "missing": 0}
    assert result["tables"][0]["counts"]["f"]["true"] is None
    assert "those with fewer than 10 rows, but for 0" in result["suppressed"]
    few = run(Counts({"sex": SEX}), {"a": {"sex": ["f"] * 3}}).result
    assert (few["rows"], few["columns"]) == (None, {"sex": {"f": None, "m": 0, "other": 0, "missing": 0}})


def test_means_of_selected_rows_by_group() -> None:
    columns = {"crp": NumericColumn(0, 500, 0.1)}
    means = Means(columns, where="age >= 40", by=("sex",), others={"sex": SEX, "age": OTHERS["age"]}, min_rows=70)
    groups: Any = run(means, FRAMES).result["groups"]
    assert [each["group"] for each in groups] == [{"sex": level} for level in SEX.levels]
    for each in groups:
        rows = ROWS["crp"][(ROWS["age"] >= 40) & (LEVELS["sex"] == each["group"]["sex"])]
        found = each["columns"]["crp"]
        if rows.count() < 70:
            assert found["mean"] is None
            assert found["suppressed"] == "fewer than 70 rows have a value"
            continue
        assert (found["rows"], found["missing"]) == (rows.count(), rows.isna().sum())
        assert found["mean"] == pytest.approx(rows.mean(), rel=1e-14)
        assert found["standard_deviation"] == pytest.approx(rows.std(ddof=1), rel=1e-12)
    assert groups[-1]["columns"]["crp"]["mean"] is None
    check_procedure(means, FRAMES)


def test_the_rows_of_a_table_are_bounded_and_only_its_step_is_answered() -> None:
    counts = Counts({"sex": SEX}, max_rows=100)
    with pytest.raises(ProcedureError, match="site 'a': the table has 667 rows; expected at most max_rows = 100"):
        run(counts, FRAMES)
    with pytest.raises(ProcedureError, match="not one of this procedure"):
        counts.schema(Parameters.from_arrays({"step": np.array([2])}))


def test_it_keeps_the_contract() -> None:
    counts = Counts(COLUMNS, tables=(("sex", "died"), ("died", "crp")), by=("ward",), others={"ward": OTHERS["ward"]})
    check_procedure(counts, FRAMES)
    assert str(counts.disclosures()[1]) == (
        "table 1: how many rows have each level of 'sex', in each group by 'ward'; 12 numbers from -1e+06 to 1e+06, "
        "once"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": [["sex", "ward"]]}, "tables: the column 'ward' is not in columns"),
        ({"tables": [["sex", "sex"]]}, "tables: the column 'sex' is twice in a table"),
        ({"tables": [["sex", "died"], ["died", "sex"]]}, "two tables have the same columns"),
        ({"tables": [["sex"]]}, "length >= 2"),
        ({"by": ["sex"]}, "by: the column 'sex' is in columns; expected it in others"),
        ({"by": ["ward"]}, "by: the column 'ward' is not declared"),
        ({"by": ["age"], "others": {"age": {"type": "number", "low": 0, "high": 9, "resolution": 1}}}, "has no levels"),
        ({"by": ["x", "x"], "others": {"x": {"type": "boolean"}}}, "by: the column 'x' is listed twice"),
        ({"others": {"x": {"type": "boolean"}}}, r"others\.x: neither where nor by names the column"),
        ({"others": {"sex": {"type": "boolean"}}}, r"others\.sex: the column is also in columns"),
        ({"where": "age > 3"}, "where: the column 'age' is not declared"),
        ({"where": "sex"}, "where: 'sex' is not a condition"),
        (
            {
                "by": [*"vwxy"],
                "others": {name: {"type": "category", "categories": [*map(str, range(99))]} for name in "vwxy"},
            },
            r"by: there are 100,000,000 groups; expected at most 100,000",
        ),
        (
            {
                "by": [*"vw"],
                "others": {name: {"type": "category", "categories": [*map(str, range(199))]} for name in "vw"},
            },
            r"cells of 40,000 groups; expected at most 100,000",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    columns = {"sex": {"type": "category", "categories": ["f", "m"]}, "died": {"type": "boolean"}}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"kind": "counts", "columns": columns, **options}, Counts)
