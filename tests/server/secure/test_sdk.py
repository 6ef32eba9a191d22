"""Rounds with secure aggregation with the clients that people run: a daemon and the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat_client import Client, ClientOptions, Task, TrainResult
from support.daemons import Site, initial_model
from support.jobs import FAR_S, write_job
from support.secure_clients import secure_job

NUMBERS = (1, 1, 2, 3, 4)


def make_client(ticket: str, folder: Path, number: int, options: ClientOptions) -> Client:
    client = Client.from_ticket(ticket, data_dir=folder, options=options)

    def train(task: Task) -> TrainResult:
        task.parameters["bias"] += np.float32(number)
        return TrainResult(parameters=task.parameters, num_examples=number, metrics={"loss": float(number)})

    client.add_trainer("toy", train)
    return client


@contextlib.asynccontextmanager
async def running(site: Site, folder: Path, options: ClientOptions) -> AsyncGenerator[None]:
    """A client for each of the numbers, until the end of the block."""
    tickets = [await site.operator.ticket() for _ in NUMBERS]
    texts = [msgspec.structs.replace(ticket, server=site.address).to_text() for ticket in tickets]
    clients = [
        make_client(text, folder / str(place), number, options)
        for place, (text, number) in enumerate(zip(texts, NUMBERS, strict=True))
    ]
    tasks = [asyncio.create_task(asyncio.to_thread(client.run)) for client in clients]
    try:
        yield
    finally:
        for client in clients:
            client.stop()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("confirm", [False, True])
async def test_the_model_of_each_round_is_the_weighted_mean_of_all_clients(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confirm: bool
) -> None:
    """Each client adds its number, with as many examples."""
    monkeypatch.setenv("FEDPLAT_INSECURE", "1")
    job = await site.operator.start(secure_job(goal=len(NUMBERS), rounds=2, confirm=confirm))
    async with running(site, tmp_path, ClientOptions(require_secure_aggregation=True, min_secure_clients=3)):
        await site.operator.until(job, "job", "COMPLETED")
    model, start = await site.operator.model(job), initial_model()
    mean = sum(number * number for number in NUMBERS) / sum(NUMBERS)
    assert model["bias"] == pytest.approx(start["bias"] + 2 * mean, abs=1e-3)
    assert model["weight"] == pytest.approx(start["weight"], abs=1e-3)
    attempts = await site.operator.rounds(job)
    assert len(attempts) == 2


async def test_clients_add_noise_to_their_updates_and_metrics(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of the 3 clients that are enough is that of the job file, so that of 5 is (5/3)^(1/2) times as much."""
    monkeypatch.setenv("FEDPLAT_INSECURE", "1")
    deviation, of_metrics, clip = 0.01, 0.02, 20.0
    text = write_job(
        "private",
        rounds=2,
        selection={"goal": len(NUMBERS), "min_fraction": 0.6, "close": "deadline"},
        deadlines={"training_s": FAR_S, "selection_s": FAR_S, "upload_s": FAR_S},
        retry={"base_s": 0.01, "max_s": 0.01},
        updates={"weighting": "uniform", "clip_norm": clip},
        secure_aggregation={"step_s": FAR_S},
        privacy={"trust": "none", "participation": "fixed", "noise_multiplier": deviation, "delta": 1e-3},
        more=f"[privacy.metrics]\nnoise_multiplier = {of_metrics}\nbounds = {{ loss = [0.0, 4.0] }}\n",
    )
    job = await site.operator.start(text)
    own_floor = 1.0 / math.hypot(1.0 / deviation, 1.0 / of_metrics)  # of the model and the metrics together
    async with running(site, tmp_path, ClientOptions(min_local_noise_multiplier=0.999 * own_floor)):
        await site.operator.until(job, "job", "COMPLETED")
    model, start = await site.operator.model(job), initial_model()
    spread = 6.0 * math.sqrt(2.0) * deviation * clip * math.sqrt(5 / 3) / len(NUMBERS)
    assert model["bias"] == pytest.approx(start["bias"] + 2 * sum(NUMBERS) / len(NUMBERS), abs=spread)
    assert model["weight"] == pytest.approx(start["weight"], abs=spread)
    assert (model["weight"] != start["weight"]).all()  # it has noise
    shown = (await site.operator.show(job)).current
    half_range, loss = 2.0, sum(NUMBERS) / len(NUMBERS)
    spread = 6.0 * of_metrics * math.sqrt(5 / 3) / len(NUMBERS) * half_range
    assert shown.client_metrics["loss"] == pytest.approx(loss, abs=spread)
