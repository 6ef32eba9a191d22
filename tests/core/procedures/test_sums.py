"""Sums of replies are the integers that NumPy and Python add up, in any order, in parts, and under masks."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.errors import ProcedureError, SecureAggregationError
from fedplat.model import Parameters
from fedplat.procedures.sums import ExactSum, Integers, ReplySchema, ReplyTensor, ReplyTotals
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.setup import ExactEncoding, ExactSetup, Setup
from support.secure_group import SecureGroup, make_exact_setup, make_setup

SCHEMA = ReplySchema(
    (
        ReplyTensor("n", bound=1e6),
        ReplyTensor("mean", bound=2.0**30, shape=(3,), exponent=-20),
        ReplyTensor("large", bound=2.0**90, shape=(2, 2), exponent=40),
    )
)


def round_steps(value: float, exponent: int) -> int:
    """Round a value to steps in exact arithmetic, to the even one of two."""
    return round(Fraction(value) / Fraction(2) ** exponent)


def draw_values(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "n": int(rng.integers(0, 1_000_000)),
        "mean": rng.uniform(-1, 1, 3) * 2.0 ** rng.integers(-25, 31, 3),
        "large": rng.uniform(-1, 1, (2, 2)) * 2.0 ** rng.integers(20, 91, (2, 2)),
    }


def expect(values: dict[str, Any]) -> list[int]:
    flat = [(values["n"], 0), *((each, -20) for each in values["mean"]), *((x, 40) for x in values["large"].flat)]
    return [round_steps(value, exponent) for value, exponent in flat]


def test_values_are_rounded_to_the_nearest_step() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        values = draw_values(rng)
        reply = SCHEMA.encode(values)
        assert reply.tolist() == expect(values)
        assert np.array_equal(SCHEMA.encode(values), reply)  # no randomness: a repetition reveals nothing new
    ties = ReplyTensor("x", 8.0, (5,)).round([-2.5, -1.5, 0.5, 1.5, 2.5])
    assert ties.tolist() == [-2, -2, 0, 2, 2]


def test_whole_numbers_are_exact_beyond_the_precision_of_floats() -> None:
    large = 2**62 + 1
    assert ReplyTensor("x", 2.0**62 + 2**10).round(large).tolist() == large
    assert ReplyTensor("x", 2.0**61, exponent=-1).round(2**61).tolist() == 2**62
    assert ReplyTensor("x", 2.0**63, exponent=10).round(np.int64(2**62 + 2**9 + 1)).tolist() == 2**52 + 1
    assert ReplyTensor("x", 2.0**64, exponent=10).round(np.uint64(2**64 - 1)).tolist() == 2**54
    assert ReplyTensor("x", 1.0, (2,)).round([True, False]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], r"the shape \[2\]; expected \[3\]"),
        ([1.0, np.nan, np.inf], "2 of 3 entries .* not from -4 to 4"),
        ([1.0, -4.1, 0.0], "1 of 3 entries"),
        ([1, 2, 5], "1 of 3 entries"),
        (np.array([0, 0, 2**63], np.uint64), "1 of 3 entries"),
        (["a", "b", "c"], "of the type <U1; expected numbers"),
    ],
)
def test_values_that_do_not_fit_are_refused_without_showing_them(value: Any, message: str) -> None:
    with pytest.raises(ProcedureError, match=message) as caught:
        ReplyTensor("x", 4.0, (3,)).round(value)
    assert "4.1" not in str(caught.value)


def test_declarations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.5, 1\.5 steps of 2\^0; expected a whole number"):
        ReplyTensor("x", 1.5)
    with pytest.raises(ValueError, match=r"below 2\^63"):
        ReplyTensor("x", 2.0**63)
    with pytest.raises(ValueError, match="x is declared twice"):
        ReplySchema((ReplyTensor("x", 1.0), ReplyTensor("x", 1.0)))
    with pytest.raises(ValueError, match="entries; expected at most"):
        ReplySchema((ReplyTensor("x", 1.0, (2**12, 2**13)),))
    for values, message in (({"x": 1, "y": 1}, "'y' is not declared"), ({}, "'x' is missing")):
        with pytest.raises(ProcedureError, match=message):
            ReplySchema((ReplyTensor("x", 1.0),)).encode(values)


def test_declared_bounds_prove_that_no_sum_overflows() -> None:
    schema = ReplySchema((ReplyTensor("x", 2.0**61, (1,)), ReplyTensor("y", 1.0)))
    assert schema.max_sites == 3
    total = ExactSum(schema)
    for _ in range(3):
        total.add(schema.encode({"x": [2**61], "y": 1}))
    assert total.totals.steps("x").tolist() == [3 * 2**61]
    for add in (
        lambda: total.add(schema.encode({"x": [0], "y": 0})),
        lambda: total.merge(ReplyTotals(schema, schema.encode({"x": [0], "y": 0}), 1)),
        lambda: schema.encoding(4),
    ):
        with pytest.raises(ProcedureError, match=r"'x' over 4 sites may not fit 64 bits.* at most 3 sites"):
            add()
    with pytest.raises(ValueError, match=r"4 entries up to .* does not fit 64 bits"):
        ExactEncoding(2, 2**61, 4)


def test_replies_are_checked_before_they_are_added() -> None:
    schema, total = ReplySchema((ReplyTensor("x", 4.0, (2,)),)), ExactSum(ReplySchema((ReplyTensor("x", 4.0, (2,)),)))
    replies: list[tuple[Any, str]] = [
        (np.array([5, 0]), "'x' of 1 site is beyond"),
        (np.array([0, -(2**63)]), "beyond its declared bound"),
        (np.array([0]), r"\[1\]; expected int64 \(2,\)"),
        (np.zeros(2), "the reply is float64"),
    ]
    for reply, message in replies:
        with pytest.raises(ProcedureError, match=message):
            total.add(reply)
    with pytest.raises(ProcedureError, match="'x' of 2 sites is beyond"):
        total.merge(ReplyTotals(schema, np.array([9, 0]), 2))
    with pytest.raises(ProcedureError, match="different replies"):
        total.merge(ReplyTotals(SCHEMA, np.zeros(8, np.int64), 1))
    assert total.totals.num_sites == 0


def test_a_file_is_exactly_one_reply() -> None:
    reply = SCHEMA.encode(draw_values(np.random.default_rng(1)))
    content = SCHEMA.write(reply)
    assert np.array_equal(SCHEMA.read(content), reply)
    assert Parameters.from_bytes(content)["large"].reshape(-1).tolist() == reply[4:].tolist()
    floats = Parameters.from_arrays({"n": np.zeros(()), "mean": np.zeros(3), "large": np.zeros((2, 2))}).to_bytes()
    for wrong, message in (
        (content[:-1], "not of the declared form"),
        (content + b"x", "not of the declared form"),
        (b"", "not of the declared form"),
        (floats, "'n' is F64"),
        (content[:-8] + (2**51).to_bytes(8, "little"), "'large' of 1 site is beyond its declared bound"),
    ):
        with pytest.raises(ProcedureError, match=message):
            SCHEMA.read(wrong)


def test_a_total_is_read_in_units_and_in_steps() -> None:
    totals = ReplyTotals(SCHEMA, np.arange(8), 2)
    assert totals["mean"].tolist() == [2**-20, 2 * 2**-20, 3 * 2**-20]
    assert totals.steps("large").tolist() == [[4, 5], [6, 7]]
    assert totals["large"][1, 1] == 7 * 2.0**40
    with pytest.raises(KeyError):
        totals.steps("x")


def check_cohort(seed: int, folder: Path, *, with_files: bool) -> None:
    """Compare the sum of the survivors of a random cohort, plain in random parts and under masks, with NumPy's."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 7))
    dropped = set(rng.permutation(size)[: rng.integers(0, size // 3 + 1)].tolist()) if size > 3 else set[int]()
    replies: dict[int, Integers] = {site: SCHEMA.encode(draw_values(rng)) for site in range(size)}
    survivors = [site for site in range(size) if site not in dropped]
    expected = np.sum([replies[site] for site in survivors], axis=0)
    assert expected.tolist() == [sum(int(replies[site][i]) for site in survivors) for i in range(SCHEMA.length)]

    gateways = [ExactSum(SCHEMA) for _ in range(int(rng.integers(1, 4)))]
    for site in rng.permutation(survivors):
        gateways[rng.integers(len(gateways))].add(replies[int(site)])
    plain = ExactSum(SCHEMA)
    for gateway in gateways:
        if gateway.totals.num_sites:
            plain.merge(gateway.totals)
    assert plain.totals.num_sites == len(survivors)
    assert np.array_equal(plain.totals.integers, expected)

    exact = SCHEMA.encoding(size)
    setup = make_exact_setup(exact)
    group = SecureGroup(setup, size)
    group.share()
    for site in survivors:
        masked = group.mask(site, encoding.encode_exact(exact, replies[site]))
        assert not np.any(masked == replies[site].view(np.uint64))
        if with_files:
            path = folder / f"{site}"
            path.write_bytes(b"".join(encoding.write_file(setup, masked)))
            encoding.check_file(path, setup)
    if with_files:
        group.total[:] = 0
        for site in rng.permutation(survivors):
            encoding.add_file(folder / f"{site}", setup, group.total)
    request = group.request()
    for site in survivors:
        group.answer(site, request)
    assert not group.unmask()
    total = encoding.decode_exact(exact, group.total, len(survivors))
    assert np.array_equal(total, expected)


def test_the_sum_of_a_cohort_is_that_of_its_integers(tmp_path: Path) -> None:
    for seed in range(8):
        check_cohort(seed, tmp_path, with_files=True)


@pytest.mark.slow
def test_the_sums_of_1000_random_cohorts_are_those_of_their_integers(tmp_path: Path) -> None:
    for seed in range(1000):
        check_cohort(seed, tmp_path, with_files=False)


def test_a_sum_beyond_what_its_clients_can_add_up_to_is_refused() -> None:
    exact = ExactEncoding(2, 10, 3)
    assert encoding.decode_exact(exact, np.array([30, 2**64 - 30], np.uint64), 3).tolist() == [30, -30]
    for total, count, message in (
        (np.array([31, 0], np.uint64), 3, "3 clients is beyond 30"),
        (np.array([0, 2**64 - 21], np.uint64), 2, "2 clients is beyond 20"),
        (np.zeros(2, np.uint64), 4, "from 1 to 3"),
        (np.zeros(2, np.uint32), 3, "uint32"),
        (np.zeros(3, np.uint64), 3, r"\(3,\)"),
    ):
        with pytest.raises(SecureAggregationError, match=message):
            encoding.decode_exact(exact, total, count)
    for reply in (np.array([11, 0]), np.array([0, -11]), np.array([0])):
        with pytest.raises(SecureAggregationError, match=r"expected|bound"):
            encoding.encode_exact(exact, reply)


def test_the_setups_of_both_versions_are_never_taken_for_each_other() -> None:
    exact, of_updates = make_exact_setup(ExactEncoding(2, 10, 3)), make_setup(3)
    assert hashlib.sha256(of_updates.to_bytes()).hexdigest()[:16] == "1bba000934521b21"  # as before exact sums
    assert ExactSetup.from_bytes(exact.to_bytes()) == exact
    with pytest.raises(SecureAggregationError, match="has version 3; this program has 2"):
        Setup.from_bytes(exact.to_bytes())
    with pytest.raises(SecureAggregationError, match="has version 2; this program has 3"):
        ExactSetup.from_bytes(of_updates.to_bytes())
    with pytest.raises(SecureAggregationError, match="cannot be read"):
        ExactSetup.from_bytes(b"\x80")
