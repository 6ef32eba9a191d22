"""The engine that tries the others."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from fedplat.simulation.engines.auto import ROUNDS, AutoEngine
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.loop import LoopEngine
from support.simulation.layers import dropping, normed
from support.simulation.tasks import personal, rounds, task

WORKS = [
    [ClientTask(client, version, 10 * version + client) for client in range(6)] for version in range(2 * ROUNDS + 2)
]


class _Clock:
    """Seconds that pass at each look, more while one engine is on trial."""

    def __init__(self, slow: str) -> None:
        self.engine: AutoEngine | None = None
        self._slow, self._now = slow, 0.0

    def __call__(self) -> float:
        if self.engine is not None:
            self._now += 0.02 if self.engine._current.name == self._slow else 0.01  # pyright: ignore[reportPrivateUsage]
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
    given = task(make, sizes=(20, 12, 14, 20, 20, 20))
    engine = AutoEngine(given, 1)
    model = given.learner.initial()
    found, expected = rounds(engine, model, WORKS), rounds(LoopEngine(given), model, WORKS)
    assert [each.update for each in found[-1]] == [each.update for each in expected[-1]]
    assert engine.choice.startswith("loop")
    engine.close()


def test_clients_that_remember_stay_where_they_are() -> None:
    given: ClientTraining = personal()
    engine = AutoEngine(given, 2)
    rounds(engine, given.learner.initial(), WORKS)
    assert engine.choice == "processes, to begin with"
    engine.close()
