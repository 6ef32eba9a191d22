"""The checks of procedures accept those of fedplat, and name what is wrong with each that is broken on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import Struct

from fedplat.model import Parameters
from fedplat.procedures import (
    Finished,
    Means,
    NumericColumn,
    ReplyDisclosure,
    ReplySchema,
    ReplyTensor,
    ReplyTotals,
    SiteTable,
    Step,
)
from fedplat.testing import ConformanceError, check_procedure

FRAMES = {name: {"x": np.arange(1.0, 5.0)} for name in "abc"}
CALLS = itertools.count(1)


class Twice(Struct, frozen=True):
    """Counts the rows, and asks a second time."""

    def begin(self) -> Step:
        return Step(Parameters.from_arrays({"step": np.array(1)}), b"first")

    def schema(self, message: Parameters) -> ReplySchema:
        return ReplySchema((ReplyTensor("rows", 1000.0),))

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        return {"rows": table.read("x").size}

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        if state == b"first":
            return Step(Parameters.from_arrays({"step": np.array(2)}), b"second")
        return Finished({"rows": int(totals.steps("rows"))})

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        return (ReplyDisclosure("rows", "the number of rows", 1, 1000.0, 1.0, times=2),)


class OwnRandomness(Twice, frozen=True):
    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        return {"rows": next(CALLS)}


class NewBegin(Twice, frozen=True):
    def begin(self) -> Step:
        return Step(Parameters.from_arrays({"step": np.array(next(CALLS))}), b"first")


class NewAdvance(Twice, frozen=True):
    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        return Finished({"rows": next(CALLS)})


class NotJson(Twice, frozen=True):
    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        return Finished({"rows": float("nan")})


class Undisclosed(Twice, frozen=True):
    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        return ()


class More(Twice, frozen=True):
    disclosed: tuple[Any, ...] = (1, 1000.0, 1.0, 1)

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        return (ReplyDisclosure("rows", "the number of rows", *self.disclosed),)


class Endless(Twice, frozen=True):
    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        return self.begin()


class Mistake(Twice, frozen=True):
    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        return {"row": 1}


class Mutable(Struct):
    begin = schema = answer = advance = disclosures = Twice.begin


@pytest.mark.parametrize("procedure", [Twice(), Means({"x": NumericColumn(0, 10, 1)})])
def test_procedures_that_keep_the_contract_pass(procedure: Any) -> None:
    check_procedure(procedure, FRAMES)


@pytest.mark.parametrize(
    ("procedure", "sentence"),
    [
        (OwnRandomness(), "answer() in step 1 differs when it is asked again: a repeated step would reveal more"),
        (NewBegin(), "begin() returns another step when it is called again"),
        (NewAdvance(), "advance() of step 1 returns something else when it is called again"),
        (NotJson(), "the result changes when it is written as JSON; expected finite numbers"),
        (Undisclosed(), "disclosures() has no 'rows', which sites send"),
        (More(), "'rows' with 2 times, and disclosures() states 1 at most"),
        (More((0, 1000.0, 1.0, 2)), "'rows' with 1 numbers, and disclosures() states 0 at most"),
        (More((1, 999.0, 1.0, 2)), "'rows' with 1000 as their bound, and disclosures() states 999 at most"),
        (More((1, 1000.0, 2.0, 2)), "'rows' in steps of 2^0, and disclosures() states 2"),
        (Endless(), "has not ended after 20 steps"),
        (Mistake(), "tensor 'row' is not declared in the reply"),
        (Mutable(), "Mutable is not a frozen record; expected class Mutable(msgspec.Struct, frozen=True)"),
        (object(), "there is no begin(); a procedure has begin, schema"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_wrong_is_named(procedure: Any, sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_procedure(procedure, FRAMES, max_steps=20)
    assert sentence in str(caught.value)
