"""Silos of decentralised jobs: real clients in threads, with and without ports, and a daemon with certificates."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.gossip import draw_edges, metropolis, push_sum
from fedplat.gossip.messages import CommitRow
from fedplat.job import parse_job
from fedplat.model import Parameters, Vector
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.gossip.silos import SiloModels
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client._state.silo_store import SiloState
from support import databases, mtls, processes
from support.jobs import FAR_S, write_job

PATIENCE_S = processes.PATIENCE_S
free_port = processes.free_port
Floats = npt.NDArray[np.float64]
Change = Callable[["Silo", Task], object]


def initial_model(size: int = 40) -> Parameters:
    """A model with a counter, which silos do not average."""
    rng = np.random.default_rng(7)
    weight = rng.standard_normal(size).astype(np.float32)
    return Parameters.from_arrays({"weight": weight, "steps": np.array([3], np.int64)})


def gossip_job(
    goal: int, rounds: int = 2, mode: str = "", *, min_fraction: float = 0.6, more: str = "", **deadlines: float
) -> str:
    selection = {"goal": goal, "over_selection": 1.3, "min_fraction": min_fraction}
    times = {"training_s": FAR_S, "upload_s": FAR_S, "heartbeat_s": 60.0, **deadlines}
    tables = f'[mode]\nkind = "gossip"\ntolerance = 1.0\n{mode}\n[updates]\nweighting = "uniform"\n{more}\n'
    return write_job("gossip", rounds=rounds, selection=selection, deadlines=times, more=tables)


def move(number: int, model: Parameters) -> None:
    """Moves a model towards one of the silo's own, by its number."""
    weight = model["weight"]
    weight += np.float32(0.5) * (np.float32(number) + np.cos(np.arange(weight.size, dtype=np.float32)) - weight)
    model["steps"] += number


def pull(silo: Silo, task: Task) -> None:
    """A training."""
    move(silo.number, task.parameters)


@dataclasses.dataclass
class Silo:
    """A client; `models` are those with which its trainings began, by round."""

    number: int
    ticket: str
    options: ClientOptions
    folder: Path
    change: Change = pull
    models: dict[int, Vector] = dataclasses.field(default_factory=dict[int, Vector])
    steps: dict[int, int] = dataclasses.field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.client = self.restarted()

    def restarted(self) -> Client:
        """A client with the same data directory."""
        client = Client.from_ticket(self.ticket, data_dir=self.folder, options=self.options)
        client.add_trainer("toy", self.train)
        return client

    def start(self) -> asyncio.Future[None]:
        """Begins to work in a thread of its own: those of the event loop are few, and the daemon needs them."""
        executor = ThreadPoolExecutor(1, f"silo-{self.number}")
        started = asyncio.get_running_loop().run_in_executor(executor, self.client.run)
        executor.shutdown(wait=False)
        return started

    async def crash(self, task: asyncio.Future[None], error: type[BaseException]) -> None:
        """Waits until the client has ended with an error, and prepares another one."""
        with pytest.raises(error):
            await asyncio.wait_for(task, processes.PATIENCE_S)
        self.client = self.restarted()

    def train(self, task: Task) -> TrainResult:
        self.models[task.round] = task.parameters.to_vector().copy()
        self.steps[task.round] = int(task.parameters["steps"][0])
        self.change(self, task)
        return TrainResult(parameters=task.parameters, num_examples=10.0 + self.number, metrics={"loss": 0.5})

    @property
    def name(self) -> str:
        """Its client id; "" before it has enrolled."""
        for path in self.folder.glob("*/*/identity.json"):
            return str(
                msgspec.json.decode(path.read_bytes()).get("client_id", "")
            )  # keys come first, then the enrolment
        return ""

    def state(self, job: str) -> SiloState:
        (path,) = self.folder.glob(f"*/*/silos/{job}/state.json")
        return msgspec.json.decode(path.read_bytes(), type=SiloState)

    def export(self, job: str) -> bytes:
        return (self.folder / "exports" / f"{job}.safetensors").read_bytes()


@dataclasses.dataclass
class SiloFleet:
    """A daemon, and silos that work for it."""

    place: mtls.Place
    folder: Path
    silos: list[Silo] = dataclasses.field(default_factory=list[Silo])

    @property
    def operator(self) -> Any:
        return self.place.site.operator

    async def add(self, *, listens: bool = True, change: Change = pull, **options: Any) -> Silo:
        """A silo; with a port, unless it reaches others through the server."""
        number = len(self.silos) + 1
        peers: dict[str, Any] = {"exchange_models": True}
        if listens:
            peers = {"peer_listen": f"127.0.0.1:{processes.free_port()}"}
        given: dict[str, Any] = {
            "first_backoff_s": 0.02,
            "max_backoff_s": 0.1,
            "rng": random.Random(number),
            **peers,
            **options,
        }
        ticket = msgspec.structs.replace(await self.operator.ticket(), server=self.place.site.address)
        silo = Silo(number, ticket.to_text(), ClientOptions(**given), self.folder / f"silo-{number}", change)
        self.silos.append(silo)
        return silo

    async def add_all(self, count: int, relayed: Sequence[int] = (), **options: Any) -> None:
        """So many silos, of which those with these numbers have no port."""
        for number in range(1, count + 1):
            await self.add(listens=number not in relayed, **options)

    @contextlib.asynccontextmanager
    async def at_work(self, *silos: Silo) -> AsyncGenerator[None]:
        """All silos, or these, work in threads of their own within the block."""
        chosen = silos or tuple(self.silos)
        tasks = [silo.start() for silo in chosen]
        try:
            yield
        finally:
            for silo in chosen:
                silo.client.stop()
            await asyncio.gather(*tasks)

    async def play(self, text: str, model: Parameters | None = None) -> str:
        """Runs a job to its end; returns its id."""
        async with self.at_work():
            job = await self.operator.start(text, model if model is not None else initial_model())
            await self.operator.until(job, "job", "COMPLETED")
            await self.exported(job)
        return job

    async def exported(self, job: str) -> bytes:
        """Waits until all silos have the mean, the same one that the server knows; returns it."""
        paths = [silo.folder / "exports" / f"{job}.safetensors" for silo in self.silos]
        async with asyncio.timeout(processes.PATIENCE_S):
            while not all(path.exists() for path in paths):
                await asyncio.sleep(0.01)
        (content,) = {path.read_bytes() for path in paths}
        versions = await self.operator.versions(job)
        assert hashlib.sha256(content).hexdigest() == versions[-1].model.digest
        return content


@contextlib.asynccontextmanager
async def running(
    folder: Path, count: int = 0, relayed: Sequence[int] = (), **options: Any
) -> AsyncGenerator[SiloFleet]:
    (folder / "server").mkdir()
    databases.create_sqlite(folder / "server" / "fedplat.sqlite")
    async with mtls.running(folder / "server") as place:
        fleet = SiloFleet(place, folder)
        await fleet.add_all(count, relayed, **options)
        try:
            yield fleet
        finally:
            for silo in fleet.silos:
                silo.client.stop()


class _Puller:
    """The engine of a simulation whose silos train as `pull` does."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._versions: dict[int, Parameters] = {}

    def publish(self, version: int, model: Parameters) -> None:
        self._versions[version] = model

    def retire(self, version: int) -> None:
        del self._versions[version]

    def begin(self, tasks: Sequence[ClientTask]) -> None:
        pass

    def result(self, task: ClientTask) -> LocalUpdate:
        base = self._versions[task.version]
        trained = base.copy()
        move(task.client + 1, trained)
        return LocalUpdate(trained.minus(base), 1.0, {})


def simulate(text: str, names: Sequence[str], model: Parameters) -> Generator[Floats]:
    """Yields the models with which the silos begin each round, and after the last; the simulator mixes them.

    `names` are the ids of the silos, by which their positions in topologies go.
    """
    spec = parse_job(text)
    assert spec.gossip is not None
    models, order = SiloModels(spec, cast(Engine, _Puller(len(names))), model, 0), np.argsort(names)
    make_links = push_sum if spec.gossip.is_directed else metropolis
    for number in range(1, spec.rounds + 1):
        yield models.models()
        everyone = range(models.count)
        models.begin_training(dict.fromkeys(everyone, 1.0), number)
        for silo in everyone:
            models.finish_training(silo)
            models.publish(silo, number)
        edges = draw_edges(spec.gossip, sorted(names), number)
        links = make_links(len(names), edges)
        rows = [links.row(position) for position in everyone]
        for position, (_, weights) in enumerate(rows):
            for sender, _ in weights:
                models.store(int(order[position]), int(order[sender]))
        for position, (own, weights) in enumerate(rows):
            pairs = tuple((str(order[sender]), weight) for sender, weight in weights)
            models.mix(CommitRow(number, str(order[position]), own, pairs))
    yield models.models()
