"""The table `[mode]` of a job file."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fedplat.errors import JobFileError
from fedplat.job import parse_job
from fedplat.modes import (
    STALENESS_WEIGHTS,
    ConstantStaleness,
    HingeStaleness,
    PolynomialStaleness,
    StalenessWeight,
)
from fedplat.testing import check_staleness
from support.jobs import SMALL


def test_the_mode():
    assert parse_job(SMALL).buffered is None
    assert parse_job(SMALL).num_wanted == 6
    spec = parse_job(f"{SMALL}[mode]\nkind = 'buffered'\nconcurrency = 50\nmax_staleness = 3\n")
    assert spec.buffered is not None
    assert spec.num_wanted == 50
    assert [spec.buffered.is_too_stale(tau) for tau in (0, 3, 4)] == [False, False, True]
    assert (spec.weight(100), spec.weight(100, 3)) == (100, 50)


MODE = f"{SMALL}[mode]\nkind = 'buffered'\nconcurrency = 3\n"
WEIGHTS: Mapping[str, tuple[str, list[float]]] = {
    "the default": ("", [1.0, 3**-0.5, 7**-0.5]),
    "a name": ("staleness = 'constant'", [1.0, 1.0, 1.0]),
    "an option beside it": ("staleness = 'polynomial'\nexponent = 1.0", [1.0, 1 / 3, 1 / 7]),
    "two options beside it": ("staleness = 'hinge'\nslope = 2.0\ngrace = 1", [1.0, 1 / 3, 1 / 11]),
    "a table": ("staleness = { kind = 'hinge', slope = 2.0, grace = 1 }", [1.0, 1 / 3, 1 / 11]),
    "a table, and an option beside it": ("staleness = { kind = 'hinge' }\ngrace = 2", [1.0, 1.0, 1 / 41]),
}


@pytest.mark.parametrize(("table", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_the_weight_of_a_stale_update(table: str, expected: list[float]) -> None:
    spec = parse_job(f"{MODE}{table}\n")
    assert [spec.weight(1.0, tau) for tau in (0, 2, 6)] == expected


@pytest.mark.parametrize(
    "options", [PolynomialStaleness(), PolynomialStaleness(100.0), ConstantStaleness(), HingeStaleness()]
)
def test_the_public_checks(options: StalenessWeight) -> None:
    check_staleness(options)


def test_every_weight_has_a_row() -> None:
    assert set(STALENESS_WEIGHTS.values()) == {PolynomialStaleness, ConstantStaleness, HingeStaleness}


MISTAKES: Mapping[str, tuple[str, str]] = {
    "a buffer of unknown concurrency": (
        f"{SMALL}[mode]\nkind = 'buffered'\n",
        "mode.concurrency: this key is required and missing",
    ),
    "an unknown mode": (
        f"{SMALL}[mode]\nkind = 'fast'\nconcurrency = 3\n",
        "mode.kind = 'fast': expected one of sync, buffered, ssp, cyclic, gossip",
    ),
    "an option of another weight": (
        f"{SMALL}[mode]\nkind = 'buffered'\nconcurrency = 3\nstaleness = 'hinge'\nexponent = 0.5\n",
        'mode.exponent = 0.5: expected with staleness = "polynomial" only, and it is "hinge"',
    ),
    "an unknown weight": (
        f"{MODE}staleness = 'hing'\n",
        "mode.staleness = 'hing': expected one of polynomial, constant, hinge; did you mean hinge?",
    ),
    "an unknown option of a weight": (
        f"{MODE}staleness = {{ kind = 'hinge', slop = 1.0 }}\n",
        "mode.staleness.slop = 1.0: there is no such key; did you mean slope?",
    ),
    "an option in two places": (
        f"{MODE}staleness = {{ kind = 'hinge', slope = 1.0 }}\nslope = 2.0\n",
        "mode.slope = 2.0: [mode.staleness] has options; expected slope in it, too",
    ),
    "a number for a weight": (
        f"{MODE}staleness = 3\n",
        "mode.staleness = 3: expected a name or a table",
    ),
    "whole cohorts": (
        f"{SMALL}sampling = {{policy = 'poisson', rate = 0.1}}\n[mode]\nkind = 'buffered'\nconcurrency = 3\n",
        'selection.sampling.policy = "poisson": it draws whole cohorts; expected mode.kind = "sync"',
    ),
    "a buffer that closes at a deadline": (
        f"{SMALL}close = 'deadline'\n[mode]\nkind = 'buffered'\nconcurrency = 3\n",
        'selection.close = "deadline": a buffer closes at its goal; expected mode.kind = "sync"',
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(text: str, message: str):
    with pytest.raises(JobFileError) as caught:
        parse_job(text)
    assert str(caught.value) == message


CLOCKS = SMALL.replace("goal = 4", "goal = 1") + "{more}\n[mode]\nkind = 'ssp'\nconcurrency = 8\nslack = 2\n"


def test_the_mode_with_clocks() -> None:
    spec = parse_job(CLOCKS.format(more="wait_for = 8"))
    mode = spec.stale_synchronous
    assert mode is spec.buffered is spec.mode
    assert mode is not None
    assert spec.num_wanted == 8
    assert [mode.may_begin(clock, 3) for clock in (3, 5, 6)] == [True, True, False]
    assert (spec.weight(100, 50), mode.is_too_stale(10**6)) == (100, False)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("wait_for = 9", "wait_for = 9: expected at most mode.concurrency = 8"),
        ("min_separation = 1", "min_separation = 1: the others would wait"),
        ("sampling = { policy = 'weighted' }", 'policy = "weighted": the clocks decide'),
        ("[robust]\nbyzantine = 0\nrule = { name = 'median' }", "robust: it compares the updates of a version"),
    ],
)
def test_what_would_keep_a_client_from_its_next_clock_is_refused(more: str, reason: str) -> None:
    with pytest.raises(JobFileError, match=reason):
        parse_job(CLOCKS.format(more=more))


def test_each_update_makes_a_version_with_clocks() -> None:
    with pytest.raises(JobFileError, match=r"selection.goal = 2: .*expected goal = 1"):
        parse_job(CLOCKS.format(more="").replace("goal = 1", "goal = 2"))
