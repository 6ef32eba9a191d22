"""Run federated averaging in fedplat's simulation, for `simulation_peers.py`: driver, coordinator and an engine.

python simulated_fedplat.py ENGINE MODEL CLIENTS COHORT SAMPLES ROUNDS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from fedplat.config.toml import read_record
from fedplat.job import JobSpec
from fedplat.pytorch import models
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines import interface
from fedplat.simulation.engines.client_trainer import ClientTraining, VmapEngine
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from fedplat.simulation.engines.ray import RayEngine
from fedplat.simulation.run import Hooks, Simulation, run

ENGINES = {"loop": LoopEngine, "processes": ProcessEngine, "ray": RayEngine, "vmap": VmapEngine}
MODELS = {
    "LR": models.logistic_regression,
    "2NN": models.mcmahan_2nn,
    "LeNet": models.lenet5,
    "CIFAR": models.cifar_cnn,
}
CONFIG: dict[str, Any] = {"epochs": 1, "batch_size": 10, "learning_rate": 0.01}


def print_event(event: str) -> None:
    """Print the time of an event, as the programs of the other platforms do."""
    print(json.dumps({"event": event, "time": time.time()}), flush=True)


def federation(model: str, clients: int, samples: int) -> Federation:
    """Create the same random images and labels as the other platforms."""
    rng = np.random.default_rng(0)
    count = clients * samples
    image = (3, 32, 32) if model == "CIFAR" else (1, 28, 28)
    inputs, targets = rng.standard_normal((count, *image), dtype=np.float32), rng.integers(0, 10, count)
    return Federation(inputs, targets, np.split(np.arange(count), clients), inputs[:0], targets[:0])


def main(engine: str, model: str, clients: int, cohort: int, samples: int, rounds: int) -> None:
    """Simulate a job to its end."""
    print_event("start")
    interface.keep_freed_memory()
    job: dict[str, Any] = {
        "name": "bench",
        "population": "bench",
        "trainer": "bench",
        "rounds": rounds,
        "model": {"initial": "model.safetensors"},
        "selection": {"goal": cohort, "over_selection": 1.0},
        "config": CONFIG,
    }
    learner = Learner(model=MODELS[model])
    trained = ENGINES[engine](
        ClientTraining(federation(model, clients, samples), learner, LocalOptions.from_config(CONFIG))
    )
    simulation = Simulation(
        spec=read_record(job, JobSpec),
        fleet=build_fleet(FleetOptions(num_clients=clients), 0),
        engine=trained,
        initial=learner.initial(),
    )
    try:
        run(simulation, Hooks(observe=lambda attempt: print_event("round") if attempt.committed else None))
    finally:
        trained.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
