"""Lists come in pages that fit into messages, whatever is in the database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc import aio

from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.texts import MAX_TEXT_BYTES
from fedplat.wire.v1 import admin_pb2, events_pb2
from fedplat_server.records import audit
from fedplat_server.rpc import pages
from support import access, daemons
from support.access import ADMIN_TOKEN
from support.daemons import Site
from support.jobs import job_file

pytestmark = pytest.mark.calm
WIDE = "\U0001f600"
PRIVATE = (
    '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
    '[privacy]\nparticipation = "fixed"\nnoise_multiplier = 10.0\ndelta = 1e-5\n'
)


def execute(folder: Path, statement: str, rows: Iterable[Sequence[object]] = ((),)) -> None:
    """Writes to the database of a daemon that runs, past it."""
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite", timeout=60)) as connection, connection:
        connection.executemany(statement, rows)


async def each_page(method: Callable[..., Any], request: Any) -> list[Any]:
    """All pages, and the next token of each but the last."""
    found = [await method(request)]
    while token := found[-1].next_page_token:
        request.page_token = token
        found.append(await method(request))
    return found


def sizes(found: Iterable[Message]) -> list[int]:
    return [page.ByteSize() for page in found]


ATTEMPTS = (
    "INSERT INTO attempts (job_id, round, number, kind, phase, reason, base_version, goal, minimum, target,"
    " opened_unix_s, ended_unix_s, metrics) VALUES (?, ?, 1, 'TRAIN', 'COMMITTED', '', ?, 1, 1, 1, 1.0, 2.0, ?)"
)
WEBHOOKS = (
    "INSERT INTO webhooks (webhook_id, url, types, secret, created_unix_s, cursor, last_result)"
    " VALUES (?, 'https://example.org', '[]', 'whsec_', 1.0, ?, '')"
)
DELIVERIES = (
    "INSERT INTO deliveries (event_sequence, webhook_id, state, num_attempts, result) VALUES (?, ?, 'delivered', 1, '')"
)
VERSIONS = (
    "INSERT INTO model_versions (job_id, version, round, attempt, digest, size_bytes, state_digest, num_updates,"
    " total_weight, created_unix_s, metrics) VALUES (?, ?, ?, 1, ?, 1, '', 1, 1.0, 1.0, ?)"
)
ASSIGNMENTS = (
    "INSERT INTO assignments (job_id, round, number, client_id, token_hash, state, text, digest, num_examples, weight,"
    " metrics, update_bytes) VALUES (?, ?, 1, ?, ?, 'MERGED', '', '', 1.0, 1.0, '{}', 7)"
)
CLIENTS = (
    "INSERT INTO clients (client_id, population, labels, software_version, idempotency_key, enrolled_unix_s,"
    " public_key, session_number) VALUES (?, 'demo', ?, '1', ?, 1.0, ?, 0)"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("F47")
async def test_twenty_thousand_rounds(site: Site) -> None:
    job = (await site.operator.create(job_file())).job_id
    num_rounds = 20_000
    numbers = range(1, num_rounds + 1)
    execute(site.folder, ATTEMPTS, ((job, n, n - 1, "{}") for n in numbers))
    execute(site.folder, VERSIONS, ((job, n, n, f"{n:064}", json.dumps({"score": n})) for n in numbers))
    execute(site.folder, ASSIGNMENTS, ((job, n, "c", f"{n:032}".encode()) for n in numbers))

    def read() -> None:
        with AdminClient(Profile(site.address, insecure=True, token=ADMIN_TOKEN)) as admin:
            for n, one in zip(numbers, admin.iter_rounds(job), strict=True):
                assert (one.round, one.reported, one.update_bytes, one.server_metrics["score"]) == (n, 1, 7, n)
            assert [one.model.version for one in admin.iter_versions(job, 2000)] == list(range(2000))
            assert [one.round for one in admin.iter_rounds(job, 3)] == [1, 2, 3]

    await asyncio.to_thread(read)
    assert len(await site.operator.export(job, 0)) == (await site.operator.show(job)).model.size_bytes


@pytest.mark.fault("F47")
async def test_metrics_of_earlier_versions_cut_the_pages_of_rounds(site: Site) -> None:
    """360 rounds with 64 new metrics of 400 bytes each, as clients could report them."""
    job = (await site.operator.create(job_file())).job_id
    metrics = [
        json.dumps({f"{n:03}{i:02}" + WIDE * 98: 0.5 for i in range(64)}, ensure_ascii=False) for n in range(360)
    ]
    execute(site.folder, ATTEMPTS, ((job, n + 1, n, metrics[n]) for n in range(360)))
    found = await each_page(site.operator.jobs.ListRounds, admin_pb2.ListRoundsRequest(job=job))
    assert [one.round for page in found for one in page.rounds] == list(range(1, 361))
    assert all(len(one.client_metrics) == 64 for page in found for one in page.rounds)
    assert len(found) > 8
    assert max(sizes(found)) < pages.MAX_BYTES + 2**16


@pytest.mark.fault("F47")
async def test_labels_of_earlier_versions_cut_the_pages_of_clients(site: Site) -> None:
    """130 clients with 64 labels of 4-byte characters each, as they could enroll."""
    labels = json.dumps({chr(0x20000 + n) * 63: WIDE * 200 for n in range(64)})
    ids = [f"c-{n:016x}" for n in range(130)]
    execute(site.folder, CLIENTS, ((name, labels, name, name.encode()) for name in ids))
    found = await each_page(site.operator.clients.ListClients, admin_pb2.ListClientsRequest())
    assert [one.client_id for page in found for one in page.clients] == ids
    assert max(sizes(found)) < pages.MAX_BYTES + 2**16


@pytest.mark.fault("F46")
async def test_labels_are_bounded_in_bytes(site: Site) -> None:
    client = await site.enroll()
    bad = {
        "a long name": {chr(0x20000) * 16: ""},
        "a long value": {"a": WIDE * 51},
        "too much in all": {f"label_{n}": WIDE * 50 for n in range(41)},
    }
    for name, labels in bad.items():
        with pytest.raises(aio.AioRpcError) as caught:
            await client.check_in(0.0, labels)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
    most = {f"label_{n}": WIDE * 50 for n in range(39)}
    await client.check_in(0.0, most)
    (listed,) = (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest())).clients
    assert listed.labels == most


@pytest.mark.fault("F47")
@pytest.mark.slow
async def test_jobs_are_listed_without_their_files(site: Site) -> None:
    padding = "#" * (2**18 - 2**12)
    jobs = [(await site.operator.create(job_file(f"job-{n}", more=padding))).job_id for n in range(9)]
    found = await each_page(site.operator.jobs.ListJobs, admin_pb2.ListJobsRequest())
    assert [one.job_id for page in found for one in page.jobs] == jobs
    assert sum(sizes(found)) < 2**14
    assert padding in (await site.operator.show(jobs[0])).job_file


@pytest.mark.fault("F47")
async def test_every_list_has_pages(site: Site) -> None:
    jobs, clients, operators = site.operator.jobs, site.operator.clients, site.operator.operators
    events, webhooks = site.operator.event_log, site.operator.webhooks
    for n in range(3):
        await site.enroll()
        await operators.AddOperator(admin_pb2.AddOperatorRequest(name=f"anna-{n}", role="viewer"))
        await site.operator.create(job_file(f"job-{n}", close="deadline", more=PRIVATE))
    job = (await site.operator.show("job-0")).job_id
    execute(site.folder, ATTEMPTS, ((job, n, n, "{}") for n in (1, 2, 3)))
    execute(site.folder, VERSIONS, ((job, n, n, f"{n:064}", "{}") for n in (1, 2, 3)))
    execute(site.folder, ASSIGNMENTS, ((job, n, f"c-{n}", f"{n}".encode()) for n in (1, 2, 3)))
    execute(site.folder, WEBHOOKS, ((f"w-{n:012x}", 2**40) for n in (1, 2, 3)))  # no event is scheduled for them
    execute(site.folder, DELIVERIES, ((n, f"w-{n:012x}") for n in (1, 2, 3)))
    lists: dict[str, tuple[Any, Any, Callable[[Any], Sequence[Message]]]] = {
        "ListJobs": (jobs.ListJobs, admin_pb2.ListJobsRequest(), lambda page: page.jobs),
        "ListRounds": (jobs.ListRounds, admin_pb2.ListRoundsRequest(job=job), lambda page: page.rounds),
        "ListClients": (clients.ListClients, admin_pb2.ListClientsRequest(), lambda page: page.clients),
        "ListEnrollments": (clients.ListEnrollments, admin_pb2.ListEnrollmentsRequest(), lambda page: page.enrollments),
        "ListAssignments": (
            jobs.ListAssignments,
            admin_pb2.ListAssignmentsRequest(job=job),
            lambda page: page.assignments,
        ),
        "ListModelVersions": (
            jobs.ListModelVersions,
            admin_pb2.ListModelVersionsRequest(job=job),
            lambda page: page.versions,
        ),
        "ListOperators": (operators.ListOperators, admin_pb2.ListOperatorsRequest(), lambda page: page.operators),
        "ListEvents": (events.ListEvents, events_pb2.ListEventsRequest(), lambda page: page.events),
        "ListWebhooks": (webhooks.ListWebhooks, events_pb2.ListWebhooksRequest(), lambda page: page.webhooks),
        "ListDeliveries": (webhooks.ListDeliveries, events_pb2.ListDeliveriesRequest(), lambda page: page.deliveries),
        "ListAudit": (operators.ListAudit, admin_pb2.ListAuditRequest(), lambda page: page.events),
        "ShowPrivacy": (
            site.operator.privacy.ShowPrivacy,
            admin_pb2.ShowPrivacyRequest(),
            lambda page: [*page.jobs, *page.populations],
        ),
    }
    methods = [method.name for method in access.METHODS.values()]
    assert {name for name in methods if name.startswith("List")} == {name for name in lists if name.startswith("List")}
    for name, (method, request, rows) in lists.items():
        (whole,) = await each_page(method, request)
        request.page_size = 2
        found = await each_page(method, request)
        assert [len(rows(page)) for page in found[:-1]] == [2] * (len(found) - 1), name
        # The daemon knows of version 0 alone; the others have no total.
        if "total" in whole.DESCRIPTOR.fields_by_name and name != "ListModelVersions":
            assert {page.total for page in (whole, *found)} == {len(rows(whole))}, name
        assert [row for page in found for row in rows(page)] == [*rows(whole)], name
        assert len(found) >= 2, name
        for token in ("\x00", "' OR 1=1 --", "9" * 5000, "-1", "1.2/3", "c-\U0001f600", "x" * 2**20):
            request.page_token = token
            with pytest.raises(aio.AioRpcError) as caught:
                await method(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, token[:20])


async def test_the_audit_log_is_followed_from_any_row(site: Site) -> None:
    entries = [audit.AuditEntry("a", audit.AuditAction.JOB_PAUSED, str(n), {"much": "x" * 20_000}) for n in range(200)]
    await site.store.inner.audit.append(entries)
    found = await each_page(site.operator.operators.ListAudit, admin_pb2.ListAuditRequest(after_sequence=7))
    (last,) = await site.store.inner.audit.list_rows(200)  # the start of the server is noted, too
    assert [event.sequence for page in found for event in page.events] == list(range(8, last.sequence + 1))
    assert max(sizes(found)) < pages.MAX_BYTES + 2**16
    assert len(found) > 3


@pytest.mark.slow
@pytest.mark.fault("F46")
async def test_a_watch_passes_what_was_stored_too_large(folder: Path) -> None:
    text, metrics = "\x1b" * 9 * 2**20, json.dumps({"x" * 9 * 2**20: 1.0})
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(goal=1))
        client = await site.enroll()
        work = await client.assignment()
        execute(folder, "UPDATE history SET reason = ?, metrics = ? WHERE job_id = ?", [(text, metrics, job)] * 3)
        execute(folder, "UPDATE assignments SET text = ?, metrics = ?", [(text, metrics)])
        execute(folder, "UPDATE attempts SET reason = ?, metrics = ?", [(text, metrics)])
        await _looks_short(site, job)
    execute(folder, "UPDATE jobs SET reason = ?", [(text,)])
    async with daemons.running(folder) as site:
        await _looks_short(site, job)
        await client.over(site.channel).open_session()
        again = client.over(site.channel)
        await again.open_session()
        await again.deliver(work.token, daemons.update_of(daemons.initial_model(), 0))
        events = await site.operator.events(job)
        assert (events[-1].entity, events[-1].to_state) == ("job", "COMPLETED")


async def _looks_short(site: Site, job: str) -> None:
    await site.operator.until(job, "assignment", "TRAINING")
    shown = await site.operator.show(job)
    rounds = (await site.operator.jobs.ListRounds(admin_pb2.ListRoundsRequest(job=job))).rounds
    for reason in (shown.reason, shown.current.reason, rounds[0].reason):
        assert len(reason.encode()) <= MAX_TEXT_BYTES
        assert "\x1b" not in reason
    assert shown.current.reason
