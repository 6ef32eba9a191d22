"""Jobs with `[pool.parallel]`: the ranks of a real pool divide the model, and die now and then."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_server.verify.checker import verify
from support import daemons
from support.daemons import Site, until, update_of
from support.jobs import job_file
from support.pool import pool
from support.server_trainers import learning

pytest.importorskip("torch")
TRAINERS = """
import os, signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.pytorch.parallel import ParallelPlan
from fedplat.pytorch.server import ServerTrainer

HERE = Path(__file__).parent
inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.argmax(1) % 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)])

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return values

def fragile(outputs, targets):
    '''Kills the process of rank 1 after the first checkpoint, once for each mode.'''
    died = HERE / "died"
    if os.environ.get("RANK") == "1" and not died.exists() and any(HERE.glob("warm_start/*/step-*[0-9]")):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)

plan = ParallelPlan(tensor={"layers.0": "colwise", "layers.2": "rowwise"}, stages=("layers.*",))
public = ServerTrainer(model=Net, data=data, evaluation=data, plan=plan)
killed = ServerTrainer(model=Net, data=data, plan=plan, loss=fragile)
unplanned = ServerTrainer(model=Net, data=data)
"""
LAYOUTS = ("shard = 2", "pipeline = 2", "tensor = 2")


def ranks_in(layout: str) -> str:
    return f"[pool]\nranks = 2\n[pool.parallel]\n{layout}\n"


def initial() -> Parameters:
    rng = np.random.default_rng(1)
    shapes = {"layers.0.weight": (8, 6), "layers.0.bias": (8,), "layers.2.weight": (2, 8), "layers.2.bias": (2,)}
    return Parameters.from_arrays({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


async def warmed(site: Site, layout: str, trainer: str = "public") -> Parameters:
    """The version that a warm start makes of the initial model; the job is cancelled before it needs clients."""
    table = learning("warm_start", trainer, epochs=6, checkpoint_every=3, momentum=0.9, max_grad_norm=1.0)
    name = f"{trainer}-{layout.partition(' ')[0]}"
    job = await site.operator.start(job_file(name, more=ranks_in(layout) + table), initial())
    await site.operator.until(job, "attempt", "COMMITTED")
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    return await site.operator.model(job, 1)


async def rounds(site: Site, layout: str) -> Parameters:
    """A whole job: a round with a server step, and scores by the trainer."""
    more = ranks_in(layout) + learning("server_step", steps=3) + '[evaluation]\nserver = "public"\n'
    job = await site.operator.start(job_file("whole", rounds=1, goal=1, more=more), initial())
    client = await site.enroll()
    await client.deliver((await client.assignment()).token, update_of(initial(), 0))
    await site.operator.until(job, "job", "COMPLETED")

    async def is_scored() -> bool:
        (first,) = await site.operator.rounds(job)
        return sorted(first.server_metrics) == ["accuracy", "loss"]

    await until(is_scored, "the scores of version 1")
    return await site.operator.model(job, 1)


async def failure(site: Site, layout: str, trainer: str) -> str:
    """Why a job failed."""
    once = "[retry]\nbase_s = 0.01\nmax_s = 0.01\nmax_attempts = 1\n"
    table = ranks_in(layout) + learning("warm_start", trainer) + once
    job = await site.operator.start(job_file("fails", more=table), initial())
    return (await site.operator.until(job, "job", "FAILED")).reason


def assert_equal(one: Parameters, other: Parameters, layout: str) -> None:
    if layout != "tensor = 2":
        assert one == other
    np.testing.assert_allclose(one.to_vector(), other.to_vector(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.calm
async def test_a_pool_divides_the_model_and_survives_the_death_of_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # bits are compared, so the hardware has to be the same
    path = folder / "trainers.py"
    path.write_text(TRAINERS)
    registered = {name: f"{path}:{name}" for name in ("public", "killed", "unplanned")}
    with pool(folder, 2) as ranks:
        await ranks.ready()
        async with daemons.running(folder, trainers=registered) as site:
            together = {layout: await warmed(site, layout) for layout in LAYOUTS}
            stepped = {layout: await rounds(site, layout) for layout in LAYOUTS}
            said = await failure(site, "pipeline = 2", "unplanned")
            assert "the plan of Net has 0 parts in its stages; 2 stages need at least as many" in said
            for layout in LAYOUTS:
                assert_equal(await warmed(site, layout, "killed"), together[layout], layout)
                (folder / "died").unlink()
    async with daemons.running(folder, trainers=registered) as site:
        for layout in LAYOUTS:
            assert together[layout] != initial()
            assert_equal(await warmed(site, layout), together[layout], layout)
            assert_equal(await rounds(site, layout), stepped[layout], layout)
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert (report.findings, report.notes) == ([], [])


@pytest.mark.calm
async def test_a_layout_for_another_number_of_ranks_is_refused(folder: Path) -> None:
    async with daemons.running(folder) as site:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.operator.create(job_file(more="[pool]\nranks = 3\n[pool.parallel]\nshard = 2\n"))
        assert "1 data × 2 shard × 1 tensor × 1 pipeline = 2; expected ranks = 2" in (caught.value.details() or "")
