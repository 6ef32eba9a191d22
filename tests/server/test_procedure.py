"""Procedures over the wire: the bytes of one in a notebook, replies that do not fit are refused, and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from grpc import aio

from fedplat.config.loaded_plugins import load_plugins
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.procedures import Means, SiteTable, run, versions
from fedplat.procedures.contract import FEATURE
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_client._state import released
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import Site, reason_name
from support.procedures import HALVING, PLUGINS, Frame, Halving, at_work, make_client, make_frames, procedure_job

ANSWERS: dict[str, Any] = {"trainers": ("patients",), "features": (FEATURE,)}


def first_message(text: str) -> Parameters:
    procedure = parse_job(text, load_plugins(PLUGINS).table).procedure
    assert procedure is not None
    return versions.begin(procedure).model


@pytest.mark.calm  # a client whose report was not answered does the step again
@pytest.mark.slow
async def test_the_result_has_the_bytes_of_a_notebook_and_the_record_a_line_for_each_reply(
    folder: Path, tmp_path: Path
) -> None:
    frames, text = make_frames(5), procedure_job(HALVING, goal=5)
    loaded = load_plugins(PLUGINS)
    async with daemons.running(folder, plugins=loaded) as site:
        job = await site.operator.start(text, first_message(text))
        made = [await make_client(site, tmp_path / name, frame) for name, frame in frames.items()]
        async with at_work(made):
            await site.operator.until(job, "job", "COMPLETED")
        found = versions.read_result(await site.operator.model(job))
        assert [each.round for each in await site.operator.rounds(job)] == [1, 2, 3, 4]
        for client in made:
            lines = list(released.read(client.released))
            assert [each.round for each in lines] == [1, 2, 3, 4]
            assert {each.num_examples for each in lines} == {1.0}
    assert found is not None
    assert found == run(Halving("age", 128.0), frames)
    assert found.files == {"range.csv": b"56.0,64.0\n"}
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert report.findings == []


def read_step(one: fleet_pb2.Assignment) -> tuple[Means, Parameters]:
    """The procedure of an assignment and its message, as a client reads them."""
    return msgspec.json.decode(one.procedure.options, type=Means), Parameters.from_bytes(one.model_bytes)


def reply_of(one: fleet_pb2.Assignment, frame: Frame) -> bytes:
    means, message = read_step(one)
    schema = means.schema(message)
    assert one.procedure.schema_digest == schema.digest
    assert one.procedure.version == 1
    return schema.write(schema.encode(means.answer(message, SiteTable(frame))))


@pytest.mark.calm
async def test_replies_are_added_exactly_and_the_sites_stay_the_same_after_a_restart(folder: Path) -> None:
    text, frames = procedure_job(goal=3), make_frames(3)
    async with daemons.running(folder) as site:
        job = await site.operator.start(text, first_message(text))
        fleet = await site.fleet(3)
        work = await asyncio.gather(*(client.assignment(**ANSWERS) for client in fleet))
        assert {each.trainer for each in work} == {"patients"}
        frame_of = dict(zip([client.client_id for client in fleet], frames.values(), strict=True))
        for client, one in list(zip(fleet, work, strict=True))[:2]:
            response = await client.report_inline(one.token, reply_of(one, frame_of[client.client_id]))
            assert response.HasField("receipt"), response
    async with daemons.running(folder) as site:
        last = fleet[2].over(site.channel)
        await last.open_session()
        response = await last.report_inline(work[2].token, reply_of(work[2], frame_of[last.client_id]))
        assert response.HasField("receipt"), response
        await site.operator.until(job, "job", "COMPLETED")
        found = versions.read_result(await site.operator.model(job))
    means = parse_job(text).procedure
    assert isinstance(means, Means)
    assert found is not None
    assert found.to_json() == run(means, frames).to_json()
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert report.findings == []


@pytest.mark.slow
async def test_a_reply_that_does_not_fit_is_refused_and_pauses_the_job(site: Site) -> None:
    text = procedure_job(goal=1)
    job = await site.operator.start(text, first_message(text))
    client = await site.enroll()
    one = await client.assignment(**ANSWERS)
    means, message = read_step(one)
    schema = means.schema(message)
    reply = bytearray(schema.write(np.zeros(schema.length, np.int64)))
    reply[-8:] = (2**62).to_bytes(8, "little")
    response = await client.report_inline(one.token, bytes(reply))
    assert reason_name(response.refusal.reason) == "REJECTED_SCHEMA"
    assert response.refusal.text == "tensor 'squares' of 1 site is beyond its declared bound"
    await site.operator.until(job, "job", "PAUSED")
    shown = await site.operator.show(job)
    assert f"step 1 failed: client {client.client_id}: REJECTED_SCHEMA: tensor 'squares'" in shown.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_examples", "cut", "text"),
    [
        (2.0, 0, "num_examples is 2; expected 1 with a procedure"),
        (1.0, 8, "the reply is not of the declared form"),
    ],
)
async def test_more_refusals(site: Site, num_examples: float, cut: int, text: str) -> None:
    job = procedure_job(goal=1)
    await site.operator.start(job, first_message(job))
    client = await site.enroll()
    one = await client.assignment(**ANSWERS)
    content = reply_of(one, make_frames(1)["site-0"])
    response = await client.report_inline(one.token, content[: len(content) - cut], num_examples=num_examples)
    assert text in response.refusal.text


@pytest.mark.slow
async def test_a_job_begins_with_the_first_message_of_its_procedure_and_nothing_else(site: Site) -> None:
    with pytest.raises(aio.AioRpcError, match="it is not the one that the job file defines") as raised:
        await site.operator.create(procedure_job())
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(aio.AioRpcError, match=r"procedure\.kind = 'halving': expected one of means"):
        await site.operator.create(procedure_job(HALVING))
    created = await site.operator.create(procedure_job(), first_message(procedure_job()))
    assert created.status == admin_pb2.JOB_STATUS_DRAFT


@pytest.mark.calm
@pytest.mark.slow
async def test_under_masks_the_result_has_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """And the record of each site states the masks, and over how many sites a sum is at least."""
    frames = make_frames(4)
    text = procedure_job(HALVING, goal=4, more="[secure_aggregation]\nconfirm = true\n")
    loaded = load_plugins(PLUGINS)
    async with daemons.running(folder, plugins=loaded) as site:
        job = await site.operator.start(text, first_message(text))
        made = [await make_client(site, tmp_path / name, frame) for name, frame in frames.items()]
        async with at_work(made):
            await site.operator.until(job, "job", "COMPLETED")
        found = versions.read_result(await site.operator.model(job))
        assert [each.num_survivors for each in await site.operator.rounds(job)] == [4, 4, 4, 4]
        for client in made:
            lines = list(released.read(client.released))
            assert [line.round for line in lines] == [1, 2, 3, 4]
            assert {(line.protection.masked, line.protection.min_clients) for line in lines} == {(True, 4)}
    assert found == run(Halving("age", 128.0), frames)
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert report.findings == []
