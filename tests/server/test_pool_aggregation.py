"""Aggregation on ranks: the bits and the errors are those of one process, also when ranks die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from fedplat.errors import ModelError
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_server.aggregation import backend
from fedplat_server.aggregation.backend import Aggregate, LocalAggregation, PoolAggregation, WithFallback
from fedplat_server.errors import BlobFullError, PoolError
from fedplat_server.workers.client import WorkerPool
from fedplat_server.workers.task_inputs import AttemptInputs, CloseAttempt
from support import daemons, plugins
from support.daemons import Site
from support.jobs import job_file
from support.pool import PoolProcess, pool
from support.pool_jobs import BY_COLUMNS, CLIPPED, FEDADAM, JOBS, NUM_UPDATES, Spool, base_model
from support.ranks.backends import if_on_gpus


# Slow, since real ranks take seconds to start; test_pool.py starts some in every run of the tests.
@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.slow), *if_on_gpus("nccl", 1)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[PoolProcess]:
    count = torch.cuda.device_count() if request.param == "nccl" else 2
    with pool(tmp_path_factory.mktemp("ranks"), count, "--backend", request.param) as started:
        yield started


def drafted(model: str) -> Callable[..., CloseAttempt]:
    """Makes the ranks write to another path than that of the daemon's file."""

    def drafts(*_: object) -> CloseAttempt:
        return CloseAttempt(model, "", "")

    return drafts


def kill_one(ranks: PoolProcess) -> None:
    """Kills the last rank with SIGKILL."""
    running = ranks.ranks()
    running[max(running)].send_signal(signal.SIGKILL)


async def on_pool(spool: Spool, inputs: AttemptInputs, link: WorkerPool) -> Aggregate:
    folding = PoolAggregation(inputs, spool.blobs, link)
    await folding.begin()
    return await spool.done(folding)


@pytest.mark.parametrize("name", JOBS)
async def test_two_rounds_have_the_bits_of_one_process(ranks: PoolProcess, name: str, tmp_path: Path) -> None:
    link, spool = await ranks.ready(), Spool(tmp_path, JOBS[name] + BY_COLUMNS)
    for _ in range(2):
        inputs = spool.inputs()  # with the key of the noise
        alone = await spool.done(LocalAggregation(inputs, spool.blobs))
        assert await on_pool(spool, inputs, link) == alone
        spool.accept(alone)
    assert not list(spool.blobs.folder.glob("*.tmp"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
async def test_by_reports_the_bits_are_those_of_so_many_ranks(
    ranks: PoolProcess, num_ranks: int, tmp_path: Path
) -> None:
    """The model equals that of one process up to rounding; its bits are the same with and without a pool."""
    reports = f'[pool]\nranks = {num_ranks}\nsplit = "reports"\n'
    link, spool = await ranks.ready(), Spool(tmp_path, FEDADAM + CLIPPED + reports)
    one = structs.replace(spool.inputs(), spec=parse_job(job_file(more=FEDADAM + CLIPPED)))
    wanted = spool.model(await spool.done(LocalAggregation(one, spool.blobs)))
    alone = await spool.done(LocalAggregation(spool.inputs(), spool.blobs))
    found = await on_pool(spool, spool.inputs(), link)
    assert found == alone
    np.testing.assert_allclose(spool.model(found), wanted, rtol=1e-6, atol=1e-6)


async def test_a_counter_is_the_largest_of_all_reports(ranks: PoolProcess, tmp_path: Path) -> None:
    base = base_model()
    base = Parameters.from_arrays({**base}, "max")
    for split in ("columns", "reports"):
        (tmp_path / split).mkdir()
        spool = Spool(tmp_path / split, f'[pool]\nranks = 3\nsplit = "{split}"\n', base)
        for number, update in enumerate(spool.updates):
            changed = Parameters.from_bytes(bytearray(Path(update.path).read_bytes()))
            changed["steps"][:] = [number, 100 - number]
            Path(update.path).write_bytes(changed.to_bytes())
        alone = await spool.done(LocalAggregation(spool.inputs(), spool.blobs))
        assert await on_pool(spool, spool.inputs(), await ranks.ready()) == alone
        steps = Parameters.open(spool.blobs.path(alone.model.digest))["steps"]
        assert steps.tolist() == [NUM_UPDATES - 1, 100]


async def test_the_ranks_import_the_plugins_of_a_job_and_refuse_changed_ones(
    ranks: PoolProcess, tmp_path: Path
) -> None:
    file = plugins.write_file(tmp_path)
    tables = '[aggregation]\nrule = "scaled"\n[compression]\nuplink = { codec = "halves" }\n' + BY_COLUMNS
    link, spool = await ranks.ready(), Spool(tmp_path, tables, plugins=plugins.load(file))
    alone = await spool.done(LocalAggregation(spool.inputs(), spool.blobs))
    assert await on_pool(spool, spool.inputs(), link) == alone
    plugins.write_file(tmp_path, "# changed\n")
    with pytest.raises(PoolError, match=r"the file of the plugin \S+ has changed since the server imported it"):
        await on_pool(spool, spool.inputs(), link)
    assert await spool.done(WithFallback(spool.inputs(), spool.blobs, link)) == alone


async def test_updates_from_another_version_and_a_model_of_one_entry(ranks: PoolProcess, tmp_path: Path) -> None:
    base = Parameters.from_arrays({"w": np.ones(1, np.float32)})
    mode = '[mode]\nkind = "buffered"\nconcurrency = 5\n[updates]\nweighting = "uniform"\n'
    spool = Spool(tmp_path, mode + '[aggregation]\nrule = "fedasync"\n' + BY_COLUMNS, base)
    (tmp_path / "origin").write_bytes(daemons.update_of(base, 9).to_bytes())
    origin = str(tmp_path / "origin")
    spool.updates[1:3] = [structs.replace(update, origin_path=origin) for update in spool.updates[1:3]]
    alone = await spool.done(LocalAggregation(spool.inputs(), spool.blobs))
    assert await on_pool(spool, spool.inputs(), await ranks.ready()) == alone


async def test_a_result_that_is_not_finite_and_one_that_there_is_not_are_told(
    ranks: PoolProcess, tmp_path: Path
) -> None:
    link, spool = await ranks.ready(), Spool(tmp_path, BY_COLUMNS)
    huge = Parameters.zeros(base_model().schema)
    huge["weight"][-1] = 3e38
    for update in spool.updates:
        Path(update.path).write_bytes(huge.to_bytes())
    before = {number: process.pid for number, process in ranks.ranks().items()}
    with pytest.raises(ModelError, match="not finite"):
        await on_pool(spool, spool.inputs(), link)
    spool.updates.clear()
    with pytest.raises(ModelError, match="no update was folded"):
        await on_pool(spool, spool.inputs(), link)
    (tmp_path / "median").mkdir()
    robust = Spool(tmp_path / "median", JOBS["median"] + BY_COLUMNS)
    del robust.updates[2:]
    with pytest.raises(ModelError, match="needs at least 3"):
        await on_pool(robust, robust.inputs(), link)
    assert {number: process.pid for number, process in ranks.ranks().items()} == before, "a rank has died"
    assert not list(spool.blobs.folder.glob("*.tmp"))


@pytest.mark.fault("F7")
async def test_a_full_disk_is_told_as_in_one_process(
    ranks: PoolProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon reserves the space; a rank that finds the disk full nevertheless reports it."""
    link, spool = await ranks.ready(), Spool(tmp_path, BY_COLUMNS)
    full = "/dev/full"
    with monkeypatch.context() as patched:
        patched.setattr(PoolAggregation, "_make_drafts", drafted(full))
        with pytest.raises(BlobFullError):
            await on_pool(spool, spool.inputs(), link)

    def no_room(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(BlobFullError):
        await on_pool(spool, spool.inputs(), link)
    assert not list(spool.blobs.folder.glob("*.tmp"))


async def test_an_attempt_that_is_cancelled_frees_the_ranks(ranks: PoolProcess, tmp_path: Path) -> None:
    link, spool = await ranks.ready(), Spool(tmp_path, BY_COLUMNS)
    left = WithFallback(spool.inputs(), spool.blobs, link)
    await left.fold(spool.updates[:1])
    await left.close()
    assert await on_pool(spool, spool.inputs(), link) == await spool.done(LocalAggregation(spool.inputs(), spool.blobs))


@pytest.mark.fault("F35")
@pytest.mark.parametrize("split", ["columns", "reports"])
async def test_without_a_pool_the_daemon_does_it(tmp_path: Path, split: str) -> None:
    spool = Spool(tmp_path, FEDADAM + f'[pool]\nranks = 2\nsplit = "{split}"\n')
    inputs, no_pool = spool.inputs(), WorkerPool.at(tmp_path)
    assert await spool.done(WithFallback(inputs, spool.blobs, no_pool)) == await spool.done(
        LocalAggregation(inputs, spool.blobs)
    )


@pytest.mark.fault("F35")
async def test_a_rank_killed_while_it_writes_the_version(
    ranks: PoolProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is not back in time, so the daemon aggregates everything."""
    link, spool = await ranks.ready(), Spool(tmp_path, JOBS["private"] + BY_COLUMNS)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it for writing waits for a reader
    monkeypatch.setattr(PoolAggregation, "_make_drafts", drafted(str(pipe)))
    inputs = spool.inputs()
    committing = asyncio.create_task(spool.done(WithFallback(inputs, spool.blobs, link, patience_s=0.0)))
    with await asyncio.to_thread(pipe.open, "rb"):  # a rank has opened it
        kill_one(ranks)
        assert await committing == await spool.done(LocalAggregation(inputs, spool.blobs))


@pytest.mark.slow
@pytest.mark.calm
@pytest.mark.fault("F35")
async def test_the_daemon_s_versions_have_the_same_digests(
    ranks: PoolProcess, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round a rank is killed between two reports; the pool is back in time, and starts again."""
    made, committed = list[str](), PoolAggregation.commit
    begun, begin_task = list[PoolAggregation](), PoolAggregation.begin

    async def begin(folding: PoolAggregation) -> None:
        await begin_task(folding)
        begun.append(folding)

    async def commit(folding: PoolAggregation, draft: Path | None = None) -> Aggregate:
        aggregate = await committed(folding, draft)
        made.append(aggregate.model.digest)
        return aggregate

    async def is_in_round_2() -> bool:
        return len(begun) == 2

    monkeypatch.setattr(PoolAggregation, "begin", begin)
    monkeypatch.setattr(PoolAggregation, "commit", commit)
    monkeypatch.setattr(backend, "PATIENCE_S", 3600.0)  # long enough for the pool on any machine
    await ranks.ready()
    (site.folder / "pool.sock").symlink_to(ranks.folder / "pool.sock")
    clients = await site.fleet(2)
    digests = list[list[str]]()
    for tables in (BY_COLUMNS, ""):
        job = await site.operator.start(
            job_file(f"job{len(tables)}", 2, 2, more=FEDADAM + CLIPPED + tables), base_model()
        )
        for round_ in (1, 2):
            work = await site.assign(clients)
            for number, (client, one) in enumerate(zip(clients, work, strict=True)):
                update = daemons.update_of(base_model(), 10 * round_ + number)
                assert (await client.deliver(one.token, update.to_bytes())).HasField("receipt")
                if tables and round_ == 2 and number == 0:
                    await daemons.until(is_in_round_2, "the pool's part in round 2")  # else there would be no retry
                    kill_one(ranks)
            await site.operator.until(job, "attempt", "COMMITTED", round_)
        digests.append([version.model.digest for version in await site.operator.versions(job)])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3
    assert made == digests[0][1:]
