"""The filters, totals and details that operators ask for, on a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.wire.v1 import admin_pb2, model_pb2
from support import daemons
from support.access import ADMIN_TOKEN
from support.daemons import RawClient, Site, initial_model, until, update_of
from support.jobs import job_file

S = admin_pb2
PRIVATE = (
    '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
    '[privacy]\nparticipation = "fixed"\nnoise_multiplier = 10.0\ndelta = 1e-5\n'
)


pytestmark = pytest.mark.calm


async def refused(call: aio.UnaryUnaryCall[Any, Any]) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    return caught.value.details() or ""


async def test_jobs_are_filtered(site: Site) -> None:
    operator = site.operator
    ids = [(await operator.create(job_file(f"Job-{n}"))).job_id for n in range(3)]
    other = (await operator.create(job_file("else").replace('"demo"', '"other"'))).job_id
    await operator.jobs.StartJob(S.JobRequest(job=ids[1]))

    async def found(**filters: Any) -> tuple[list[str], int]:
        page = await operator.jobs.ListJobs(S.ListJobsRequest(**filters))
        return [job.job_id for job in page.jobs], page.total

    assert await found() == ([*ids, other], 4)
    assert await found(newest_first=True) == ([other, *reversed(ids)], 4)
    assert await found(statuses=[S.JOB_STATUS_RUNNING, S.JOB_STATUS_FAILED]) == (ids[1:2], 1)
    assert await found(population="other") == ([other], 1)
    assert await found(search="JOB-") == (ids, 3)
    assert await found(search=ids[2][3:]) == (ids[2:], 1)
    assert await found(since_unix_s=time.time() + 60.0) == ([], 0)
    page = await operator.jobs.ListJobs(S.ListJobsRequest(statuses=[S.JOB_STATUS_RUNNING], population="demo"))
    assert page.num_by_status == {"RUNNING": 1, "DRAFT": 2}
    assert page.jobs[0].current.phase == S.ATTEMPT_PHASE_SELECTING
    request = S.ListJobsRequest(statuses=[S.JOB_STATUS_DRAFT], page_size=1, newest_first=True)
    first = await operator.jobs.ListJobs(request)
    await operator.jobs.StartJob(S.JobRequest(job=first.jobs[0].job_id))  # it leaves the list
    request.page_token = first.next_page_token
    assert [job.job_id for job in (await operator.jobs.ListJobs(request)).jobs] == [ids[2]]
    assert "expected 1 to 63" in await refused(operator.jobs.ListJobs(S.ListJobsRequest(population="a b")))
    assert "200 bytes" in await refused(operator.jobs.ListJobs(S.ListJobsRequest(search="x" * 201)))
    assert "since_unix_s" in await refused(operator.jobs.ListJobs(S.ListJobsRequest(since_unix_s=float("nan"))))


async def test_clients_are_filtered(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    busy, waiting, away, revoked = await site.fleet(4)
    for client in (busy, waiting, away, revoked):
        await client.check_in(0.0, {"region": "eu" if client in (busy, waiting) else "us"}, trainers=())
    other = await site.enroll("other")
    await busy.assignment(labels={"region": "eu"})
    poll = asyncio.ensure_future(waiting.check_in(60.0, {"region": "eu"}))
    await site.waiting(1)
    await site.operator.clients.RevokeClient(S.RevokeClientRequest(client_id=revoked.client_id))

    async def found(**filters: Any) -> list[str]:
        page = await site.operator.clients.ListClients(S.ListClientsRequest(**filters))
        small = await site.operator.clients.ListClients(S.ListClientsRequest(page_size=1, **filters))
        assert page.total == small.total == len(page.clients)
        return [client.client_id for client in page.clients]

    assert await found() == [c.client_id for c in (busy, waiting, away, revoked, other)]
    assert await found(state="busy") == [busy.client_id]
    assert await found(state="waiting") == await found(state="waiting", labels={"region": "eu"}) == [waiting.client_id]
    assert (
        await found(state="waiting", labels={"region": "us"}) == await found(state="waiting", population="other") == []
    )
    assert await found(state="away") == [away.client_id, other.client_id]
    assert await found(state="away", population="demo") == await found(state="away", labels={"region": "us"})
    assert await found(state="revoked") == [revoked.client_id]
    assert await found(labels={"region": "eu"}) == [busy.client_id, waiting.client_id]
    assert await found(labels={"region": "eu", "size": "9"}) == await found(search="%") == []
    assert await found(search=away.client_id[5:].upper()) == [away.client_id]
    clients = site.operator.clients
    assert "expected waiting, busy" in await refused(clients.ListClients(S.ListClientsRequest(state="asleep")))
    shown = await clients.ShowClient(S.ShowClientRequest(client_id=busy.client_id))
    assert (shown.state, shown.job_id, shown.labels["region"]) == ("busy", job, "eu")
    assert "no such client" in await refused(clients.ShowClient(S.ShowClientRequest(client_id="c-" + "0" * 16)))
    poll.cancel()


async def test_audit_rows_are_filtered(site: Site) -> None:
    for n in range(3):
        await site.operator.create(job_file(f"job-{n}"))
    whole = (await site.operator.operators.ListAudit(S.ListAuditRequest())).events
    created = [row.sequence for row in whole if row.action == "job created"]

    async def found(**filters: Any) -> tuple[list[int], int]:
        page = await site.operator.operators.ListAudit(S.ListAuditRequest(**filters))
        return [row.sequence for row in page.events], page.total

    assert await found(action="job created") == (created, 3)
    assert await found(action="job created", newest_first=True, page_size=2) == (created[:0:-1], 3)
    assert await found(actor="server") == ([1], 1)
    assert await found(since_unix_s=time.time() + 60.0) == ([], 0)
    assert await found(after_sequence=created[1]) == (
        [row.sequence for row in whole][created[1] :],
        len(whole) - created[1],
    )
    both = S.ListAuditRequest(newest_first=True, after_sequence=1)
    assert "only one of them" in await refused(site.operator.operators.ListAudit(both))


async def _play(site: Site, clients: list[RawClient], rounds: int) -> None:
    """Lets two clients work: each round the first one reports twice as fast."""
    for number in range(rounds):
        work = await site.assign(clients)
        for seed, (client, assignment) in enumerate(zip(clients, work, strict=True)):
            await client.deliver(assignment.token, update_of(initial_model(), 10 * number + seed))


async def test_rounds_are_sampled(site: Site) -> None:
    job = await site.operator.start(job_file(rounds=7, goal=2))
    await _play(site, await site.fleet(2), 7)
    await site.operator.until(job, "job", "COMPLETED")

    async def found(**options: Any) -> tuple[list[int], int]:
        page = await site.operator.jobs.ListRounds(S.ListRoundsRequest(job=job, **options))
        assert not page.next_page_token
        return [one.round for one in page.rounds], page.total

    assert await found(num_samples=3) == ([1, 4, 7], 7)
    assert await found(num_samples=1) == ([1, 7], 7)
    assert await found(num_samples=99) == await found() == ([1, 2, 3, 4, 5, 6, 7], 7)
    assert await found(newest_first=True) == ([7, 6, 5, 4, 3, 2, 1], 7)
    assert await found(round=3) == ([3], 1)
    versions = await site.operator.jobs.ListModelVersions(S.ListModelVersionsRequest(job=job, page_size=2))
    assert versions.total == 8


async def _mix(site: Site) -> tuple[str, list[str]]:
    """A job with four clients: one reports, one fails, one is rejected, one still works; its id, and theirs."""
    job = await site.operator.start(job_file("digits", goal=4, min_fraction=0.5))
    clients = await site.fleet(4)
    labels = [{"region": "eu", "serial": "1"}, {"region": "eu", "serial": "2"}, {"region": "us"}, {"region": "us"}]
    work = await asyncio.gather(*(c.assignment(labels=each) for c, each in zip(clients, labels, strict=True)))
    await clients[0].deliver(work[0].token, update_of(initial_model(), 0))
    await clients[1].fail(work[1].token, model_pb2.REASON_TRAINER_ERROR, "ValueError: \x1b[2J" + "x" * 900)
    bad = update_of(initial_model(), 1).to_bytes()[:-4] + b"\xff\xff\xff\x7f"
    await clients[2].report_inline(work[2].token, bad)
    await clients[3].heartbeat(work[3].token, 0.0, progress=0.5)
    return job, [client.client_id for client in clients]


async def test_a_round_has_reasons_and_labels(site: Site) -> None:
    job, _ = await _mix(site)
    details = await site.operator.jobs.ShowRound(S.ShowRoundRequest(job=job, round=1))
    shown = details.round
    assert (details.num_attempts, shown.assigned, shown.target, shown.checked_in, shown.eligible) == (1, 4, 4, 4, 4)
    assert (shown.reported, shown.failed, shown.rejected, shown.busy, shown.merged) == (1, 1, 1, 1, 0)
    reasons = {(each.state, each.reason): each for each in details.reasons}
    assert reasons.keys() == {("FAILED", "TRAINER_ERROR"), ("REJECTED", "REJECTED_NONFINITE")}
    failed = reasons["FAILED", "TRAINER_ERROR"]
    assert (failed.count, failed.text) == (1, "the trainer raised an error")
    assert failed.example.startswith("ValueError: \ufffd")
    assert len(failed.example.encode()) <= 300
    groups = {(each.name, each.value): (each.assigned, each.reported, each.merged) for each in details.labels}
    assert groups == {
        ("region", "eu"): (2, 1, 0),
        ("region", "us"): (2, 0, 0),
        ("serial", "1"): (1, 1, 0),
        ("serial", "2"): (1, 0, 0),
    }

    for request, text in (
        (S.ShowRoundRequest(job=job, round=2), "no such round or attempt: 2; the last one is 1"),
        (S.ShowRoundRequest(job=job, round=1, attempt=3), "attempt 3 at round 1; it has 1"),
        (S.ShowRoundRequest(job=job), "0; the last one is 1"),
    ):
        assert text in await refused(site.operator.jobs.ShowRound(request))


async def test_assignments_are_listed(site: Site) -> None:
    job, ids = await _mix(site)

    async def listed(**options: Any) -> list[admin_pb2.AssignmentDetails]:
        page = await site.operator.jobs.ListAssignments(S.ListAssignmentsRequest(**options))
        assert page.total == len(page.assignments)
        return list(page.assignments)

    rows = {row.client_id: row for row in await listed(job=job)}
    assert [*rows] == sorted(ids)
    reported, busy = rows[ids[0]], rows[ids[3]]
    assert (reported.state, reported.job_name, reported.round, reported.attempt) == ("REPORTED", "digits", 1, 1)
    assert reported.num_examples > 0
    assert reported.norm > 0
    assert reported.ended_unix_s >= reported.assigned_unix_s > 0
    assert (busy.state, busy.progress, busy.ended_unix_s) == ("TRAINING", 0.5, 0.0)
    assert not busy.HasField("num_examples")
    ended = await listed(job=job, states=["FAILED", "REJECTED"])
    assert {row.client_id: row.state for row in ended} == {ids[1]: "FAILED", ids[2]: "REJECTED"}
    for same in (await listed(client_id=ids[3]), await listed(job=job, client_id=ids[3])):
        assert [(row.client_id, row.state) for row in same] == [(ids[3], "TRAINING")]
    assert await listed(job=job, round=2) == await listed(job=job, attempt=2) == []

    async def has_download() -> bool:
        return all(row.downloaded_unix_s > 0 for row in await listed(client_id=ids[3]))

    await until(has_download, "the time of a download")  # the model is part of the assignment
    assert (await site.operator.rounds(job))[0].downloaded == 4
    jobs = site.operator.jobs
    for request, text in (
        (S.ListAssignmentsRequest(), "expected a job, a client_id, or both"),
        (S.ListAssignmentsRequest(client_id=ids[0], round=1), "expected a job, too"),
        (S.ListAssignmentsRequest(job=job, states=["LOST"]), "'LOST' is unknown"),
        (S.ListAssignmentsRequest(job=job, round=2**32 - 1), "at most"),
    ):
        assert text in await refused(jobs.ListAssignments(request))


async def test_a_private_job_shows_no_claims_and_no_small_groups(site: Site) -> None:
    job = await site.operator.start(job_file("private", goal=6, close="deadline", more=PRIVATE))
    clients = await site.fleet(6)
    regions = ["eu"] * 5 + ["us"]
    work = await asyncio.gather(
        *(client.assignment(labels={"region": each}) for client, each in zip(clients, regions, strict=True))
    )
    await clients[0].deliver(work[0].token, update_of(initial_model(), 0))
    details = await site.operator.jobs.ShowRound(S.ShowRoundRequest(job=job, round=1))
    assert [(each.value, each.assigned) for each in details.labels] == [("eu", 5)]
    (row,) = (
        await site.operator.jobs.ListAssignments(S.ListAssignmentsRequest(job=job, states=["REPORTED"]))
    ).assignments
    assert row.client_id == clients[0].client_id
    assert not row.HasField("num_examples")
    assert not row.HasField("norm")
    assert not row.metrics


async def test_the_fleet_is_counted(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    clients = await site.fleet(3)
    for n, client in enumerate(clients):
        await client.check_in(0.0, {"region": "eu" if n else "us"}, trainers=())
    other = await site.enroll("other")
    await site.operator.clients.RevokeClient(S.RevokeClientRequest(client_id=clients[2].client_id))
    await clients[0].assignment(labels={"region": "us"})
    fleet = await site.operator.clients.ShowFleet(S.ShowFleetRequest())
    assert [(p.population, p.num_clients, p.num_busy, p.num_revoked) for p in fleet.populations] == [
        ("demo", 3, 1, 1),
        ("other", 1, 0, 0),
    ]
    assert [(each.name, each.value, each.count) for each in fleet.labels] == [("region", "eu", 1), ("region", "us", 1)]
    assert sum(each.count for each in fleet.versions) == 3
    (hour,) = fleet.hours
    assert (hour.population, hour.num_seen) == ("demo", 3)
    assert hour.hour_unix_s % 3600 == 0
    only = await site.operator.clients.ShowFleet(S.ShowFleetRequest(population="other"))
    assert ([p.population for p in only.populations], list(only.labels), list(only.hours)) == (["other"], [], [])
    assert other.client_id


async def test_the_availability_is_stored_when_the_server_stops(folder: Path) -> None:
    async with daemons.running(folder) as site:
        client, _ = await site.fleet(2)
        poll = asyncio.ensure_future(client.check_in(60.0))
        await site.waiting(1)
        (hour,) = (await site.operator.clients.ShowFleet(S.ShowFleetRequest())).hours
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection:
        rows = list(connection.execute("SELECT population, hour_unix_s, num_seen FROM availability"))
    assert ("demo", hour.hour_unix_s, 1) in rows
    async with daemons.running(folder) as site:  # which has seen no client yet
        assert hour in (await site.operator.clients.ShowFleet(S.ShowFleetRequest())).hours


async def test_programs_call_the_same_methods(site: Site) -> None:
    job, ids = await _mix(site)

    def call() -> None:
        with AdminClient(Profile(site.address, insecure=True, token=ADMIN_TOKEN)) as admin:
            running = admin.iter_jobs(statuses=[S.JOB_STATUS_RUNNING], search="dig", newest_first=True)
            assert [each.job_id for each in running] == [job]
            assert admin.page(S.ListJobsRequest(page_size=1)).total == 1
            assert [each.round for each in admin.iter_rounds(job, round_=1, newest_first=True)] == [1]
            assert admin.page(S.ListRoundsRequest(job=job)).total == 1
            assert not admin.page(S.ListRoundsRequest(job=job, num_samples=5)).rounds
            assert admin.show_round(job, 1, 1).round.assigned == 4
            failed = list(admin.iter_assignments(job=job, states=["FAILED"]))
            assert [each.client_id for each in failed] == [ids[1]]
            assert admin.page(S.ListAssignmentsRequest(job=job, page_size=1)).total == 4
            assert [each.client_id for each in admin.iter_clients("demo", state="busy")] == [ids[3]]
            eu = admin.iter_clients(labels={"region": "eu"}, search="c-")
            assert {each.client_id for each in eu} == set(ids[:2])
            assert admin.page(S.ListClientsRequest(page_size=2)).total == 4
            assert admin.show_client(ids[0]).population == "demo"
            assert [each.num_clients for each in admin.show_fleet("demo").populations] == [4]
            assert [each.action for each in admin.iter_audit(action="job started")] == ["job started"]
            newest, *_ = admin.iter_audit(limit=1, newest_first=True)
            assert admin.page(S.ListAuditRequest()).total == newest.sequence
            assert admin.page(S.ListEnrollmentsRequest()).total == 4

    await asyncio.to_thread(call)
