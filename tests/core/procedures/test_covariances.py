"""Covariances over sites are those of NumPy over the pooled rows, and have the same bits however these are divided."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures import BooleanColumn, Column, Covariances, NumericColumn, covariances, run
from fedplat.testing import check_procedure

COLUMNS = {
    "age": NumericColumn(0, 120, 1),
    "year": NumericColumn(1900, 2030, 1),
    "crp": NumericColumn(0, 500, 0.1),
}
DIED: dict[str, Column] = {"died": BooleanColumn()}


def draw_rows(num_rows: int = 3000) -> pd.DataFrame:
    rng = np.random.default_rng(39)
    age = np.clip(np.round(rng.normal(62, 11, num_rows)), 0, 120)
    crp = np.round(np.minimum(np.exp(rng.normal(2, 1, num_rows)) + age / 10, 500), 1)
    crp[rng.random(num_rows) < 0.1] = np.nan
    return pd.DataFrame({"age": age, "year": 2020 - age + rng.integers(0, 5, num_rows), "crp": crp, "died": age > 70})


ROWS: Any = draw_rows()
FRAMES = {name: ROWS[start::4] for start, name in enumerate("abcd")}


def compare(found: Any, rows: pd.DataFrame) -> None:
    complete = rows[[*COLUMNS]].dropna().to_numpy(float)
    assert (found["rows"], found["incomplete"]) == (len(complete), len(rows) - len(complete))
    assert [*found["mean"].values()] == pytest.approx(complete.mean(axis=0), rel=1e-14)
    for name, expected in (("covariance", np.cov(complete.T)), ("correlation", np.corrcoef(complete.T))):
        matrix = pd.DataFrame(found[name])
        assert [*matrix.index] == [*matrix.columns] == [*COLUMNS]
        np.testing.assert_allclose(matrix.to_numpy(), expected, rtol=1e-12)


def test_they_are_those_of_the_pooled_rows() -> None:
    result = run(Covariances(COLUMNS), FRAMES)
    compare(result.result, ROWS)
    other = {name: ROWS[start::7][::-1] for start, name in enumerate("abcdefg")}
    assert run(Covariances(COLUMNS), other).result == result.result
    grouped = Covariances(COLUMNS, where="age >= 40", by=("died",), others=DIED)
    groups: Any = run(grouped, FRAMES).result["groups"]
    for level, each in zip((False, True), groups[:2], strict=True):
        assert each["group"] == {"died": str(level).lower()}
        compare(each, ROWS[(ROWS["died"] == level) & (ROWS["age"] >= 40)])
    assert groups[2] == {
        **{"group": {"died": "missing"}, "rows": None, "incomplete": None, "mean": None, "covariance": None},
        **{"correlation": None, "suppressed": "fewer than 10 rows have all values"},
    }


def test_a_constant_has_no_correlation_and_itself_one_of_1() -> None:
    frame = {"age": [50.0] * 20, "year": range(1900, 1920), "crp": np.arange(20) / 10}
    found: Any = run(Covariances(COLUMNS), {"a": frame}).result
    assert found["correlation"]["age"] == {"age": None, "year": None, "crp": None}
    assert found["covariance"]["age"] == {"age": 0.0, "year": 0.0, "crp": 0.0}
    assert found["correlation"]["year"] == {"age": None, "year": 1.0, "crp": 1.0}


def test_products_are_exact_however_large_the_steps_are() -> None:
    rng = np.random.default_rng(1)
    for bits in (3, 20, 22, 25):  # of one block, several, and none
        steps = rng.integers(-(2**bits), 2**bits + 1, (3000, 2))
        expected = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in steps.T.tolist()] for x in steps.T.tolist()]
        assert covariances._multiply(steps).tolist() == expected  # pyright: ignore[reportPrivateUsage]


def test_it_keeps_the_contract() -> None:
    procedure = Covariances(COLUMNS, by=("died",), others=DIED)
    check_procedure(procedure, FRAMES)
    check_procedure(Covariances(COLUMNS), FRAMES)
    assert str(procedure.disclosures()[3]) == (
        "products: the sum of the products of these numbers, for each two columns, in each group of rows; 18 numbers "
        "from -6.25e+12 to 6.25e+12, once"
    )
    with pytest.raises(ProcedureError, match="not one of this procedure"):
        procedure.schema(Parameters.from_arrays({"step": np.array([2])}))
    wide = {"x": {"low": 0, "high": 1e7, "resolution": 1}}
    with pytest.raises(msgspec.ValidationError, match=r"columns\.x: sums of squares"):
        msgspec.convert({"kind": "covariances", "columns": wide}, Covariances)
