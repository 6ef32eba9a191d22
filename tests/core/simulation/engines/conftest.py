"""Engines that a test can make, and that end with it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.engines.ray import Cluster
from support.simulation.engines import ENGINES, RAY, MakeEngine


@pytest.fixture(scope="session")
def ray_cluster() -> Generator[Cluster]:
    """One for all tests: it takes seconds to start."""
    cluster = Cluster(4, 0)
    yield cluster
    cluster.leave()


@pytest.fixture(
    params=[pytest.param(name, marks=[RAY, pytest.mark.slow]) if name == "ray" else name for name in ENGINES]
)
def make_engine(request: pytest.FixtureRequest) -> Generator[MakeEngine]:
    engines: list[Engine] = []
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")

    def make(task: ClientTraining) -> Engine:
        engines.append(ENGINES[request.param](task))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
