"""The engine that tries the others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from torch import nn

from fedplat.simulation.engines import auto
from fedplat.simulation.engines.auto import ROUNDS, AutoEngine
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine
from support.simulation.layers import dropping, normed
from support.simulation.tasks import personal, rounds, task

WORKS = [
    [ClientTask(client, version, 10 * version + client) for client in range(6)] for version in range(2 * ROUNDS + 2)
]


class _Clock:
    """Seconds that pass at each look, more while one engine trains; as many as in a large study."""

    def __init__(self, slow: str) -> None:
        self.engine: AutoEngine | None = None
        self._slow, self._now = slow, 0.0

    def __call__(self) -> float:
        if self.engine is not None:
            self._now += 2.0 if self.engine._current.name == self._slow else 1.0  # pyright: ignore[reportPrivateUsage]
        return self._now


@pytest.mark.parametrize(("slow", "fast"), [("loop", "vmap"), ("vmap", "loop")])
def test_the_fastest_engine_is_kept_and_all_rounds_count(slow: str, fast: str) -> None:
    given, clock = task(), _Clock(slow)
    model = given.learner.initial()
    engine = clock.engine = AutoEngine(given, 1, clock)
    found = rounds(engine, model, WORKS)
    expected = rounds(LoopEngine(given), model, WORKS)
    for round_, reference in zip(found, expected, strict=True):
        for one, other in zip(round_, reference, strict=True):
            assert np.abs(one.update.to_vector() - other.update.to_vector()).max() < 1e-6
    assert engine.choice.startswith(f"{fast} with ")
    assert slow in engine.choice
    engine.close()


@pytest.mark.parametrize("make", [normed, dropping])
def test_an_engine_that_cannot_do_it_is_left(make: type[nn.Module]) -> None:
    given, clock = task(make, sizes=(20, 12, 14, 20, 20, 20)), _Clock("loop")
    engine = clock.engine = AutoEngine(given, 1, clock)
    model = given.learner.initial()
    found, expected = rounds(engine, model, WORKS), rounds(LoopEngine(given), model, WORKS)
    assert [each.update for each in found[-1]] == [each.update for each in expected[-1]]
    assert engine.choice.startswith("loop")
    engine.close()


def test_a_small_study_starts_no_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a small study has no time for it")

    monkeypatch.setattr(auto, "ProcessEngine", refuse)
    monkeypatch.setattr(auto, "_make_vmap", refuse)
    given = task()
    engine = AutoEngine(given, 8)
    found, expected = (rounds(each, given.learner.initial(), WORKS) for each in (engine, LoopEngine(given)))
    assert [one.update for round_ in found for one in round_] == [one.update for round_ in expected for one in round_]
    assert engine.choice == "loop"


def test_the_states_of_clients_move_to_processes_when_a_study_is_large() -> None:
    given: ClientTraining = personal()
    clock = _Clock("loop")
    small, large = AutoEngine(given, 2), AutoEngine(given, 2, clock)
    clock.engine = large
    model = given.learner.initial()
    expected, found = rounds(small, model, WORKS), rounds(large, model, WORKS)
    assert (small.choice, large.choice.split(",")[0]) == ("loop", "processes")
    assert [one.update for round_ in found for one in round_] == [one.update for round_ in expected for one in round_]
    assert small.client_states().keys() == large.client_states().keys()
    large.close()


def test_an_engine_is_changed_while_tasks_are_in_progress() -> None:
    """In a job with a buffer some client always trains."""
    given, clock = task(sizes=(20,) * 6), _Clock("loop")
    engine = clock.engine = AutoEngine(given, 1, clock)
    engine.publish(0, given.learner.initial())
    tasks = [ClientTask(number % 6, 0, number) for number in range(30)]
    engine.begin(tasks[:1])
    for last, following in itertools.pairwise(tasks):
        engine.begin([following])
        assert engine.result(last).num_examples
    engine.drop(tasks[-1])
    assert engine.choice.startswith("vmap with ")
    engine.close()
