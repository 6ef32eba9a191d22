"""Fixtures for the tests of the client SDK."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, ClientOptions
from fedplat_client.cancellation import StopSignal
from support.fake_fleet import FakeFleet, serving
from support.secure_cohort import Cohort, MakeCohort, make_setup
from support.secure_fleet import SecureFleet

MakeClient = Callable[..., Client]


@pytest.fixture(autouse=True)
def _insecure(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """The scripted servers of these tests have no TLS."""
    monkeypatch.setenv("FEDPLAT_INSECURE", "1")


@pytest.fixture
def fleet() -> Generator[FakeFleet]:
    with serving(FakeFleet()) as fleet:
        yield fleet


@pytest.fixture
def interruptible() -> Generator[None]:
    """SIGINT works, for child processes too, even where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def base() -> Parameters:
    rng = np.random.default_rng(0)
    return Parameters.from_arrays(
        {
            "weight": rng.standard_normal((40, 50)).astype(np.float32),
            "bias": rng.standard_normal(50).astype(np.float32),
            "steps": np.array(7, np.int64),
        }
    )


@pytest.fixture
def model(fleet: FakeFleet, base: Parameters) -> model_pb2.ModelRef:
    return fleet.add_model(base)


@pytest.fixture
def delays() -> list[float]:
    """The delays that clients of `make_client` asked for; none of them takes any time."""
    return []


@pytest.fixture
def make_client(fleet: FakeFleet, tmp_path: Path, delays: list[float]) -> MakeClient:
    def wait(stop: StopSignal, seconds: float) -> bool:
        delays.append(seconds)
        return stop.is_set()

    def make(
        data_dir: Path = tmp_path / "data", plugins: Mapping[str, type | str] | None = None, **options: object
    ) -> Client:
        given = ClientOptions(**({"rng": random.Random(0), "wait": wait, "inline_limit_bytes": 0} | options))  # type: ignore[arg-type]
        text, labels = fleet.ticket.to_text(), {"region": "eu"}
        return Client.from_ticket(text, labels=labels, data_dir=data_dir, options=given, plugins=plugins)

    return make


@pytest.fixture
def make_cohort(base: Parameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCohort:
    def make(size: int = 4, model: Parameters = base, **options: object) -> Cohort:
        cohort = Cohort(SecureFleet(make_setup(model, **options), size), model, tmp_path, monkeypatch)  # type: ignore[arg-type]
        cohort.assign()
        return cohort

    return make
