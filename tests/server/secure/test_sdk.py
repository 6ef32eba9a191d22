"""Rounds with secure aggregation with the clients that people run: a daemon and the SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat_client import Client, ClientOptions, Task, TrainResult
from support.daemons import Site, initial_model
from support.secure_clients import secure_job

NUMBERS = (1, 1, 2, 3, 4)


def make_client(ticket: str, folder: Path, number: int, options: ClientOptions) -> Client:
    client = Client.from_ticket(ticket, data_dir=folder, options=options)

    def train(task: Task) -> TrainResult:
        task.parameters["bias"] += np.float32(number)
        return TrainResult(parameters=task.parameters, num_examples=number)

    client.add_trainer("toy", train)
    return client


@pytest.mark.parametrize("confirm", [False, True])
async def test_the_model_of_each_round_is_the_weighted_mean_of_all_clients(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confirm: bool
) -> None:
    """Each client adds its number, with as many examples."""
    monkeypatch.setenv("FEDPLAT_INSECURE", "1")
    job = await site.operator.start(secure_job(goal=len(NUMBERS), rounds=2, confirm=confirm))
    tickets = [await site.operator.ticket() for _ in NUMBERS]
    texts = [msgspec.structs.replace(ticket, server=site.address).to_text() for ticket in tickets]
    options = ClientOptions(require_secure_aggregation=True, min_secure_clients=3)
    clients = [
        make_client(text, tmp_path / str(place), number, options)
        for place, (text, number) in enumerate(zip(texts, NUMBERS, strict=True))
    ]
    running = [asyncio.create_task(asyncio.to_thread(client.run)) for client in clients]
    try:
        await site.operator.until(job, "job", "COMPLETED")
    finally:
        for client in clients:
            client.stop()
        await asyncio.gather(*running)
    model, start = await site.operator.model(job), initial_model()
    mean = sum(number * number for number in NUMBERS) / sum(NUMBERS)
    assert model["bias"] == pytest.approx(start["bias"] + 2 * mean, abs=1e-3)
    assert model["weight"] == pytest.approx(start["weight"], abs=1e-3)
    attempts = await site.operator.rounds(job)
    assert len(attempts) == 2
