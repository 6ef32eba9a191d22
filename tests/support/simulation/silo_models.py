"""Digests of the models of decentralised jobs (`silo_models.json`) in which all silos take part, and none is late.

PYTHONPATH=tests python -m support.simulation.silo_models --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from fedplat.model import Parameters
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.clients.fleet import LinkOptions
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.run import Simulation, run
from support.rounds.silos import silo_spec
from support.simulation.least_squares import NUM_WEIGHTS, LeastSquares, initial

FILE: Final = Path(__file__).resolve().parents[2] / "core" / "simulation" / "silo_models.json"
SILOS: Final = 8
_QUANTIZED: Final = {"uplink": {"codec": "quantize"}}
CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ring": {},
    "complete": {"mode": {"topology": "complete"}},
    "pairs": {"mode": {"topology": "pairs", "seed": 5}},
    "torus, lost messages": {"mode": {"topology": "torus", "tolerance": 0.05}, "loss": 0.3},
    "CHOCO": {"mode": {"gamma": 0.8, "tolerance": 0.05}, "compression": _QUANTIZED},
    "push-sum": {"mode": {"exchange": "push-sum", "topology": "exponential"}},
    "push-sum, lost messages": {"mode": {"exchange": "push-sum", "tolerance": 0.05}, "loss": 0.3},
    "ring all-reduce": {"mode": {"exchange": "ring"}},
    "ring all-reduce, by examples": {"mode": {"exchange": "ring"}, "updates": {"weighting": "examples"}},
}


class ObservedModels(LeastSquares):
    """Remembers the model with which each training begins, and the means that are scored.

    Each entry is trained for itself, without sums, so that the bits are the same on each processor.
    """

    def __init__(self) -> None:
        super().__init__(SILOS)
        self._aims = np.random.default_rng(12).random((SILOS, NUM_WEIGHTS))
        self.begun: dict[tuple[int, int], Parameters] = {}
        self.scored: list[Parameters] = []

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        super().begin(tasks)
        self.begun |= {(task.training_round, task.client): self._models[task.version] for task in tasks}

    @override
    def _train(self, task: ClientTask) -> LocalUpdate:
        noise = 0.01 * np.random.default_rng(task.seed).random(NUM_WEIGHTS)
        step = 0.5 * (self._aims[task.client] + noise - self._models[task.version]["weight"])
        update = Parameters.from_arrays({"weight": step.astype(np.float32)})
        return LocalUpdate(update, float(self.num_examples(task.client)), {"loss": 1.0})

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        self.scored.append(model)
        return super().evaluate(model)


def digest_models(case: str) -> dict[str, object]:
    """Return digests of all models of a job: of those that silos train, of the means, and of the exported one."""
    options = dict(CASES[case])
    loss = options.pop("loss", 0.0)
    spec, engine = silo_spec(SILOS, 4, selection={"min_fraction": 0.5}, **options), ObservedModels()
    fleet = build_fleet(FleetOptions(num_clients=SILOS), 2)
    links = LinkOptions(loss=loss)
    result = run(Simulation(spec=spec, fleet=fleet, engine=engine, initial=initial(), seed=7, links=links))
    assert result.status == "COMPLETED", result.reason
    assert result.model is not None
    trained = [engine.begun[key] for key in sorted(engine.begun)]
    return {
        "rounds": len(result.rounds),
        "trained": _digest(trained),
        "means": _digest(engine.scored),
        "exported": _digest([result.model]),
    }


def _digest(models: Sequence[Parameters]) -> str:
    digest = sha256()
    for model in models:
        digest.update(model.buffer.tobytes())
    return f"{len(models)} {digest.hexdigest()[:32]}"


if __name__ == "__main__":
    found = {case: digest_models(case) for case in CASES}
    if "--write" in sys.argv[1:]:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(json.dumps(found, indent=1))
