"""The persistent map of assignments, whose versions share what did not change."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.rounds.changes import difference
from fedplat.rounds.persistent_map import PersistentMap, to_persistent
from support.rounds.cohorts import num_copied
from support.rounds.driver import make_job


def test_it_is_a_dictionary_that_is_never_changed() -> None:
    rng = np.random.default_rng(0)
    expected: dict[str, object] = {}
    cohort: PersistentMap[object] = PersistentMap()
    kept: list[tuple[PersistentMap[object], dict[str, object]]] = []
    for _ in range(300):
        changed = {f"c{rng.integers(60)}": object() for _ in range(int(rng.integers(0, 4)))}
        expected = expected | changed
        cohort = cohort.update(changed)
        kept.append((cohort, expected))
    for before, old in kept[::7]:
        assert list(before.items()) == list(old.items())
        assert list(before) == list(old)
        assert list(before.values()) == list(old.values())
        assert len(before) == len(old)
        assert before == old
        assert all(before[name] is old[name] for name in old)
        assert before.get("nobody") is None
        for after, new in kept[::13]:
            assert set(after.changed_since(before)) == {new[name] for name in new if old.get(name) is not new[name]}
            assert set(after.changed_since(old)) == set(after.changed_since(before))


def test_what_is_absent_is_absent() -> None:
    with pytest.raises(KeyError):
        PersistentMap({"a": 1})["b"]
    assert "b" not in PersistentMap({"a": 1})
    assert repr(PersistentMap({"a": 1})) == "PersistentMap({'a': 1})"
    same = PersistentMap({"a": 1})
    assert to_persistent(same) is same


def test_a_step_costs_much_less_than_the_cohort() -> None:
    """n changes of n assignments make n^1.5 copies rather than n^2."""
    size = 2500
    cohort = PersistentMap({f"c{i}": 0 for i in range(size)})
    copied = 0
    for i in range(size):
        cohort = cohort.update({f"c{i}": 1})
        copied += num_copied(cohort)
    assert set(cohort.values()) == {1}
    assert copied < 3 * size**1.5
    assert copied < size**2 / 10


def test_a_difference_of_equal_revisions_is_refused() -> None:
    job = make_job()
    with pytest.raises(AssertionError):
        difference(job, job)
