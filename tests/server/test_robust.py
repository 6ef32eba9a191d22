"""Robust rules over the real server: one of five clients sends garbage, and the model is what the rule says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fedplat.aggregate import Accumulator, Contribution, seed_of
from fedplat.codecs import Bf16
from fedplat.codecs.container import Format
from fedplat.job import build_rule, parse_job
from fedplat.model import Parameters
from support import daemons
from support.daemons import RawClient, Site, initial_model, update_of
from support.jobs import job_file

OPTIMIZER = '[aggregation]\nrule = "fedavgm"\nmomentum = 0.5\n'
MEMORY = 'durability = "memory"\n'
UPLINK = '[compression]\nuplink = {codec = "bf16"}\n'


def table(rule: str, more: str = "") -> str:
    return f"[robust]\nbyzantine = 1\nrule = {{{rule}}}\n{more}"


def honest(number: int, round_: int) -> Parameters:
    update = update_of(initial_model(), 100 * round_ + number)
    update.buffer[:] = (update.to_vector() / 10 + 1).view(np.uint8)
    return update


def garbage() -> Parameters:
    update = Parameters.zeros(initial_model().schema)
    update.buffer[:] = np.full(update.schema.num_floating, -3e30, np.float32).view(np.uint8)
    return update


def sent(number: int, round_: int) -> Parameters:
    return garbage() if number == 2 else honest(number, round_)


async def train(site: Site, job: str, clients: list[RawClient], round_: int) -> None:
    work = await asyncio.gather(*(client.assignment(codecs=["bf16"]) for client in clients))
    for number, (client, one) in enumerate(zip(clients, work, strict=True)):
        update = sent(number, round_)
        content = encoded(update) if one.uplink else update.to_bytes()
        assert (await client.deliver(one.token, content)).HasField("receipt")


def encoded(update: Parameters) -> bytes:
    return b"".join(Format(Bf16(), update.schema).encode(update, np.random.default_rng(1)))


def expected(text: str, job: str, clients: list[RawClient], rounds: int) -> Parameters:
    """The model after some rounds, computed from the updates alone."""
    spec, model = parse_job(text), initial_model()
    uplink = spec.compression.uplink
    state = build_rule(spec).init(model.schema.num_floating)
    for round_ in range(1, rounds + 1):
        accumulator = Accumulator(model.schema, build_rule(spec, seed_of(job, round_)))
        for number, client in enumerate(clients):
            update = sent(number, round_)
            values = update if uplink is None else Format(uplink, model.schema).decode(encoded(update))
            accumulator.fold(values, Contribution(1.0, client_id=client.client_id))
        model, state = accumulator.finish(model, state)
    return model


CASES = {
    "median": OPTIMIZER + table('name = "median"'),
    "krum": OPTIMIZER + table('name = "krum"'),
    "geometric median": OPTIMIZER + table('name = "geometric-median"'),
    "what it remembers": table('name = "centered-clipping", radius = 0.5'),
    "mixed": table('name = "trimmed-mean"', 'before = [{name = "nearest"}]\n'),
    "in memory": table('name = "median"'),
    "encoded": UPLINK + table('name = "krum"'),
}


IN_EVERY_RUN = ("median", "mixed", "encoded")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
async def test_garbage_does_not_move_the_model(site: Site, name: str) -> None:
    text = (MEMORY if name == "in memory" else "") + job_file(goal=5, rounds=2, more=CASES[name])
    job = await site.operator.start(text)
    clients = await site.fleet(5)
    for round_ in (1, 2):
        await train(site, job, clients, round_)
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert model.to_bytes() == expected(text, job, clients, 2).to_bytes()
    assert np.abs(model.to_vector() - initial_model().to_vector()).max() < 5
    assert (await site.operator.versions(job))[-1].num_updates == 5
    await daemons.until_spool_is_empty(site.folder)


async def test_the_updates_of_trusted_clients_are_the_measure(site: Site) -> None:
    clients = await site.fleet(5)
    text = job_file(goal=5, more=table(f'name = "fltrust", trusted = ["{clients[0].client_id}"]'))
    job = await site.operator.start(text)
    await train(site, job, clients, 1)
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert model.to_bytes() == expected(text, job, clients, 1).to_bytes()
    assert np.abs(model.to_vector() - initial_model().to_vector()).max() < 5


async def test_an_attempt_without_a_trusted_client_is_tried_again(site: Site) -> None:
    text = job_file(goal=5, more=table('name = "fltrust", trusted = ["somebody else"]'))
    job, clients = await site.operator.start(text), await site.fleet(5)
    await train(site, job, clients, 1)
    ended = await site.operator.until(job, "attempt", "ABANDONED")
    assert "no update of a client that robust.rule.trusted names" in ended.reason


@pytest.mark.fault("F2")
async def test_a_round_continues_in_the_middle(folder: Path) -> None:
    """The model has the updates that were in the spool before the crash and those that came after it (I10)."""
    text = job_file(goal=5, more=OPTIMIZER + table('name = "median"', 'before = [{name = "bucketing", size = 1}]\n'))
    async with daemons.running(folder) as site:
        job, clients = await site.operator.start(text), await site.fleet(5)
        work = await site.assign(clients)
        for number in (0, 1, 2):
            await clients[number].deliver(work[number].token, sent(number, 1))
    async with daemons.running(folder) as site:
        clients = [client.over(site.channel) for client in clients]
        for client in clients:
            await client.open_session()
        for number in (3, 4):
            await clients[number].deliver(work[number].token, sent(number, 1))
        await site.operator.until(job, "job", "COMPLETED")
        assert await site.operator.export(job) == expected(text, job, clients, 1).to_bytes()
    assert list((folder / "uploads").iterdir()) == []
