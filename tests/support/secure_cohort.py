"""Clients of a secure aggregation, each in a thread, and what they encoded."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedplat.model import Parameters
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.messages import SecureAggregation
from fedplat.secure_aggregation.setup import Encoding, LocalNoise, Setup, digest_task
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client.cancellation import StopSignal
from support.fake_fleet import serving
from support.secure_fleet import SecureFleet

Encoded = npt.NDArray[np.uint32]
Trainer = Callable[[Task], TrainResult]
MakeCohort = Callable[..., "Cohort"]
OptionsOf = Callable[[int], dict[str, Any]]


def make_setup(base: Parameters, *, noise: LocalNoise | None = None, minimum: int = 3, **options: Any) -> Setup:
    """The setup of an attempt with this model; with noise, the metrics are not those of the options."""
    bounds: dict[str, tuple[float, float]] = options.pop("metrics", {"loss": (0.0, 5.0)})
    chosen = SecureAggregation(**options, metrics=bounds if noise is None else {})
    return Setup(
        job_id="job-1",
        round=1,
        attempt=1,
        model_digest=hashlib.sha256(base.to_bytes()).hexdigest(),
        task_digest=digest_task("digits", "digits", {}),
        options=chosen,
        encoding=Encoding(
            size=base.schema.num_floating,
            clip=1.0,
            bits=chosen.bits,
            modulus=chosen.modulus,
            max_examples=100.0,
            max_clients=10,
            metrics=tuple((name, *bounds[name]) for name in sorted(bounds)),
            noise=noise,
        ),
        minimum=minimum,
    )


class Cohort:
    """Clients named by their tokens, with a fake server that listens as long as the test says."""

    def __init__(self, fleet: SecureFleet, base: Parameters, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet = fleet
        self.base = base
        self.folder = folder
        self.delays_s: list[float] = []
        self.encoded: dict[float, Encoded] = {}
        self.clients: dict[int, Client] = {}
        self.is_recording = True
        real = encoding.encode

        def encode(chosen: Encoding, update: Any, num_examples: float, *rest: Any) -> Encoded:
            vector = real(chosen, update, num_examples, *rest)
            if self.is_recording:
                self.encoded[num_examples] = vector.copy()
            return vector

        monkeypatch.setattr(encoding, "encode", encode)

    def assign(self, **fields: Any) -> None:
        """Plan the assignments of all clients, which are equal but for their tokens."""
        model = self.fleet.add_model(self.base)
        for number in range(1, self.fleet.size + 1):
            given = {"token": f"token-{number}", "round": 1, "secure_setup": self.fleet.setup.to_bytes()}
            self.fleet.assign(model, **(given | fields))

    def client(self, number: int, trainer: Trainer | None = None, **options: Any) -> Client:
        """A client whose number is its number of examples, too, from which a test knows its vector."""

        def wait(stop: StopSignal, seconds: float) -> bool:
            self.delays_s.append(seconds)
            return stop.is_set()

        def train(task: Task) -> TrainResult:
            task.parameters["weight"] += np.float32(number) / 1000
            return TrainResult(parameters=task.parameters, num_examples=number, metrics={"loss": 0.5, "x": 9.0})

        given: dict[str, Any] = {"rng": random.Random(number), "wait": wait, "inline_limit_bytes": 0} | options
        client = Client.from_ticket(
            self.fleet.ticket.to_text(),
            labels={"number": str(number)},
            data_dir=self.folder / f"data-{number}",
            options=ClientOptions(**given),
        )
        client.add_trainer("digits", trainer or train)
        self.clients[number] = client
        return client

    @contextlib.contextmanager
    def running(
        self, numbers: Iterable[int] | None = None, *, options_of: OptionsOf = lambda number: {}
    ) -> Generator[None]:
        """Clients, all unless told, run one assignment in a thread; at the end they are waited for."""
        chosen = range(1, self.fleet.size + 1) if numbers is None else numbers
        clients = [self.client(number, **options_of(number)) for number in chosen]
        with ThreadPoolExecutor(len(clients)) as pool:
            running = [pool.submit(client.run, 1) for client in clients]
            try:
                yield
                for each in running:
                    each.result(timeout=60)
            finally:
                for client in clients:
                    client.stop()

    def run(self, *, options_of: OptionsOf = lambda number: {}) -> None:
        """All clients run one assignment."""
        with serving(self.fleet), self.running(options_of=options_of):
            pass

    def check_sum(self, folder: Path) -> list[str]:
        """Check that the sum without masks is that of the survivors' vectors, bit for bit; return their tokens."""
        total, tokens = self.fleet.unmask(folder)
        vectors = [self.encoded[int(token.removeprefix("token-"))] for token in tokens]
        mask = np.uint32(2**self.fleet.setup.options.modulus - 1)
        np.testing.assert_array_equal(total & mask, np.sum(vectors, axis=0, dtype=np.uint32) & mask)
        return tokens

    @property
    def failures(self) -> list[fleet_pb2.FailRequest]:
        return self.fleet.requests["Fail"]
