"""One suite for all robust rules: add a rule by adding a row to `CASES`."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fedplat.aggregate.robust
from fedplat import aggregate
from fedplat.aggregate import (
    Accumulator,
    AdaptiveClip,
    Contribution,
    FedAdam,
    FedAvg,
    Robust,
    clip_by_norm,
    weighted_mean,
)
from fedplat.aggregate.robust import (
    ROBUST_RULES,
    Bucketing,
    CenteredClipping,
    FLTrust,
    GeometricMedian,
    Median,
    MultiKrum,
    NearestNeighbours,
    PreAggregator,
)
from fedplat.aggregate.state import columns_of, first_columns, read_columns, state_to_bytes
from fedplat.config.plugins import name_of
from fedplat.model import WINDOW, ModelFile, Parameters, VectorBlocks
from fedplat.testing import check_robust_rule
from support.robust_cases import (
    CASES,
    MIXABLE,
    NUM_UPDATES,
    SIZE,
    F,
    cohort,
    contributions,
    distances,
    gathered,
    run,
)

every_rule = pytest.mark.parametrize("name", CASES)


def test_every_rule_has_a_row() -> None:
    assert [type(case.rule) for case in CASES.values()] == list(ROBUST_RULES.values())
    assert list(CASES) == [name_of(case.rule) for case in CASES.values()]


@every_rule
def test_the_public_checks(name: str) -> None:
    check_robust_rule(CASES[name].rule)


@every_rule
@pytest.mark.parametrize("attack", ["none", "huge", "opposite", "a little", "zero"])
def test_equal_to_the_papers_formula(name: str, attack: str) -> None:
    updates = cohort(attack)
    expected = CASES[name].reference(updates.astype(np.float64), F)
    np.testing.assert_allclose(run(Robust(CASES[name].rule, F), updates), expected, rtol=0, atol=2e-6)


@every_rule
@pytest.mark.parametrize("attack", ["huge", "largest"])
def test_byzantine_updates_of_any_size_do_not_move_the_result_out_of_the_honest_range(name: str, attack: str) -> None:
    """Checks the range of every entry; for a rule that only promises a distance, checks the paper's bound."""
    updates, step = cohort(attack), run(Robust(CASES[name].rule, F), cohort(attack)).astype(np.float64)
    honest = np.delete(updates, [3, 7], axis=0).astype(np.float64)
    centre = honest.mean(axis=0)
    if name == "geometric-median":  # 2 (n - f) / (n - 2f) times the largest distance of an honest update
        bound = 2 * (NUM_UPDATES - F) / (NUM_UPDATES - 2 * F) * distances(honest, centre).max()
        assert np.linalg.norm(step - centre) <= bound
    elif name == "centered-clipping":  # 3 iterations of at most 5 each
        assert np.linalg.norm(step) <= 15 + 1e-3
    elif name == "fltrust":
        assert np.linalg.norm(step) <= np.linalg.norm(updates[[0, 5]].mean(axis=0)) * (1 + 1e-6)
    else:
        assert (step >= honest.min(axis=0) - 1e-6).all()
        assert (step <= honest.max(axis=0) + 1e-6).all()


@every_rule
@pytest.mark.parametrize("before", [(), (NearestNeighbours(),)], ids=["alone", "mixed"])
def test_the_order_of_the_updates_does_not_matter(name: str, before: tuple[PreAggregator, ...]) -> None:
    if before and name not in MIXABLE:
        pytest.skip("it must know whose update is whose")
    updates, order = cohort("a little"), np.random.default_rng(1).permutation(NUM_UPDATES)
    robust = Robust(CASES[name].rule, F, before)
    known = contributions(NUM_UPDATES)
    backwards = gathered(robust.build(1)(weighted_mean()), updates[order], known=[known[index] for index in order])
    np.testing.assert_allclose(backwards.total, run(robust, updates), rtol=0, atol=1e-6)


def test_the_geometric_median_is_where_the_gradient_vanishes() -> None:
    for attack in ("none", "opposite", "huge"):
        updates = cohort(attack, size=50).astype(np.float64)
        step = run(Robust(GeometricMedian(), F), updates.astype(np.float32)).astype(np.float64)
        gradient = ((step - updates) / distances(updates, step)[:, None]).sum(axis=0)
        assert np.linalg.norm(gradient) < 1e-4


def test_the_geometric_median_of_equal_updates_is_each_of_them() -> None:
    updates = np.tile(np.array([1, -2, 3], np.float32), (NUM_UPDATES, 1))
    np.testing.assert_allclose(run(Robust(GeometricMedian(), F), updates), [1, -2, 3], rtol=1e-6)


def test_centered_clipping_begins_where_the_last_round_ended() -> None:
    rule = Robust(CenteredClipping(radius=0.5), F).build(0)(FedAdam(learning_rate=0.1).build())
    centre, state = np.zeros(50), rule.init(50)
    for seed in range(4):
        updates = cohort("huge", seed, size=50)
        pull = np.minimum(1, 0.5 / distances(updates.astype(np.float64), centre))
        centre = centre + (pull[:, None] * (updates - centre)).mean(axis=0)
        _, state = rule.apply(state, gathered(rule, updates, state))
        np.testing.assert_allclose(state["clipping_centre"], centre, rtol=0, atol=1e-5)
    assert set(state) == {"clipping_centre", "first_moment", "second_moment"}


def test_fltrust_moves_by_the_root_update_where_no_update_agrees() -> None:
    updates = np.array([[1, 2], [-1, -2], [0, 0], [3, 4]], np.float32)
    robust = Robust(FLTrust(("c0", "c3")), 2)
    assert run(robust, updates).tolist() == [2, 3]
    assert run(robust, updates[[0, 1, 2]]).tolist() == [1, 2]


def test_fltrust_needs_an_update_to_trust() -> None:
    with pytest.raises(ValueError, match=r"no update of a client that robust.rule.trusted names"):
        run(Robust(FLTrust(("somebody",)), 1), cohort())


@every_rule
def test_too_few_updates_are_refused(name: str) -> None:
    rule = CASES[name].rule
    fewest = rule.fewest(F)
    assert run(Robust(rule, F), cohort()[:fewest]).shape == (SIZE,)
    with pytest.raises(
        ValueError, match=f"{name} with byzantine = 2 needs at least {fewest}, not {fewest - 1} updates"
    ):
        run(Robust(rule, F), cohort()[: fewest - 1])


def test_the_papers_bounds() -> None:
    assert {name: case.rule.fewest(3) for name, case in CASES.items()} == {
        "median": 7,
        "trimmed-mean": 7,
        "krum": 9,
        "multi-krum": 9,
        "bulyan": 15,
        "geometric-median": 7,
        "centered-clipping": 7,
        "fltrust": 4,
    }
    assert MultiKrum(keep=10).fewest(3) == 13
    Robust(Median(), 2).check(1000)
    with pytest.raises(ValueError, match="a robust rule got 1001 updates; expected at most 1000"):
        Robust(Median(), 2).check(1001)
    Robust(Median(), 2, (Bucketing(size=3),)).check(13)
    with pytest.raises(ValueError, match="not 12 updates, of which pre-aggregation makes 4"):
        Robust(Median(), 2, (Bucketing(size=3),)).check(12)


@every_rule
def test_server_optimizers_and_clipping_go_with_it(name: str) -> None:
    updates, rule = cohort("huge"), CASES[name].rule
    step = run(Robust(rule, F), updates)
    halved = run(Robust(rule, F), updates, FedAvg(learning_rate=0.5).build())
    assert halved.tobytes() == (step * np.float32(0.5)).tobytes()
    bounded = clip_by_norm(0.1)(Robust(rule, F).build(0)(weighted_mean()))
    assert np.linalg.norm(gathered(bounded, updates).total) <= 0.1 * (1 + 1e-6)
    following = AdaptiveClip(initial_norm=0.1, learning_rate=1.0).build()(Robust(rule, F).build(0)(weighted_mean()))
    partial = gathered(following, updates)
    assert np.linalg.norm(partial.total) <= 0.1 * (1 + 1e-6)
    assert following.remember(partial)["clip_norm"] == pytest.approx(0.1 * np.exp(0.5))  # no update was within the norm


@pytest.mark.parametrize("name", ["median", "krum", "centered-clipping"])
def test_an_accumulator_gathers_from_files_what_it_gathers_in_memory(name: str, tmp_path: Path) -> None:
    """Two rounds, with the rule's state in a file; carried entries (counters) are covered, too."""
    rule = Robust(CASES[name].rule, F).build(1)(FedAdam().build())
    base = Parameters.from_arrays({"w": np.zeros(WINDOW + 5, np.float32), "steps": np.zeros(2, np.int64)}, "max")
    size, base_file = base.schema.num_floating, tmp_path / "base"
    base_file.write_bytes(base.to_bytes())
    state, columns = rule.init(size), first_columns(rule, size)
    for round_number in range(2):
        in_memory, in_files = Accumulator(base.schema, rule), Accumulator(base.schema, rule)
        for index, values in enumerate(cohort("huge", round_number, size)):
            update = Parameters.from_arrays({"w": values, "steps": np.array([index, 7])}, "max")
            path = tmp_path / f"{round_number}.{index}"
            path.write_bytes(update.to_bytes())
            contribution = Contribution(2.0, client_id=f"c{index}")
            in_memory.fold(update, contribution)
            in_files.fold(ModelFile.open(path), contribution)
        assert (in_files.num_updates, in_files.total_weight) == (NUM_UPDATES, 2.0 * NUM_UPDATES)
        model, state = in_memory.finish(base, state)
        parts = [
            (part.model.tobytes(), {each: vector.copy() for each, vector in (part.state or {}).items()})
            for part in in_files.parts(ModelFile.open(base_file), columns)
        ]
        assert b"".join(content for content, _ in parts) == model.to_bytes()[len(base.schema.header) :]
        assert model["steps"].tolist() == [NUM_UPDATES - 1, 7]
        (tmp_path / "state").write_bytes(state_to_bytes(state))
        columns = read_columns(tmp_path / "state", rule, size)
        for found, wanted in zip([each for _, each in parts if each], columns_of(state, size), strict=True):
            assert {each: vector.tobytes() for each, vector in found.items()} == {
                each: vector.tobytes() for each, vector in wanted.items()
            }


def test_updates_of_another_size_are_refused() -> None:
    rule = Robust(Median(), 0).build(0)(weighted_mean())
    with pytest.raises(ValueError, match="the update has 3 entries; expected 2"):
        gathered(rule, [np.ones(size, np.float32) for size in (2, 3)])


BAD_OPTIONS: Sequence[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (CenteredClipping, {"radius": 0}),
    (CenteredClipping, {"radius": float("inf")}),
    (CenteredClipping, {"radius": 1.0, "iterations": 0}),
    (GeometricMedian, {"smoothing": 0}),
    (GeometricMedian, {"iterations": 0}),
    (MultiKrum, {"keep": -1}),
    (Bucketing, {"size": 0}),
]


@pytest.mark.parametrize(("record", "options"), BAD_OPTIONS)
def test_options_out_of_range_are_refused(record: type[msgspec.Struct], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{list(options)[-1]} is"):
        record(**options)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": record.__struct_config__.tag, **options}, record)


def test_the_examples_of_the_docstrings_are_true() -> None:
    globals_ = {**vars(aggregate), "np": np, "VectorBlocks": VectorBlocks}
    for info in pkgutil.iter_modules(fedplat.aggregate.robust.__path__, "fedplat.aggregate.robust."):
        assert doctest.testmod(importlib.import_module(info.name), extraglobs=globals_).failed == 0
    result = doctest.testmod(fedplat.aggregate.robust, extraglobs=globals_)
    assert (result.failed, result.attempted > 0) == (0, True)
