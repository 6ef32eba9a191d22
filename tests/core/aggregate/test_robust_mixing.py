"""Pre-aggregators: what is put before a robust rule."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.aggregate import Robust
from fedplat.aggregate.robust import (
    PRE_AGGREGATORS,
    Bucketing,
    FLTrust,
    Median,
    NearestNeighbours,
    PreAggregator,
    Rows,
)
from fedplat.model import VectorBlocks
from fedplat.testing import check_pre_aggregator
from support.robust_cases import CASES, MIXABLE, NUM_UPDATES, F, cohort, distances, run


@pytest.mark.parametrize("options", [Bucketing(), Bucketing(size=5), NearestNeighbours()])
def test_the_public_checks(options: PreAggregator) -> None:
    check_pre_aggregator(options)


def test_every_pre_aggregator_has_a_row() -> None:
    assert set(PRE_AGGREGATORS.values()) == {Bucketing, NearestNeighbours}


@pytest.mark.parametrize("name", MIXABLE)
def test_what_mixes_nothing_changes_nothing(name: str) -> None:
    """Buckets of one; and the mean of the nearest one, which is the update itself."""
    updates, rule = cohort("a little"), CASES[name].rule
    alone = run(Robust(rule, F), updates)
    np.testing.assert_allclose(run(Robust(rule, F, (Bucketing(size=1),)), updates), alone, rtol=0, atol=1e-7)


def test_nearest_neighbours_of_one_are_the_updates() -> None:
    updates = cohort()
    rows = Rows.of([VectorBlocks(one) for one in updates])
    mixed = NearestNeighbours().build(NUM_UPDATES - 1, 0)(rows)
    assert mixed.mixing.tolist() == np.eye(NUM_UPDATES).tolist()


@pytest.mark.parametrize("name", MIXABLE)
def test_mixed_rows_are_the_papers(name: str) -> None:
    """Nearest-neighbour mixing, and bucketing, by NumPy; then the rule's own formula."""
    updates, case = cohort("opposite"), CASES[name]
    wide = updates.astype(np.float64)
    nearest = [np.argsort(distances(wide, one), kind="stable")[: NUM_UPDATES - F] for one in wide]
    mixed = np.array([wide[chosen].mean(axis=0) for chosen in nearest])
    # Mixed in float32; and of rows that are almost equal, Krum may choose another.
    np.testing.assert_allclose(
        run(Robust(case.rule, F, (NearestNeighbours(),)), updates), case.reference(mixed, F), rtol=0, atol=0.02
    )
    if name != "bulyan":  # 7 buckets are too few for it
        order = np.random.default_rng(4).permutation(NUM_UPDATES)
        buckets = np.array([wide[order[start : start + 2]].mean(axis=0) for start in range(0, NUM_UPDATES, 2)])
        step = run(Robust(case.rule, F, (Bucketing(size=2),)), updates, seed=4)
        np.testing.assert_allclose(step, case.reference(buckets, F), rtol=0, atol=2e-6)


def test_pre_aggregators_go_one_after_the_other() -> None:
    updates = cohort("huge")
    both = run(Robust(Median(), 1, (Bucketing(size=2), NearestNeighbours())), updates[:, :50], seed=3)
    order = np.random.default_rng(3).permutation(NUM_UPDATES)
    wide = updates[:, :50].astype(np.float64)
    buckets = np.array([wide[order[start : start + 2]].mean(axis=0) for start in range(0, NUM_UPDATES, 2)])
    nearest = [np.argsort(distances(buckets, one), kind="stable")[:6] for one in buckets]
    expected = np.median([buckets[chosen].mean(axis=0) for chosen in nearest], axis=0)
    np.testing.assert_allclose(both, expected, rtol=1e-6, atol=1e-6)


def test_fltrust_takes_no_pre_aggregator() -> None:
    with pytest.raises(ValueError, match="expected none with fltrust"):
        Robust(FLTrust(("a",)), 1, (Bucketing(),))
