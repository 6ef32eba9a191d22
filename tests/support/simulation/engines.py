"""All engines by their name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from fedplat.simulation.engines.client_trainer import ClientTraining, VmapEngine
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from fedplat.simulation.engines.ray import RayEngine

MakeEngine = Callable[[ClientTraining], Engine]

ENGINES: dict[str, MakeEngine] = {
    "loop": LoopEngine,
    "processes": lambda task: ProcessEngine(task, 2),
    "vmap": lambda task: VmapEngine(task, "cpu"),
    "ray": lambda task: RayEngine(task, 2),
}

HAS_RAY = importlib.util.find_spec("ray") is not None
RAY = pytest.mark.skipif(
    not HAS_RAY,
    reason="needs Ray, whose tests take minutes: pip install -c constraints.txt -e '.[ray]', then "
    "pytest tests/core/simulation/engines -k ray",
)
