"""A procedure of several steps runs to its end, and only its state goes from step to step."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures import Finished, ReplyDisclosure, ReplySchema, ReplyTensor, ReplyTotals, SiteTable, Step, run


class Median(msgspec.Struct, frozen=True):
    """The lower median of whole numbers below 2^`bits`, by bisection."""

    bits: int = 10

    def begin(self) -> Step:
        return self._ask(0, 2**self.bits - 1)

    def _ask(self, low: int, high: int) -> Step:
        return Step(Parameters.from_arrays({"at": np.array((low + high) // 2)}), msgspec.json.encode((low, high)))

    def schema(self, message: Parameters) -> ReplySchema:
        return ReplySchema((ReplyTensor("below", 1000.0), ReplyTensor("rows", 1000.0)))

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        values = table.read("x")
        return {"below": np.count_nonzero(values <= message["at"]), "rows": values.size}

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        low, high = msgspec.json.decode(state, type=tuple[int, int])
        if low == high:
            return Finished({"median": low})
        is_below = 2 * totals.steps("below") >= totals.steps("rows")
        middle = (low + high) // 2
        return self._ask(low, middle) if is_below else self._ask(middle + 1, high)

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        return (ReplyDisclosure("below", "how many values are at most a number", 1, 1000.0, 1.0, self.bits + 1),)


def test_a_procedure_asks_again_until_it_is_done() -> None:
    values = np.random.default_rng(0).integers(0, 1024, 101)
    frames = {name: {"x": part} for name, part in zip("abc", np.array_split(values, 3), strict=True)}
    result = run(Median(), frames)
    assert result.result == {"median": int(np.median(values))}
    assert result.steps == 11
    assert run(Median(), frames).to_json() == result.to_json()
    assert "at most 11 times" in str(Median().disclosures()[0])
    with pytest.raises(ProcedureError, match="has not ended after 10 steps"):
        run(Median(), frames, max_steps=10)


def test_too_many_sites_for_the_bounds_are_refused_before_any_is_asked() -> None:
    class Wide(Median, frozen=True):
        def schema(self, message: Parameters) -> ReplySchema:
            return ReplySchema((ReplyTensor("below", 2.0**62), ReplyTensor("rows", 1000.0)))

        def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
            raise AssertionError("a site was asked")

    with pytest.raises(ProcedureError, match="'below' over 2 sites may not fit 64 bits"):
        run(Wide(), {"a": {"x": [1]}, "b": {"x": [1]}})
