"""Decentralised jobs from end to end: the numbers are those of a few lines of NumPy, whatever way models take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.gossip import Gossip
from fedplat.model import Parameters
from support import silo_fleet
from support.silo_fleet import gossip, gossip_job, initial_model, pulled

WAYS = {"ports": (), "relay": (1, 2, 3, 4), "both": (2, 3)}


@pytest.mark.parametrize("way", WAYS)
async def test_neighbours_mix_their_models(tmp_path: Path, way: str) -> None:
    async with silo_fleet.running(tmp_path, 4, WAYS[way]) as fleet:
        job = await fleet.play(gossip_job(4, rounds=3))
        names = [silo.name for silo in fleet.silos]
        vectors = np.tile(initial_model().to_vector().astype(np.float64), (4, 1))
        for number in (1, 2, 3):
            found = np.stack([silo.models[number] for silo in fleet.silos])
            np.testing.assert_allclose(found, vectors, atol=1e-6)
            vectors = gossip(Gossip(), names, pulled(vectors), number)
        mean = Parameters.from_bytes(await fleet.exported(job))
        np.testing.assert_allclose(mean["weight"], vectors.mean(axis=0), atol=1e-6)
        assert mean["steps"].tolist() == [3]  # the initial model's
        assert [silo.steps[3] for silo in fleet.silos] == [3 + 2 * silo.number for silo in fleet.silos]
