"""Decentralised jobs from end to end: models have the numbers of the simulator, whatever way they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.gossip.mixing import add_parts, find_largest, quantize_share, read_integer_mean
from fedplat.model import Parameters, Vector
from fedplat_client._state import released
from fedplat_client._state.released import Protection, ReleasedLine
from support import silo_fleet
from support.silo_fleet import SiloFleet, gossip_job, initial_model, move, simulate

WAYS = {"ports": (), "relay": (1, 2, 3, 4), "both": (2, 3)}
MODES = {
    "neighbours": "",
    "push-sum": 'exchange = "push-sum"\ntopology = "one-peer-exponential"',
    "bf16": 'gamma = 0.9\n[compression.uplink]\ncodec = "bf16"',
    "topk": 'gamma = 0.3\ntopology = "complete"\n[compression.uplink]\ncodec = "topk"\nfraction = 0.2',
}
RING = 'exchange = "ring"'


def find_bytes(folder: Path, content: bytes) -> list[Path]:
    """The files that contain some bytes."""
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


def check_secrecy(fleet: SiloFleet, models: list[Vector]) -> None:
    """The server has stored no part of these models."""
    for model in models:
        assert find_bytes(fleet.folder / "server", model[:4].tobytes()) == []


def read_records(fleet: SiloFleet, num_silos: int) -> list[list[ReleasedLine]]:
    """What each silo has noted of what has left it."""
    paths = list(fleet.folder.rglob("released.jsonl"))
    assert len(paths) == num_silos
    assert all(not released.verify(path).wrong for path in paths)
    return [list(released.read(path)) for path in paths]


FAST = {("neighbours", "both"), ("push-sum", "relay"), ("topk", "relay"), ("topk", "ports")}
CASES = [
    pytest.param(mode, way, marks=[] if (mode, way) in FAST else [pytest.mark.slow]) for mode in MODES for way in WAYS
]


@pytest.mark.parametrize(("mode", "way"), CASES)
async def test_silos_mix_as_simulated_ones_do(tmp_path: Path, mode: str, way: str) -> None:
    text = gossip_job(4, rounds=2, mode=MODES[mode])
    async with silo_fleet.running(tmp_path, 4, WAYS[way]) as fleet:
        job = await fleet.play(text)
        *expected, last = simulate(text, [silo.name for silo in fleet.silos], initial_model())
        for number, models in enumerate(expected, 1):
            found = np.stack([silo.models[number] for silo in fleet.silos])
            np.testing.assert_allclose(found, models, atol=1e-6)
        mean = Parameters.from_bytes(await fleet.exported(job))
        np.testing.assert_allclose(mean["weight"], last.mean(axis=0), atol=1e-6)
        assert mean["steps"].tolist() == [3]  # the initial model's; each silo keeps its own
        assert [silo.steps[2] for silo in fleet.silos] == [3 + silo.number for silo in fleet.silos]
        check_secrecy(fleet, [silo.models[2] for silo in fleet.silos])
        for lines in read_records(fleet, num_silos=4):
            assert {"announcement", "model"} <= {each.content for each in lines}
            assert all(each.receiver.startswith("c-") for each in lines if each.content == "model")
            assert all(each.digest and each.size_bytes for each in lines if each.content == "model")


def average(models: list[Vector]) -> Vector:
    """The mean as rings compute it."""
    bound, count = max(map(find_largest, models)), len(models)
    return read_integer_mean(add_parts(quantize_share(each, 1 / count, bound, count) for each in models), bound, count)


@pytest.mark.parametrize("way", WAYS)
async def test_rings_average_models(tmp_path: Path, way: str) -> None:
    size, rounds = 5000, 2
    async with silo_fleet.running(tmp_path, 4, WAYS[way]) as fleet:
        job = await fleet.play(gossip_job(4, rounds, RING), initial_model(size))
        mean, trained = initial_model(size).to_vector(), list[Vector]()
        for number in range(1, rounds + 1):
            trained = []
            for silo in fleet.silos:
                np.testing.assert_array_equal(silo.models[number], mean)
                model = Parameters.from_arrays({"weight": mean.copy(), "steps": np.array([0])})
                move(silo.number, model)
                trained.append(model["weight"])
            mean = average(trained)
        np.testing.assert_array_equal(Parameters.from_bytes(await fleet.exported(job))["weight"], mean)
        check_secrecy(fleet, trained)
        for lines in read_records(fleet, num_silos=4):
            rings = [each.protection for each in lines if each.content == "ring"]
            assert rings == [Protection(masked=True, min_clients=4)] * rounds
        if way != "ports":
            return
        expected = rounds * 2 * 3 / 4 * 4 * size
        for silo in fleet.silos:
            assert silo.state(job).num_bytes == pytest.approx((expected, expected), rel=0.01)


@pytest.mark.slow
async def test_many_neighbours_exchange_models_through_the_server(tmp_path: Path) -> None:
    """More than a server has streams for at a time: none of them waits in the way of another one."""
    text = gossip_job(7, rounds=1, mode='topology = "complete"')
    async with silo_fleet.running(tmp_path, 7, range(1, 8)) as fleet:
        job = await fleet.play(text)
        shown = dict((await fleet.operator.rounds(job))[0].client_metrics)
        assert (shown["edges"], shown["confirmed_edges"]) == (21.0, 21.0)
