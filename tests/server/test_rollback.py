"""Rollbacks over the real server: the job continues from an older version, and all reports show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.aggregate import state_from_bytes
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination.retention import find_retained_versions
from fedplat_server.verify.inspection import verify
from support import daemons, trees
from support.daemons import Site
from support.jobs import job_file
from support.ledgers import list_releases
from support.rollbacks import ZERO, model_of, play, roll_back, values
from support.trees import CLIP, NOISE, SIZE

MOMENTUM = '[aggregation]\nrule = "fedavgm"\nlearning_rate = 1.0\nmomentum = 0.5\n'


async def findings(folder: Path) -> list[Any]:
    return (await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings


async def test_a_job_whose_model_was_destroyed_goes_on_from_the_initial_one(folder: Path) -> None:
    """The audit's attack 28: after round 1 the model's first entry is 3e20, which no honest update can undo."""
    async with daemons.running(folder) as site:
        job, clients = await site.operator.start(job_file(rounds=3), ZERO), await site.fleet(2)
        await play(site, clients, job, 1, 3e20, 0.0)
        assert (await values(site, job))[0] == pytest.approx(3e20)
        working = await site.assign(clients)  # round 2 is under way
        done = await roll_back(site, job, 0)
        assert (done.rule_state, done.job.model.version, done.job.restored_from) == ("none", 2, 0)
        with pytest.raises(aio.AioRpcError, match="the assignment is no longer open: ATTEMPT_ABANDONED"):
            await clients[0].deliver(working[0].token, model_of(1.0, 1.0))
        for version in (3, 4):
            await play(site, clients, job, version, 1.0, 2.0)
        await site.operator.until(job, "job", "COMPLETED")
        assert await values(site, job) == [2.0, 4.0]
        versions = await site.operator.versions(job)
        assert [one.restored_from if one.HasField("restored_from") else None for one in versions] == [
            None,
            None,
            0,
            None,
            None,
        ]
        told = [event.reason for event in await site.operator.events(job) if event.entity in ("version", "attempt")]
        assert "rolled back to version 0" in told
        assert "the job was rolled back to version 0" in told
        noted = (await site.operator.operators.ListAudit(admin_pb2.ListAuditRequest())).events
        (entry,) = (one for one in noted if one.action == "job rolled back")
        assert entry.subject == job
        assert '"from":1' in entry.details.replace(" ", "")
    assert await findings(folder) == []


@pytest.mark.parametrize(("to", "rule_state", "expected"), [(2, "kept", 2.5 + 1.0 + 0.75), (1, "initial", 1.0 + 1.0)])
async def test_a_momentum_is_kept_for_the_newest_versions(
    folder: Path, to: int, rule_state: str, expected: float
) -> None:
    """Rounds of +1 with a momentum of 0.5 make 1, 2.5, 4.25; the momentum of version 2 is 1.5."""
    async with daemons.running(folder) as site:
        job, clients = await site.operator.start(job_file(rounds=4, more=MOMENTUM), ZERO), await site.fleet(2)
        for version in (1, 2, 3):
            await play(site, clients, job, version, 1.0, 0.0)
        assert (await values(site, job))[0] == 4.25

        async def given_up() -> bool:
            return [one.has_state for one in await site.operator.versions(job)] == [False, False, True, True]

        await daemons.until(given_up, "the oldest state to be given up")
        done = await roll_back(site, job, to)
        assert done.rule_state == rule_state
        await play(site, clients, job, 5, 1.0, 0.0)
        assert (await values(site, job))[0] == expected
    assert await findings(folder) == []


async def test_what_cannot_be_rolled_back_is_refused_in_words(site: Site) -> None:
    job, clients = await site.operator.start(job_file(rounds=1), ZERO), await site.fleet(2)
    for version, status, text in (
        (7, grpc.StatusCode.NOT_FOUND, "there is no such model version: 7; the latest is 0"),
        (0, grpc.StatusCode.FAILED_PRECONDITION, "cannot roll back to version 0: expected an older version"),
    ):
        with pytest.raises(aio.AioRpcError, match=text) as caught:
            await roll_back(site, job, version)
        assert caught.value.code() is status
    await play(site, clients, job, 1, 1.0, 0.0)
    with pytest.raises(aio.AioRpcError, match="cannot roll back a job that is COMPLETED; it has ended for good"):
        await roll_back(site, job, 0)


async def test_a_tree_of_noise_continues_over_a_rollback(folder: Path) -> None:
    """All steps together have the noise of the tree's nodes, each once, as if there were no rollback.

    Nothing is charged for the rollback.
    """
    train, update = trees.train, trees.update
    async with daemons.running(folder) as site:
        job = await train(site, range(1, 3))
        await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
        before = (await site.store.inner.jobs.list_versions(job))[-1].version
        done = await roll_back(site, job, 1)
        assert (done.rule_state, done.job.restored_from) == ("latest", 1)
        latest = (await site.store.inner.jobs.list_versions(job))[-1].version
        assert (latest.state_digest, latest.round) == (before.state_digest, 0)
        assert len(await list_releases(site.store.inner, job)) == 2
        await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
        client = await site.enroll(key="client 1")
        work = await client.assignment()
        await client.deliver(work.token, update(3))
        await site.operator.until(job, "version", "4")
        record = (await site.store.inner.jobs.list_versions(job))[-1].version
        path = folder / "blobs" / record.state_digest[:2] / record.state_digest[2:4] / record.state_digest
        _, scalars = state_from_bytes(path.read_bytes())
        assert scalars["tree step"] == 3.0
        assert len(await list_releases(site.store.inner, job)) == 3
        models = [(await site.operator.model(job, version)).to_vector().astype(float) for version in range(5)]
        assert np.array_equal(models[3], models[1])
        steps = [models[1] - models[0], models[2] - models[1], models[4] - models[3]]
        noise = [step - update(round_).to_vector() for round_, step in enumerate(steps, start=1)]
        deviation = NOISE * CLIP
        # Rounds 1 and 2 are one node, and round 3 is another: the sum of all steps has the noise of two nodes.
        assert np.std(noise[0] + noise[1]) == pytest.approx(deviation, rel=0.05)
        assert np.std(noise[2]) == pytest.approx(deviation, rel=0.05)
        assert np.std(sum(noise)) == pytest.approx(deviation * np.sqrt(2), rel=0.05)
        assert abs(np.corrcoef(noise[2], noise[0])[0, 1]) < 5 / np.sqrt(SIZE)
        assert abs(np.corrcoef(noise[2], noise[1])[0, 1]) < 5 / np.sqrt(SIZE)
        assert find_retained_versions((await site.store.inner.jobs.load_jobs())[0].state).states_from == 4
    assert await findings(folder) == []
