"""Engines by name."""

from __future__ import annotations

import pytest

from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.registry import ENGINES, open_engine
from support.simulation.engines import RAY
from support.simulation.tasks import task


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[RAY, pytest.mark.slow]) if name == "ray" else name for name in ENGINES]
)
def test_every_engine_can_be_opened_by_its_name(name: str) -> None:
    given = task()
    engine = open_engine(ENGINES[name](), given, 1)
    engine.publish(0, given.learner.initial())
    engine.begin([ClientTask(1, 0, 0)])
    assert engine.result(ClientTask(1, 0, 0)).num_examples == engine.num_examples(1)
    engine.close()
