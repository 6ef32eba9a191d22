"""A job's life as operators control it, and what the clients that work for it are told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.aggregate.drift import with_control
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination import job_checks
from fedplat_server.rpc.jobs import JobFiles
from support import daemons
from support.daemons import Site, initial_model, reason_name, update_of
from support.jobs import job_file

JobCall = aio.UnaryUnaryMultiCallable[admin_pb2.JobRequest, admin_pb2.Job]


async def act(site: Site, action: str, job: str) -> admin_pb2.Job:
    call: JobCall = getattr(site.operator.jobs, f"{action}Job")
    return await call(admin_pb2.JobRequest(job=job))


async def test_create_is_idempotent(site: Site) -> None:
    first = await site.operator.create(job_file("one"), key="the-same-key")
    again = await site.operator.create(job_file("another"), key="the-same-key")
    assert (first.job_id, first.name) == (again.job_id, again.name)
    together = await asyncio.gather(*(site.operator.create(job_file("two"), key="another-key") for _ in range(5)))
    assert len({job.job_id for job in together}) == 1
    listed = await site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest())
    assert [job.name for job in listed.jobs] == ["one", "two"]


@pytest.mark.calm("counts calls")
async def test_job_files_are_parsed_one_at_a_time_also_if_their_calls_have_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled: callers that give up must not gather threads that take memory."""
    begun, may_end, running = threading.Event(), threading.Event(), list[int]()
    parse = job_checks.parse_submitted

    def parse_slowly(text: str, *more: Any) -> JobSpec:
        running.append(running[-1] + 1 if running else 1)
        begun.set()
        assert may_end.wait(60.0)
        running.append(running[-1] - 1)
        return parse(text, *more)

    come: list[str] = []
    files: Any = JobFiles
    run_alone = files._run_alone

    async def come_and_run(self: object, function: Any, text: str, *more: Any) -> Any:
        come.append(text)
        return await run_alone(self, function, text, *more)

    monkeypatch.setattr(job_checks, "parse_submitted", parse_slowly)
    monkeypatch.setattr(files, "_run_alone", come_and_run)
    given_up = asyncio.ensure_future(site.operator.create(job_file("one")))
    assert await asyncio.to_thread(begun.wait, 60.0)
    given_up.cancel()
    others = [asyncio.ensure_future(site.operator.create(job_file(name))) for name in ("two", "three")]

    async def all_have_come() -> bool:
        return len(come) == 3

    await daemons.until(all_have_come, "the calls to come")
    for _ in range(3):
        await site.status()
    may_end.set()
    await asyncio.gather(*others)
    assert running == [1, 0] * 3


async def test_pause_stops_clients_at_once_and_resume_starts_afresh(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    assignment = await client.assignment()
    heartbeat = client.heartbeat(assignment.token)
    paused = await act(site, "Pause", job)
    assert (paused.status, paused.reason) == (admin_pb2.JOB_STATUS_PAUSED, "the job was paused")
    assert reason_name((await heartbeat).stop.reason) == "JOB_PAUSED"
    refused = await client.report(assignment.token, "0" * 64)
    assert reason_name(refused.refusal.reason) == "JOB_PAUSED"
    assert reason_name((await client.refusal()).reason) == "NO_WORK"

    assert (await act(site, "Resume", job)).status == admin_pb2.JOB_STATUS_RUNNING
    fresh = await client.assignment()
    assert (fresh.round, fresh.attempt) == (1, 2)
    await client.deliver(fresh.token, update_of(initial_model(), 0))
    await site.operator.until(job, "job", "COMPLETED")
    assert [one.dropped for one in await site.operator.rounds(job)] == [1, 0]


@pytest.mark.fault("F34")
async def test_cancel_stops_clients_and_ends_the_job_for_good(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    assignment = await client.assignment()
    heartbeat = client.heartbeat(assignment.token)
    assert (await act(site, "Cancel", job)).status == admin_pb2.JOB_STATUS_CANCELLED
    assert reason_name((await heartbeat).stop.reason) == "JOB_CANCELLED"
    for action in ("Start", "Resume", "Pause"):
        with pytest.raises(aio.AioRpcError) as caught:
            await act(site, action, job)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "ended for good" in (caught.value.details() or "")
    assert (await act(site, "Cancel", job)).status == admin_pb2.JOB_STATUS_CANCELLED


@pytest.mark.parametrize(
    ("before", "action", "said"),
    [((), "Pause", "DRAFT"), ((), "Resume", "start"), (("Start", "Pause"), "Start", "resume")],
)
async def test_an_action_that_the_status_forbids(site: Site, before: tuple[str, ...], action: str, said: str) -> None:
    job = (await site.operator.create(job_file())).job_id
    for earlier in before:
        await act(site, earlier, job)
    with pytest.raises(aio.AioRpcError) as caught:
        await act(site, action, job)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert said in (caught.value.details() or "")


async def test_jobs_are_found_by_name_if_only_one_has_it(site: Site) -> None:
    one = await site.operator.start(job_file("same"))
    assert (await site.operator.show("same")).job_id == one
    two = await site.operator.create(job_file("same"))
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.show("same")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert one in (caught.value.details() or "")
    await act(site, "Cancel", one)
    assert (await site.operator.show("same")).job_id == two.job_id
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.show("other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds = ", "not valid TOML"),
        (job_file().replace("trainer", "trianer"), "did you mean trainer?"),
        (job_file(more='[evaluation]\nserver = "digits"'), "--evaluator digits=module:function"),
        ("#" * (2**18 + 1), "more than"),
        ("config.a" + ".a" * 15_000 + " = 1", "a key has more than 32 parts"),
        (job_file().replace('"demo"', f'"{"ä" * 1000}"') * 4, "not valid TOML"),
    ],
)
async def test_a_job_file_that_cannot_be_used(site: Site, text: str, said: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.create(text)
    assert said in (caught.value.details() or "")
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


async def test_a_long_list_of_mistakes_still_arrives(site: Site) -> None:
    wrong = "\n".join(f'"{"schlüssel" * 5}{n}" = "{"ß%" * 60}"' for n in range(40))
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.create(f"{wrong}\n{job_file()}")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "there is no such key" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "without a message"),
        (b"{}", "too short"),
        (b"\xff" * 100, "cannot be used"),
        ((2**60).to_bytes(8, "little") + b"{}", "cannot be used"),
        (
            b'{"a":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}'.join(
                [(91).to_bytes(8, "little"), b""]
            ),
            "cannot be used",
        ),
    ],
)
@pytest.mark.fault("F23")
async def test_an_invalid_model_is_refused(site: Site, content: bytes, said: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.upload(content)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (caught.value.details() or "")
    assert str(site.folder) not in (caught.value.details() or "")
    assert not list((site.folder / "blobs").glob("*.tmp"))


async def test_models_that_cannot_be_trained_are_refused(site: Site) -> None:
    for arrays, said in (
        ({"n": np.ones(3, np.int64)}, "no floating-point tensor"),
        ({"w": np.array([1.0, np.nan], np.float32)}, "NaN or infinite"),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await site.operator.create(job_file(), Parameters.from_arrays(arrays))
        assert said in (caught.value.details() or "")
    scaffold = '[config]\nalgorithm = "scaffold"\n[updates]\nweighting = "uniform"\n'
    scaffold += '[aggregation]\nrule = "scaffold"\nnum_clients = 9'
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.create(job_file(more=scaffold))
    assert "a tensor control/NAME for each tensor NAME" in (caught.value.details() or "")
    await site.operator.create(job_file(more=scaffold), with_control(initial_model()))
    request = admin_pb2.CreateJobRequest(job_file=job_file(), initial_digest="0" * 64, idempotency_key="12345678")
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.jobs.CreateJob(request)
    assert "upload it first" in (caught.value.details() or "")


async def test_listing_clients_shows_their_work(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    busy, waits, away = await site.fleet(3)
    await busy.assignment(labels={"region": "eu"})
    waiting = waits.check_in()
    await site.waiting(1)
    listed = (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest(population="demo"))).clients
    assert [client.state for client in listed] == ["busy", "waiting", "away"]
    assert dict(listed[0].labels) == {"region": "eu"}
    assert listed[0].job_id
    assert listed[0].last_seen_unix_s > 0.0
    assert listed[2].client_id == away.client_id
    assert not (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest(population="other"))).clients
    first = await site.operator.clients.ListClients(admin_pb2.ListClientsRequest(page_size=2))
    request = admin_pb2.ListClientsRequest(page_size=2, page_token=first.next_page_token)
    last = await site.operator.clients.ListClients(request)
    ids = [client.client_id for client in (*first.clients, *last.clients)]
    assert (ids, last.next_page_token) == ([client.client_id for client in listed], "")
    waiting.cancel()


async def test_export_of_a_version_that_is_not_there(site: Site) -> None:
    job = (await site.operator.create(job_file())).job_id
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.export(job, 7)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "the latest is 0" in (caught.value.details() or "")
