"""Warm starts: the server trains before round 1, on the pool's ranks or on one of its own."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from fedplat import step_profile
from fedplat.aggregate.drift import with_control
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import Site, initial_model, until, update_of
from support.jobs import job_file
from support.pool import pool
from support.server_trainers import learning, trainers

pytest.importorskip("torch")
ONCE = "[retry]\nbase_s = 0.01\nmax_s = 0.01\nmax_attempts = 1\n"
RANKS = "[pool]\nranks = 2\n"
LONG_STEP = job_file("interrupted", goal=1, more=RANKS + learning("server_step", steps=300))


async def warmed(site: Site, name: str, more: str = "", **options: object) -> str:
    """The digest of the version that a warm start makes of the initial model."""
    job = await site.operator.start(job_file(name, more=RANKS + learning("warm_start", **options) + more))
    return await warm_version(site, job)


async def warm_version(site: Site, job: str) -> str:
    """The digest of version 1; the job is cancelled before it needs clients."""
    await site.operator.until(job, "attempt", "COMMITTED")
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    return (await site.operator.versions(job))[1].model.digest


async def failure(site: Site, trainer: str, more: str = "", **options: object) -> str:
    """Why a job failed."""
    table = learning("warm_start", trainer, **options)
    job = await site.operator.start(job_file(trainer, more=table + ONCE + more))
    return (await site.operator.until(job, "job", "FAILED")).reason


async def rounds_after(site: Site) -> None:
    """A whole job: a warm start, two rounds, and scores by the trainer."""
    more = RANKS + learning("warm_start", epochs=20, profile=True) + '[evaluation]\nserver = "public"\n'
    job = await site.operator.start(job_file("whole", rounds=2, goal=1, more=more))
    client = await site.enroll()
    for number in range(2):
        assignment = await client.assignment()
        assert assignment.model.version == number + 1
        await client.deliver(assignment.token, update_of(initial_model(), number))
    events = await site.operator.events(job)
    attempts = [(e.round, e.kind, e.to_state) for e in events if e.entity == "attempt" and e.round == 0]
    kind = admin_pb2.ATTEMPT_KIND_WARM_START
    assert attempts == [(0, kind, "COMMITTING"), (0, kind, "COMMITTED")]
    first, *others = await site.operator.rounds(job)
    assert (first.kind, first.assigned, first.reported) == (kind, 0, 0)
    assert first.client_metrics["loss"] < first.client_metrics["first_loss"]
    summary = json.loads((site.folder / "traces" / job / "warm_start" / "bottleneck.json").read_text())
    assert step_profile.describe(first.client_metrics) == summary["text"]
    assert [(one.round, sorted(one.server_metrics)) for one in (first, *others)] == [
        (number, ["accuracy", "loss"]) for number in range(3)
    ]
    versions = await site.operator.versions(job)
    assert [(one.round, one.num_updates) for one in versions] == [(0, 0), (0, 0), (1, 1), (2, 1)]


async def checkpointed(site: Site, job: str) -> None:
    folder = site.folder / "warm_start" / job

    async def is_there() -> bool:
        return any(folder.glob("step-*"))

    await until(is_there, "a checkpoint")


async def stopped_by_an_operator(site: Site) -> None:
    """A pause stops the work, which later continues from its checkpoint; a cancellation ends it permanently."""
    table = learning("warm_start", epochs=1_000_000, checkpoint_every=5)
    job = await site.operator.start(job_file("long", more=RANKS + table))
    await checkpointed(site, job)
    paused = await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
    assert (paused.status, paused.current.phase) == (admin_pb2.JOB_STATUS_PAUSED, admin_pb2.ATTEMPT_PHASE_ABANDONED)
    assert await warmed(site, "meanwhile"), "the ranks are free"
    await checkpointed(site, job)
    await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    assert (await site.operator.show(job)).model.version == 0
    assert await warmed(site, "afterwards"), "the ranks are free"


async def failures(site: Site) -> None:
    """Whatever goes wrong in a trainer, the daemon reports it in one line."""
    said = await failure(site, "absent")
    assert said.startswith("the warm start failed 1 time; last failure: the trainer cannot be used on rank 0: ")
    assert said.endswith("FileNotFoundError: public.bin is not here")
    assert "expected fedplat.pytorch.server.ServerTrainer" in await failure(site, "none")
    assert "weight" in await failure(site, "other")
    assert "lower learning_rate" in await failure(site, "explodes")
    assert "RuntimeError: no luck today" in await failure(site, "raises")
    pinned = f'tokenizer_sha256 = "{"0" * 64}"'
    assert f"config.{pinned}: the trainer here does not name" in await failure(site, "public", f"[config]\n{pinned}\n")


async def stepped(site: Site, more: str = "", initial: Parameters | None = None, **options: object) -> list[Parameters]:
    """The versions of a job of two rounds with a server step in the second."""
    table = learning("server_step", every=2, **options)
    job = await site.operator.start(job_file("stepped", rounds=2, goal=2, more=RANKS + table + more), initial)
    model = initial or initial_model()
    clients = await site.fleet(2)
    for round_ in range(2):
        for number, assignment in enumerate(await site.assign(clients)):  # accepted in this order, each time
            await clients[number].deliver(assignment.token, update_of(model, 2 * round_ + number))
    await site.operator.until(job, "job", "COMPLETED")
    return [await site.operator.model(job, version) for version in range(3)]


async def server_steps(site: Site) -> None:
    """Server steps change what the trainer sees of the model, after some rounds, and always to the same bits."""
    bare = await stepped(site, steps=1, learning_rate=1e-30)
    taught = await stepped(site, steps=5)
    assert taught[1] == bare[1], "round 1 must not have a server step"
    assert taught[2] != bare[2]
    assert taught[2] == (await stepped(site, steps=5))[2]
    private = '[updates]\nweighting = "uniform"\n'
    scaffold = '[aggregation]\nrule = "scaffold"\nnum_clients = 2\n[config]\nalgorithm = "scaffold"\n' + private
    model = with_control(initial_model())
    bare, taught = [await stepped(site, scaffold, model, steps=5, learning_rate=rate) for rate in (1e-30, 0.1)]
    changed = [name for name in model if not np.array_equal(bare[2][name], taught[2][name])]
    assert changed == ["weight", "bias"], "the control variates must not change"


async def interrupted(folder: Path, registered: dict[str, str], digest: str) -> None:
    """A daemon that ends within a server step leaves no half-done version; the next daemon gets the same bits."""
    async with daemons.running(folder, trainers=registered, grace_s=0.0) as site:
        job = await site.operator.start(LONG_STEP)
        (assignment,) = await site.assign(clients := await site.fleet(1))
        await clients[0].deliver(assignment.token, update_of(initial_model(), 0))
        await site.operator.until(job, "attempt", "COMMITTING")
    async with daemons.running(folder, trainers=registered) as site:
        assert (await site.operator.show(job)).model.version == 0
        await site.operator.until(job, "job", "COMPLETED")
        assert (await site.operator.show(job)).model.digest == digest


async def distillation(site: Site) -> None:
    """The model comes closer to the mean output of its clients' models."""
    bare = await stepped(site, steps=1, learning_rate=1e-30, method="distill")
    taught = await stepped(site, steps=40, method="distill")
    assert taught[1] == bare[1]
    teachers = [bare[1].plus(update_of(initial_model(), 2 + number).to_vector()) for number in range(2)]
    inputs = np.random.default_rng(0).normal(size=(64, 3))
    said = np.mean([logits(teacher, inputs) for teacher in teachers], axis=0)
    before, after = (divergence(said, logits(model, inputs)) for model in (bare[2], taught[2]))
    # The mean of linear models is the linear model of the means, so there is almost nothing to learn.
    assert after <= before + 1e-6 < 1e-5


def logits(model: Parameters, inputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return inputs @ model["weight"].T + model["bias"]


def divergence(teacher: npt.NDArray[np.float64], student: npt.NDArray[np.float64]) -> float:
    p, q = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (teacher, student))
    return float(np.mean(np.sum(p * np.log(p / q), axis=1)))


@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.calm
async def test_on_the_pool_and_on_a_rank_of_the_daemons_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # bits are compared, so the hardware has to be the same
    registered = trainers(folder)
    table = RANKS + learning("warm_start", epochs=20, checkpoint_every=3)
    async with contextlib.AsyncExitStack() as stack:
        ranks = stack.enter_context(pool(folder, 2))
        await ranks.ready()
        async with daemons.running(folder, trainers=registered) as site:
            assert list((await site.status()).trainers) == sorted(registered)
            undisturbed = await warmed(site, "undisturbed", epochs=20)
            assert await warmed(site, "large", trainer="too_large", epochs=20) == undisturbed, "on the CPU"
            await stopped_by_an_operator(site)
            alone = job_file("fewer", more="[pool]\nranks = 1\n" + learning("warm_start", epochs=20))
            fewer = await warm_version(site, await site.operator.start(alone))
            assert fewer != undisturbed, "one rank of the two had nothing to do"
            await rounds_after(site)
            await server_steps(site)
            job = await site.operator.start(job_file("restarted", more=table))
            await checkpointed(site, job)
        async with daemons.running(folder, trainers=registered) as site:
            assert await warm_version(site, job) == undisturbed
            job = await site.operator.start(LONG_STEP)
            (assignment,) = await site.assign(clients := await site.fleet(1))
            await clients[0].deliver(assignment.token, update_of(initial_model(), 0))
            await site.operator.until(job, "job", "COMPLETED")
            digest = (await site.operator.show(job)).model.digest
        await interrupted(folder, registered, digest)
        ranks.stop()
        async with daemons.running(folder, trainers=registered) as site:
            assert await warmed(site, "alone", trainer="killed", epochs=20, checkpoint_every=3) == undisturbed
            assert (folder / "died").exists()
            await distillation(site)
            await failures(site)
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert (report.findings, report.notes) == ([], [])


@pytest.mark.calm
async def test_a_job_whose_trainer_is_not_there_is_refused(folder: Path) -> None:
    async with daemons.running(folder, trainers={"public": "trainers.py:public"}) as site:
        for table, options in (("warm_start", {}), ("server_step", {"steps": 1})):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await site.operator.create(job_file(more=learning(table, "private", **options)))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            said = f"{table}.trainer = 'private'; it has public. Start it with --trainer private=module:object"
            assert said in (caught.value.details() or "")
