"""Silos of decentralised jobs with the SDK that people run, against a daemon in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedplat.model import Parameters, Vector
from fedplat_client import Client, ClientOptions, Task, TrainResult
from support.daemons import Site, until
from support.jobs import FAR_S, write_job
from support.ports import free_port
from support.raw_client import digest_of

Change = Callable[[Task, int], None]


def gossip_job(goal: int, rounds: int, mode: str = "", *, weighting: str = "uniform", more: str = "", **_: Any) -> str:
    """A job of silos with the trainer of these clients; `mode` has further lines of the table."""
    return write_job(
        "gossip",
        rounds=rounds,
        selection={"goal": goal, "over_selection": 1.3, "min_fraction": 0.6},
        deadlines={"training_s": FAR_S, "upload_s": FAR_S},
        more=f'[mode]\nkind = "gossip"\n{mode}\n[updates]\nweighting = "{weighting}"\n{more}',
    )


def add_number(task: Task, number: int) -> None:
    """What a silo learns: its number, in all entries; and the round, in the first."""
    for array in task.parameters.values():
        array += np.asarray(number, array.dtype)
    task.parameters["bias"][0] += task.round


@dataclasses.dataclass
class SiloClient:
    """One silo: its number is its data, and its number of examples."""

    number: int
    data_dir: Path
    ticket: str
    options: ClientOptions
    change: Change = add_number
    trained: list[tuple[int, Vector]] = dataclasses.field(default_factory=list[tuple[int, Vector]])

    def make(self) -> Client:
        client = Client.from_ticket(self.ticket, data_dir=self.data_dir, options=self.options)

        def train(task: Task) -> TrainResult:
            self.change(task, self.number)
            self.trained.append((task.round, task.parameters.to_vector()))
            return TrainResult(parameters=task.parameters, num_examples=self.number, metrics={"loss": self.number})

        client.add_trainer("toy", train)
        return client

    @property
    def client_id(self) -> str:
        (path,) = self.data_dir.glob("*/*/identity.json")
        return json.loads(path.read_text())["client_id"]

    def export_path(self, job: str) -> Path:
        return self.data_dir / "exports" / f"{job}.safetensors"

    def exported(self, job: str) -> bytes:
        return self.export_path(job).read_bytes()

    def model(self, job: str) -> Parameters:
        return Parameters.from_bytes(self.exported(job))


async def make_silos(site: Site, folder: Path, count: int, ports: Sequence[bool], **options: Any) -> list[SiloClient]:
    """Silos with numbers from 1; those of `ports` open one, the others use the server's relay."""
    silos: list[SiloClient] = []
    for number in range(1, count + 1):
        ticket = msgspec.structs.replace(await site.operator.ticket(), server=site.address)
        way: dict[str, Any] = (
            {"peer_listen": f"127.0.0.1:{free_port()}"} if ports[number - 1] else {"exchange_models": True}
        )
        given: dict[str, Any] = {"first_backoff_s": 0.05, "max_backoff_s": 0.5, **way, **options}
        made = ClientOptions(**given)
        silos.append(SiloClient(number, folder / f"silo-{number}", ticket.to_text(), made))
    return silos


async def finish(site: Site, job: str, silos: Sequence[SiloClient]) -> Parameters:
    """Waits until the job is completed and all silos have its model; returns the model, the same of all."""
    await site.operator.until(job, "job", "COMPLETED")

    async def exported() -> bool:
        return all(silo.export_path(job).exists() for silo in silos)

    await until(exported, "a model at each silo")
    assert len({silo.exported(job) for silo in silos}) == 1
    _, mean = await site.operator.versions(job)
    assert digest_of(silos[0].exported(job)) == mean.model.digest
    return silos[0].model(job)


@contextlib.asynccontextmanager
async def running(silos: Sequence[SiloClient]) -> AsyncGenerator[None]:
    """The silos run, each in a thread, until the end of the block."""
    clients = [silo.make() for silo in silos]
    tasks = [asyncio.create_task(asyncio.to_thread(client.run)) for client in clients]
    try:
        yield
    finally:
        for client in clients:
            client.stop()
        await asyncio.gather(*tasks)
