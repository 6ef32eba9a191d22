"""Warm starts of a real pool whose ranks divide the model, or train it without locks, and die now and then."""

from __future__ import annotations

import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import TypeAlias

import grpc
import numpy as np
import pytest
import torch

from fedplat.config import user_code
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.pytorch.distributed import Backend
from fedplat.pytorch.server import TrainingRun, train
from fedplat.wire.v1 import admin_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import Site, until, update_of
from support.jobs import job_file
from support.model_parallel import piped
from support.pool import PoolProcess, pool
from support.ranks import hogwild
from support.ranks.backends import if_on_gpus
from support.server_trainers import learning

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
    '''Kills the process of the last rank after the first checkpoint, once for each mode.'''
    died, last = HERE / "died", int(os.environ.get("WORLD_SIZE", "1")) - 1
    if os.environ.get("RANK") == str(last) and not died.exists() and any(HERE.glob("warm_start/*/step-*[0-9]")):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)

plan = ParallelPlan(tensor={"layers.0": "colwise", "layers.2": "rowwise"}, stages=("layers.*",))
public = ServerTrainer(model=Net, data=data, evaluation=data, plan=plan)
killed = ServerTrainer(model=Net, data=data, plan=plan, loss=fragile)
unplanned = ServerTrainer(model=Net, data=data)
"""
LAYOUTS = ("shard = 2", "pipeline = 2", "tensor = 2")
Options: TypeAlias = dict[str, object]
SGD: Options = {"epochs": 6, "checkpoint_every": 3, "momentum": 0.9, "max_grad_norm": 1.0}
PIPEDREAM = 'pipeline = 2\nschedule = "pipedream"'
OTHERS: dict[str, Options] = {
    "shard = 2": SGD,
    'shard = 2\noffload = "cpu"': SGD,
    'shard = 2\nrecompute = "blocks"': SGD,
    "pipeline = 2": SGD | {"max_grad_norm": 0.0},
    PIPEDREAM: SGD | {"max_grad_norm": 0.0},
}
BF16: Options = SGD | {"precision": "bf16"}
HOGWILD = '[pool]\nranks = 2\nbackend = "gloo"\n' + learning("warm_start", "disjoint", **hogwild.DISJOINT_TABLE)


def ranks_in(layout: str) -> str:
    return f"[pool]\nranks = 2\n[pool.parallel]\n{layout}\n"


def job_of(layout: str, options: Options = SGD, trainer: str = "public") -> str:
    """The file of a job that begins with a warm start in a layout."""
    name = "-".join([trainer, *re.findall(r"\w+", layout)])
    return job_file(name, more=ranks_in(layout) + learning("warm_start", trainer, **options))


def initial() -> Parameters:
    rng = np.random.default_rng(1)
    shapes = {"layers.0.weight": (8, 6), "layers.0.bias": (8,), "layers.2.weight": (2, 8), "layers.2.bias": (2,)}
    return Parameters.from_arrays({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


async def warmed(site: Site, text: str, model: Parameters | None = None) -> tuple[Parameters, dict[str, float]]:
    """The version that a warm start makes, and its losses; the job is cancelled before it needs clients."""
    job = await site.operator.start(text, initial() if model is None else model)
    await site.operator.until(job, "attempt", "COMMITTED")
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    first, *_ = await site.operator.rounds(job)
    return await site.operator.model(job, 1), dict(first.client_metrics)


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


def trained(folder: Path, text: str, backend: Backend) -> tuple[Parameters, dict[str, float]]:
    """The same training by this process alone, without a server, and its losses."""
    spec, model = parse_job(text), initial()
    assert spec.warm_start is not None
    assert spec.pool is not None
    trainer = user_code.load(f"{folder / 'trainers.py'}:{spec.warm_start.trainer}", folder)
    run = TrainingRun(options=spec.warm_start, num_ranks=spec.pool.ranks, parallel=spec.pool.parallel)
    with piped.alone(backend) as ranks:
        curve = train(ranks, trainer, model, run)
    assert curve is not None
    tenth = len(curve.losses) // 10
    return model, {"first_loss": curve.losses[:tenth].mean(), "loss": curve.losses[-tenth:].mean()}


def assert_equal(one: Parameters, other: Parameters, *, bits: bool = True) -> None:
    if bits:
        assert one == other
    np.testing.assert_allclose(one.to_vector(), other.to_vector(), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module", params=["gloo", *if_on_gpus("nccl", 1)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """The library of the pool's ranks."""
    return request.param


@pytest.fixture(scope="module")
def ranks(backend: Backend, tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Generator[PoolProcess]:
    """A pool of two, or of the only GPU, in a data folder that is ready for a daemon."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "gloo":  # bits are compared, so the hardware has to be the same
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        folder = tmp_path_factory.mktemp("pool")
        shutil.copy(empty_database, folder / "fedplat.sqlite")
        (folder / "trainers.py").write_text(TRAINERS)
        count = 2 if backend == "gloo" else min(2, torch.cuda.device_count())
        with pool(folder, count, "--backend", backend) as started:
            yield started


def trainers_in(folder: Path) -> dict[str, str]:
    registered = {name: f"{folder / 'trainers.py'}:{name}" for name in ("public", "killed", "unplanned")}
    return registered | {"disjoint": f"{hogwild.__file__}:DISJOINT"}


async def assert_consistent(folder: Path) -> None:
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert (report.findings, report.notes) == ([], [])


@pytest.mark.slow
@pytest.mark.timeout(500)  # the ranks restart three times
@pytest.mark.fault("F35")
@pytest.mark.calm
async def test_a_pool_divides_the_model_and_survives_the_death_of_ranks(
    ranks: PoolProcess, backend: Backend, folder: Path
) -> None:
    await ranks.ready()
    trainers = trainers_in(ranks.folder)
    bits = {layout: backend == "gloo" and "tensor" not in layout for layout in LAYOUTS}
    async with daemons.running(ranks.folder, trainers=trainers) as site:
        together = {layout: (await warmed(site, job_of(layout)))[0] for layout in LAYOUTS}
        stepped = {layout: await rounds(site, layout) for layout in LAYOUTS}
        said = await failure(site, "pipeline = 2", "unplanned")
        assert "the plan of Net has 0 parts in its stages; 2 stages need at least as many" in said
        for layout in LAYOUTS:
            await ranks.ready()  # again: otherwise the daemon might train by itself, and no rank would die
            again, _ = await warmed(site, job_of(layout, trainer="killed"))
            assert_equal(again, together[layout], bits=bits[layout])
            (ranks.folder / "died").unlink()
    await assert_consistent(ranks.folder)
    async with daemons.running(folder, trainers=trainers) as site:  # without a pool
        for layout in LAYOUTS:
            assert together[layout] != initial()
            assert_equal((await warmed(site, job_of(layout)))[0], together[layout], bits=bits[layout])
            assert_equal(await rounds(site, layout), stepped[layout], bits=bits[layout])
    await assert_consistent(folder)


@pytest.mark.slow
@pytest.mark.calm
async def test_other_ways_to_train_a_model_on_a_pool(ranks: PoolProcess, backend: Backend) -> None:
    """Offload, recomputation and PipeDream have the bits of one process, bf16 about its losses."""
    await ranks.ready()
    on_cpus = backend == "gloo"
    async with daemons.running(ranks.folder, trainers=trainers_in(ranks.folder)) as site:
        found = {layout: await warmed(site, job_of(layout, table)) for layout, table in OTHERS.items()}
        rounded, losses = await warmed(site, job_of("shard = 2", BF16))
    for layout, (model, curve) in found.items():
        expected, expected_curve = trained(ranks.folder, job_of(layout, OTHERS[layout]), backend)
        assert_equal(model, expected, bits=on_cpus)
        assert curve == pytest.approx(expected_curve, rel=1e-6 if on_cpus else 1e-3)
    exact, exact_losses = found["shard = 2"]
    assert found[PIPEDREAM][0] != found["pipeline = 2"][0], "its weights are older"
    assert rounded != exact
    assert losses == pytest.approx(exact_losses, abs=5e-3)


@pytest.mark.slow
@pytest.mark.calm
async def test_workers_without_locks_start_a_job(ranks: PoolProcess, folder: Path) -> None:
    """They use different features, so there is only one result: that of updates one after the other."""
    await ranks.ready()
    model, text = hogwild.DISJOINT.learner.initial(1), job_file("hogwild", more=HOGWILD)
    with piped.alone() as alone:
        expected = hogwild.train_disjoint(alone)
    for place in (ranks.folder, folder):  # on the pool, and on the daemon's own rank
        async with daemons.running(place, trainers=trainers_in(ranks.folder)) as site:
            found, losses = await warmed(site, text, model)
        assert found.to_bytes().hex() == expected
        assert losses["loss"] < losses["first_loss"]


@pytest.mark.calm
async def test_a_layout_for_another_number_of_ranks_is_refused(folder: Path) -> None:
    async with daemons.running(folder) as site:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.operator.create(job_file(more="[pool]\nranks = 3\n[pool.parallel]\nshard = 2\n"))
        assert "1 data × 2 shard × 1 tensor × 1 pipeline = 2; expected ranks = 2" in (caught.value.details() or "")
