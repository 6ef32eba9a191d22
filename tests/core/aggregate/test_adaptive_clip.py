from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.aggregate import (
    Accumulator,
    AdaptiveClip,
    Contribution,
    FedAvg,
    FedAvgM,
    Rule,
    clip_by_norm,
    clip_by_quantile,
    first_columns,
    l2_norm,
    read_columns,
    read_scalars,
    state_from_bytes,
    state_to_bytes,
)
from fedplat.errors import ModelError
from fedplat.model import WINDOW, Parameters, Vector, VectorBlocks

NUM_ROUNDS, COHORT, SIZE = 60, 9, 20


def updates_of(round_number: int, scale: float = 3.0) -> list[Vector]:
    rng = np.random.default_rng(round_number)
    return [(scale * rng.exponential() * rng.normal(size=SIZE)).astype(np.float32) for _ in range(COHORT)]


def norms_of_the_rule(rule: Rule, rounds: list[list[Vector]]) -> tuple[list[float], list[Vector]]:
    """The norm that each round was clipped at, and its step; attempts hand it on as the server does."""
    schema, state = Parameters.from_arrays({"w": np.zeros(SIZE, np.float32)}).schema, rule.init(SIZE)
    scalars: Mapping[str, float] = {}
    norms, steps = list[float](), list[Vector]()
    for updates in rounds:
        accumulator = Accumulator(schema, rule, scalars)
        for number, update in enumerate(updates):
            accumulator.fold(Parameters.from_arrays({"w": update}), Contribution(1.0 + number))
        model, state = accumulator.finish(Parameters.zeros(schema), state)
        state, scalars = state_from_bytes(state_to_bytes(state, accumulator.scalars))
        norms.append(scalars["clip_norm"])
        steps.append(model["w"].copy())
    return norms, steps


def test_the_norm_is_that_of_the_papers_algorithm():
    options, rounds = (
        AdaptiveClip(quantile=0.7, learning_rate=0.3),
        [updates_of(number) for number in range(NUM_ROUNDS)],
    )
    norms, steps = norms_of_the_rule(clip_by_quantile(options)(FedAvg().build()), rounds)
    bound, weights = options.initial_norm, 1.0 + np.arange(COHORT)
    for updates, norm, step in zip(rounds, norms, steps, strict=True):
        lengths = np.linalg.norm(np.array(updates, np.float64), axis=1)
        clipped = np.array(updates) * np.minimum(1, bound / lengths)[:, None]
        np.testing.assert_allclose(step, np.average(clipped, axis=0, weights=weights), rtol=1e-4, atol=1e-7)
        bound *= np.exp(-0.3 * ((lengths <= bound).mean() - 0.7))
        assert norm == pytest.approx(bound)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_norm_finds_the_quantile(quantile: float):
    rule = AdaptiveClip(quantile=quantile).build()(FedAvg().build())
    norms, _ = norms_of_the_rule(rule, [updates_of(number) for number in range(200)])
    lengths = [l2_norm(VectorBlocks(update)) for number in range(100, 200) for update in updates_of(number)]
    assert np.mean([length <= np.median(norms[100:]) for length in lengths]) == pytest.approx(quantile, abs=0.08)


def test_a_minority_cannot_raise_the_norm_for_long():
    honest = [updates_of(number) for number in range(150)]
    attacked = [[*updates, *[np.full(SIZE, 1e30, np.float32)] * 3] for updates in honest]
    rule = AdaptiveClip().build()(FedAvg().build())
    clean, dirty = (np.median(norms_of_the_rule(rule, rounds)[0][75:]) for rounds in (honest, attacked))
    assert dirty < 3 * clean


def test_partial_results_vote_together():
    rule, updates = AdaptiveClip().build()(FedAvg().build()), updates_of(0, 0.02)

    def folded(some: list[Vector]) -> Any:
        partial = rule.start(SIZE)
        for update in some:
            partial = rule.fold(partial, VectorBlocks(update), Contribution(1.0))
        return partial

    merged = rule.merge(folded(updates[:4]), folded(updates[4:]))
    assert rule.remember(merged) == rule.remember(folded(updates))
    assert rule.remember(rule.start(SIZE)) == {"clip_norm": 0.1}


@pytest.mark.parametrize("size", [0, 3, WINDOW + 5])
@pytest.mark.parametrize("inner", [FedAvg().build(), FedAvgM().build()])
def test_the_number_goes_through_the_states_file(inner: Rule, size: int, tmp_path: Path):
    rule = AdaptiveClip(initial_norm=7.0).build()(inner)
    state = {name: vector + 2 for name, vector in rule.init(size).items()}
    (tmp_path / "state").write_bytes(state_to_bytes(state, {"clip_norm": 0.3}))
    assert read_scalars(tmp_path / "state", rule, size) == {"clip_norm": 0.3}
    columns = list(read_columns(tmp_path / "state", rule, size))
    assert all((vector == 2).all() for column in columns for vector in column.values())
    assert len(columns) == len(list(first_columns(rule, size)))
    with pytest.raises(ModelError, match="not a state of the job's rule"):
        read_scalars(tmp_path / "state", FedAvgM().build(), size)


def test_a_rule_that_remembers_no_number_has_none():
    assert clip_by_norm(1.0)(FedAvgM().build()).remember(FedAvgM().build().start(3)) == {}
    assert Accumulator(Parameters.from_arrays({"w": np.zeros(3)}).schema, FedAvg().build()).scalars == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [("quantile", 1.1), ("quantile", float("nan")), ("learning_rate", 0.0), ("learning_rate", 11), ("initial_norm", 0)],
)
def test_impossible_options_are_refused(field: str, value: float):
    with pytest.raises(ValueError, match=f"^{field} is"):
        AdaptiveClip(**{field: value})


def test_an_update_without_a_norm_is_refused():
    rule = AdaptiveClip().build()(FedAvg().build())
    with pytest.raises(ValueError, match="NaN or infinite"):
        rule.fold(rule.start(1), VectorBlocks(np.array([np.nan], np.float32)), Contribution(1.0))
