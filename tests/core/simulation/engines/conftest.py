"""Engines that a test can make, and that end with it."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from fedplat.simulation.engines.loop import LoopEngine
from fedplat.simulation.engines.processes import ProcessEngine
from fedplat.simulation.engines.resident import Task, one_thread
from fedplat.simulation.engines.vmap import VmapEngine
from fedplat.simulation.ports import Engine

MakeEngine = Callable[[Task], Engine]
ENGINES: dict[str, MakeEngine] = {
    "loop": LoopEngine,
    "processes": lambda task: ProcessEngine(task, 2),
    "vmap": lambda task: VmapEngine(task, "cpu"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Generator[None]:  # pyright: ignore[reportUnusedFunction] -- pytest uses it
    """Threads of OpenMP that wait for each other on busy cores make small matrices ten times slower."""
    with one_thread():
        yield


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Generator[MakeEngine]:
    engines: list[Engine] = []

    def make(task: Task) -> Engine:
        engines.append(ENGINES[request.param](task))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
