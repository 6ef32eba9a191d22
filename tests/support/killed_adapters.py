"""A job of adapters whose products the server aggregates, for a server that dies in a round of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fedplat.admin import AdminClient
from fedplat.aggregate import Accumulator, Contribution
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_client import Task, TrainResult
from support import deployment, processes
from support.clients import at_work
from support.jobs import write_job

HELD_S = 500.0
Scenario: TypeAlias = tuple[Callable[[], None], Callable[[], None]]
"""What ends the trainings that wait, and then waits for the result and checks it."""

EXACT = write_job(
    "exact",
    population="exact",
    trainer="add",
    rounds=4,
    selection={"goal": 2, "min_fraction": 1.0},
    deadlines={"heartbeat_s": 0.2},
    retry={"base_s": 0.1},
    aggregation={"rule": "fedex_lora", "scaling": 2.0},
)
PRODUCT = "server/q.lora_BA.weight"


def factors() -> Parameters:
    rng = np.random.default_rng(5)
    shapes = {"q.lora_A.weight": (2, 300), "q.lora_B.weight": (200, 2)}
    return Parameters.from_arrays({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def train_factors(parameters: Parameters, round_: int, client: int) -> None:
    """Change both factors as a training of one client might do."""
    for name in factors():
        change = np.random.default_rng([round_, client]).normal(scale=0.1, size=parameters[name].shape)
        parameters[name][:] = 0.9 * parameters[name] + change.astype(np.float32) + 1e-3 * (PRODUCT in parameters)


@contextlib.contextmanager
def exact(server: processes.Server, admin: AdminClient, folder: Path) -> Generator[Scenario]:
    """FedEx-LoRA: one update of the round is stored, and one is not; the products of the factors lose no bit of it."""
    go_on, rule = threading.Event(), parse_job(EXACT).aggregation.build()
    start = rule.requirements.extend(factors())

    def make_trainer(client: int) -> Callable[[Task], TrainResult]:
        def train(task: Task) -> TrainResult:
            if (task.round, client) == (3, 1):
                assert go_on.wait(HELD_S)
            train_factors(task.parameters, task.round, client)
            return TrainResult(parameters=task.parameters, num_examples=1 + 2 * client)

        return train

    def is_stored() -> bool:
        sizes = [each.update_bytes for each in admin.iter_assignments(job=job, round_=3)]
        return sorted(sizes) == [0, factors().schema.file_size_bytes]

    def check() -> None:
        deployment.completed(admin, job)
        assert [(each.round, each.attempt) for each in admin.list_rounds(job, all_attempts=True)] == [
            (number, 1) for number in (1, 2, 3, 4)
        ]
        expected, mean = start, np.zeros((200, 300))
        for number in (1, 2, 3, 4):
            accumulator, mean = Accumulator(start.schema, rule), 0.0 * mean
            for client in (0, 1):
                trained = expected.copy()
                train_factors(trained, number, client)
                accumulator.fold(trained.minus(expected), Contribution(1.0 + 2 * client))
                product = trained["q.lora_B.weight"].astype(float) @ trained["q.lora_A.weight"].astype(float)
                mean += (expected[PRODUCT] + product) * (1 + 2 * client) / 4
            expected, _ = accumulator.finish(expected, {})
        found = deployment.exported(admin, job, folder)
        np.testing.assert_array_equal(found.buffer, expected.buffer)  # the sum of two does not depend on their order
        weight = found[PRODUCT] + found["q.lora_B.weight"].astype(float) @ found["q.lora_A.weight"].astype(float)
        np.testing.assert_allclose(weight, mean, rtol=0, atol=1e-5)

    clients = deployment.clients_of(server, "exact", folder, 2)
    for number, client in enumerate(clients):
        client.add_trainer("add", make_trainer(number))
    with at_work(clients), contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        job = deployment.submit(admin, EXACT, start)
        processes.until(is_stored, "the first update of the third round")
        yield go_on.set, check
