"""A pool that computes nothing, for the tests of what is done with outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fedplat.sweep import runner
from fedplat.sweep.worker import OUTCOME, PartRequest
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.sweeps import FakePool, outcome


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePool:
    """Configuration n gains n hundredths per round, in the folder `out`."""

    def write(request: PartRequest) -> None:
        folder = tmp_path / "out/runs" / request.folder
        folder.mkdir(parents=True, exist_ok=True)
        number, seed = re.findall(r"\d+", request.folder)
        values = [0.01 * int(number) * each + 0.001 * int(seed) for each in range(1, 7)]
        values = values[: request.until] if request.until else values
        (folder / OUTCOME).write_bytes(msgspec.json.encode(outcome(values, request.until)))

    made = FakePool(write)

    def open_pool(*arguments: object) -> FakePool:
        return made

    monkeypatch.setattr(runner, "_open_pool", open_pool)
    return made


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[FakeServer]:
    with FakeServer(state) as running:
        yield running
