"""Decentralised jobs with the clients that people run: what they compute, how they reach each other, what they keep."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fedplat.gossip.topology import Gossip, draw_edges
from fedplat_client import Task
from support import mtls, silo_clients
from support.daemons import Site, initial_model
from support.silo_clients import SiloClient, gossip_job, make_silos

Matrix = npt.NDArray[np.float64]
WAYS = {"ports": [True] * 4, "relay": [False] * 4, "both": [True, False, True, False]}


@contextlib.asynccontextmanager
async def open_site(folder: Path) -> AsyncGenerator[Site]:
    async with mtls.running(folder) as place:
        yield place.site


def metropolis(names: list[str], round_number: int, mode: Gossip) -> Matrix:
    """W of a round in which all edges are confirmed: w_ij = 1 / (1 + max(d_i, d_j)) (Xiao and Boyd 2004)."""
    count = len(names)
    links = np.zeros((count, count))
    for a, b in draw_edges(mode, names, round_number):
        links[a, b] = links[b, a] = 1.0
    degrees = links.sum(axis=1)
    weights = links / (1.0 + np.maximum(degrees[:, None], degrees[None, :]))
    return weights + np.diag(1.0 - weights.sum(axis=1))


def steps_of(silos: list[SiloClient], round_number: int) -> Matrix:
    """What the silos learn in a round, by the rule of `add_number`."""
    size = initial_model().to_vector().size
    found = np.tile(np.array([[silo.number] for silo in silos], np.float64), (1, size))
    found[:, initial_model()["weight"].size] += round_number  # the first entry of the bias
    return found


def add_line(task: Task, number: int) -> None:
    """No two entries change by the same, so that the largest ones are certain."""
    vector = task.parameters.to_vector() + number * (1.0 + np.arange(8, dtype=np.float32))
    for run, array in zip(((0, 6), (6, 8)), task.parameters.values(), strict=True):
        array[...] = vector[slice(*run)].reshape(array.shape)


def by_name(silos: list[SiloClient]) -> list[SiloClient]:
    return sorted(silos, key=lambda silo: silo.client_id)


pytestmark = pytest.mark.slow  # `tests/client/silos` has fast tests of the same silos


@pytest.mark.parametrize("way", WAYS)
async def test_silos_mix_the_models_of_their_neighbours(folder: Path, tmp_path: Path, way: str) -> None:
    mode = Gossip(topology="ring", tolerance=1.0)
    async with open_site(folder) as site:
        job = await site.operator.start(gossip_job(4, 3, "tolerance = 1.0"))
        silos = await make_silos(site, tmp_path, 4, WAYS[way])
        async with silo_clients.running(silos):
            exported = await silo_clients.finish(site, job, silos)
    ordered = by_name(silos)
    models: Matrix = np.tile(initial_model().to_vector().astype(np.float64), (4, 1))
    for number in range(1, 4):
        models += steps_of(ordered, number)
        for silo, model in zip(ordered, models, strict=True):
            np.testing.assert_allclose(silo.trained[number - 1][1], model, rtol=1e-6)
        models = metropolis([silo.client_id for silo in ordered], number, mode) @ models
    np.testing.assert_allclose(exported.to_vector(), models.mean(axis=0), rtol=1e-5)
    assert [len(silo.trained) for silo in silos] == [3] * 4


async def test_with_push_sum_the_sums_of_all_silos_stay(folder: Path, tmp_path: Path) -> None:
    mode = Gossip(topology="one-peer-exponential", exchange="push-sum", tolerance=1.0)
    lines = 'topology = "one-peer-exponential"\nexchange = "push-sum"\ntolerance = 1.0'
    async with open_site(folder) as site:
        job = await site.operator.start(gossip_job(4, 3, lines))
        silos = await make_silos(site, tmp_path, 4, WAYS["both"])
        async with silo_clients.running(silos):
            exported = await silo_clients.finish(site, job, silos)
    ordered = by_name(silos)
    names = [silo.client_id for silo in ordered]
    sums: Matrix = np.tile(initial_model().to_vector().astype(np.float64), (4, 1))
    weights = np.ones((4, 1))
    for number in range(1, 4):
        sums += steps_of(ordered, number)
        for silo, model in zip(ordered, sums / weights, strict=True):
            np.testing.assert_allclose(silo.trained[number - 1][1], model, rtol=1e-6)
        links = np.eye(4)
        for sender, receiver in draw_edges(mode, names, number):
            links[receiver, sender] = 1.0
        links /= links.sum(axis=0)
        sums, weights = links @ sums, links @ weights
    np.testing.assert_allclose(exported.to_vector(), (sums / weights).mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("way", ["ports", "relay"])
async def test_with_a_codec_neighbours_follow_public_copies(folder: Path, tmp_path: Path, way: str) -> None:
    """CHOCO (Koloskova et al. 2019, Algorithm 2) with the 2 largest entries of 8."""
    gamma, num_kept = 0.5, 2
    mode = Gossip(topology="ring", tolerance=1.0, gamma=gamma)
    codec = f'[compression.uplink]\ncodec = "topk"\nfraction = {num_kept / 8}\nvalues = "fp32"\n'
    async with open_site(folder) as site:
        job = await site.operator.start(gossip_job(4, 4, f"tolerance = 1.0\ngamma = {gamma}", more=codec))
        silos = await make_silos(site, tmp_path, 4, WAYS[way])
        for silo in silos:
            silo.change = add_line
        async with silo_clients.running(silos):
            exported = await silo_clients.finish(site, job, silos)
    ordered = by_name(silos)
    names = [silo.client_id for silo in ordered]
    models: Matrix = np.tile(initial_model().to_vector().astype(np.float64), (4, 1))
    copies = models.copy()
    for number in range(1, 5):
        models += np.array([[silo.number] for silo in ordered]) * (1.0 + np.arange(8))
        for silo, model in zip(ordered, models, strict=True):
            np.testing.assert_allclose(silo.trained[number - 1][1], model, rtol=1e-5)
        away = models - copies
        for each in away:
            each[np.argsort(-np.abs(each), kind="stable")[num_kept:]] = 0.0
        copies += away
        models += gamma * (metropolis(names, number, mode) @ copies - copies)
    np.testing.assert_allclose(exported.to_vector(), models.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
async def test_a_ring_gives_all_silos_the_weighted_mean(folder: Path, tmp_path: Path, way: str) -> None:
    async with open_site(folder) as site:
        job = await site.operator.start(gossip_job(4, 3, 'exchange = "ring"', weighting="examples"))
        silos = await make_silos(site, tmp_path, 4, WAYS[way])
        async with silo_clients.running(silos):
            exported = await silo_clients.finish(site, job, silos)
    ordered = by_name(silos)
    shares = np.array([silo.number for silo in ordered]) / 10.0
    mean = initial_model().to_vector().astype(np.float64)
    for number in range(1, 4):
        models = mean + steps_of(ordered, number)
        for silo, model in zip(ordered, models, strict=True):
            np.testing.assert_allclose(silo.trained[number - 1][1], model, atol=1e-6)
        mean = shares @ models
    np.testing.assert_allclose(exported.to_vector(), mean, atol=1e-6)
