"""Who may call what: every method, every role, every kind of invalid credential."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio

from fedplat import wire
from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.errors import ServerRefusedError
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, events_pb2, options_pb2
from fedplat_server.config import Limits
from fedplat_server.database.store import open_store
from fedplat_server.records import audit
from fedplat_server.records.audit import Role, new_operator_token
from fedplat_server.rpc import operator_access
from fedplat_server.rpc.operator_access import NEEDED_ROLES
from support import access, daemons, raw_client
from support.access import ADMIN_NAME, ADMIN_TOKEN
from support.daemons import Operator, Site, digest_of, update_of
from support.jobs import job_file
from support.store import audit_log

pytestmark = pytest.mark.calm  # they look at single answers
LIST_JOBS, GET_STATUS = "/fedplat.wire.v1.Jobs/ListJobs", "/fedplat.wire.v1.Operators/GetStatus"


def call(site: Site, method: str, *metadata: tuple[str, str]) -> Any:
    """A call of any method (`/service/name`) with raw bytes; it returns the first response."""

    def begin() -> Any:
        return anext(aiter(site.channel.stream_stream(method)(iter([b""]), metadata=metadata)))

    return raw_client.again(begin)  # the server refuses while the client still sends


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


async def refusal(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), caught.value.details() or ""


async def token_of(site: Site, role: Role, **options: Any) -> str:
    token, _ = new_operator_token()
    await access.add_operator(site.store.inner, token, role, **options)
    return token


PAST_EVENTS = events_pb2.WatchEventsRequest(after_sequence=0).SerializeToString()


async def noted(site: Site) -> list[tuple[str, str, str]]:
    return [(row.actor, row.action, row.subject) for row in await site.store.inner.audit.list_rows()]


def test_every_method_has_a_least_role() -> None:
    assert set(operator_access.NEEDED_ROLES) == set(access.METHODS)
    by_role = {
        role: [name.rpartition("/")[2] for name in access.METHODS if NEEDED_ROLES[name] is role] for role in Role
    }
    assert by_role == {
        Role.VIEWER: [
            *("ListJobs", "ShowJob", "WatchJob", "ListRounds", "ShowRound", "ListAssignments", "ListModelVersions"),
            *("ExportModel", "ListClients", "ShowClient", "ShowFleet", "GetStatus", "ShowPrivacy"),
            *("ListEvents", "WatchEvents"),
        ],
        Role.OPERATOR: [
            *("UploadModel", "CreateJob", "StartJob", "PauseJob", "ResumeJob", "CancelJob", "DeleteJob"),
            *("SetJob", "RollbackJob"),
            *("RevokeClient", "CreateEnrollment", "ListEnrollments", "RevokeEnrollment", "ListAudit"),
            *("ListWebhooks", "ListDeliveries"),
        ],
        Role.ADMIN: [
            *("AddOperator", "ListOperators", "RemoveOperator", "SetPrivacyBudget", "RemovePrivacyBudget"),
            *("AddWebhook", "RemoveWebhook", "TestWebhook"),
        ],
    }


def test_a_method_without_a_role_is_an_error_when_the_server_starts() -> None:
    """The roles are read when the module is imported, before a daemon has taken its port."""
    file = descriptor_pb2.FileDescriptorProto(name="roleless.proto", package="test", syntax="proto3")
    file.message_type.add(name="Nothing")
    service = file.service.add(name="Roleless")
    with_role = service.method.add(name="Look", input_type=".test.Nothing", output_type=".test.Nothing")
    with_role.options.Extensions[options_pb2.needed_role] = options_pb2.ROLE_VIEWER
    assert operator_access.read_needed_roles([described(file)]) == {"/test.Roleless/Look": Role.VIEWER}
    service.method.add(name="Change", input_type=".test.Nothing", output_type=".test.Nothing")
    with pytest.raises(ValueError, match=r"test.Roleless.Change names no role .*needed_role"):
        operator_access.read_needed_roles([described(file)])


def described(file: descriptor_pb2.FileDescriptorProto) -> ServiceDescriptor:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(options_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return pool.FindServiceByName("test.Roleless")


@pytest.mark.parametrize("method", access.METHODS)
async def test_no_operator_gets_in_without_a_token(site: Site, method: str) -> None:
    code, text = await refusal(call(site, method))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "fedplat-server operator add NAME --to FILE" in text
    assert text.endswith("no token was sent")


@pytest.mark.parametrize("role", Role)
async def test_each_role_may_call_what_needs_it_and_nothing_more(site: Site, role: Role) -> None:
    token = await token_of(site, role)
    for method in access.METHODS:
        needed = NEEDED_ROLES[method]
        content = PAST_EVENTS if method.endswith("/WatchEvents") else b""  # else it would wait for a new event
        made = site.channel.stream_stream(method)(iter([content]), metadata=(bearer(token),))
        if role.includes(needed):
            # The role is accepted; what follows is up to the handler.
            result = (await asyncio.gather(anext(aiter(made), None), return_exceptions=True))[0]
            code = result.code() if isinstance(result, aio.AioRpcError) else None
            assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), method
            made.cancel()
        else:
            code, text = await refusal(anext(aiter(made)))
            assert code is grpc.StatusCode.PERMISSION_DENIED, method
            assert f"needs the role {needed}" in text


@pytest.mark.parametrize("role", Role)
async def test_the_status_names_the_operator_who_asks(site: Site, role: Role) -> None:
    token = await token_of(site, role)
    status = await Operator(site.channel, token).operators.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.operator, status.role) == (access.name_of(token), str(role))


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Basic abc")],
        [("authorization", "Bearer")],
        [bearer("")],
        [bearer("fedplat_op_short")],
        [bearer("x" * 6000)],
        [bearer(ADMIN_TOKEN), bearer(ADMIN_TOKEN)],
        [bearer(ADMIN_TOKEN.replace("fedplat_op_", ""))],
        [bearer(new_operator_token()[0])],
    ],
)
async def test_what_is_no_known_token_is_refused(site: Site, metadata: list[tuple[str, str]]) -> None:
    code, _ = await refusal(call(site, LIST_JOBS, *metadata))
    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_is_no_operator(site: Site) -> None:
    client = await site.enroll()
    code, _ = await refusal(site.channel.unary_unary(LIST_JOBS)(b"", metadata=client.signed_bytes("ListJobs", b"")))
    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_expires(site: Site) -> None:
    good = await token_of(site, Role.VIEWER, expires_unix_s=time.time() + 3600)
    over = await token_of(site, Role.ADMIN, expires_unix_s=1.6e9)
    await call(site, GET_STATUS, bearer(good))
    code, text = await refusal(call(site, GET_STATUS, bearer(over)))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert text.endswith("expired 2020-09-13 12:26 UTC")


async def test_an_operator_is_added_works_and_is_removed(site: Site) -> None:
    admin = site.operator.operators
    made = await admin.AddOperator(admin_pb2.AddOperatorRequest(name="ben", role="operator", expires_in_s=3600))
    assert made.token.startswith("fedplat_op_")
    ben = Operator(site.channel, made.token)
    job = await ben.start(job_file())
    names = [one.name for one in (await admin.ListOperators(admin_pb2.ListOperatorsRequest())).operators]
    assert "ben" in names
    await admin.RemoveOperator(admin_pb2.RemoveOperatorRequest(name="ben"))
    code, text = await refusal(ben.show(job))
    assert (code, text.endswith("the token is unknown, or its operator was removed")) == (
        grpc.StatusCode.UNAUTHENTICATED,
        True,
    )
    assert [entry for entry in await noted(site) if entry[0] != "server"][:5] == [
        (ADMIN_NAME, "operator added", "ben"),
        ("ben", "model uploaded", digest_of(daemons.initial_model().to_bytes())),
        ("ben", "job created", job),
        ("ben", "job started", job),
        (ADMIN_NAME, "operator removed", "ben"),
    ]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (admin_pb2.AddOperatorRequest(name="", role="viewer"), grpc.StatusCode.INVALID_ARGUMENT),
        (admin_pb2.AddOperatorRequest(name="a\nb", role="viewer"), grpc.StatusCode.INVALID_ARGUMENT),
        (admin_pb2.AddOperatorRequest(name="a", role="root"), grpc.StatusCode.INVALID_ARGUMENT),
        (admin_pb2.AddOperatorRequest(name="a", role="viewer", expires_in_s=-1), grpc.StatusCode.INVALID_ARGUMENT),
        (
            admin_pb2.AddOperatorRequest(name="a", role="viewer", expires_in_s=float("nan")),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            admin_pb2.AddOperatorRequest(name=ADMIN_NAME, role="viewer"),
            grpc.StatusCode.ALREADY_EXISTS,
        ),
    ],
)
async def test_operators_that_cannot_be_made(
    site: Site, request_: admin_pb2.AddOperatorRequest, code: grpc.StatusCode
) -> None:
    assert (await refusal(site.operator.operators.AddOperator(request_)))[0] is code


async def test_the_last_admin_stays(site: Site) -> None:
    request = admin_pb2.RemoveOperatorRequest(name=ADMIN_NAME)
    await token_of(site, Role.ADMIN, expires_unix_s=1.0)  # an admin whose token has expired does not count
    assert (await refusal(site.operator.operators.RemoveOperator(request)))[0] is grpc.StatusCode.FAILED_PRECONDITION
    other = await token_of(site, Role.ADMIN)
    await site.operator.operators.RemoveOperator(request)
    assert (await refusal(call(site, LIST_JOBS, bearer(ADMIN_TOKEN))))[0] is grpc.StatusCode.UNAUTHENTICATED
    await call(site, LIST_JOBS, bearer(other))
    unknown = Operator(site.channel, other).operators.RemoveOperator(admin_pb2.RemoveOperatorRequest(name="nobody"))
    assert (await refusal(unknown))[0] is grpc.StatusCode.NOT_FOUND


async def test_of_two_admins_who_remove_each_other_one_stays(tmp_path: Path, any_database: str) -> None:
    """Both have passed every check when the first removal begins."""
    async with daemons.running(tmp_path, database=any_database) as site:
        other = await token_of(site, Role.ADMIN)
        both = asyncio.Barrier(2)

        async def together() -> None:
            await both.wait()

        site.store.before["remove_operator"] = together
        names = {ADMIN_TOKEN: access.name_of(other), other: ADMIN_NAME}
        stubs = {token: Operator(site.channel, token).operators for token in names}
        answers = await asyncio.gather(
            *(stubs[token].RemoveOperator(admin_pb2.RemoveOperatorRequest(name=name)) for token, name in names.items()),
            return_exceptions=True,
        )
        codes = [answer.code() for answer in answers if isinstance(answer, aio.AioRpcError)]
        assert codes == [grpc.StatusCode.FAILED_PRECONDITION]
        assert len(await site.store.inner.operators.list_operators()) == 1


async def test_who_guesses_is_held_up_and_fills_no_log(folder: Path) -> None:
    """The delay is longer than the test: calls over the limit are refused at once, the others wait."""
    async with daemons.running(folder, limits=Limits(refusal_delay_s=3600.0)) as site:
        stub = admin_pb2_grpc.JobsStub(site.channel)
        guesses = [stub.ListJobs(admin_pb2.ListJobsRequest()) for _ in range(operator_access.MAX_PENDING + 1)]
        done, waiting = await asyncio.wait(
            [asyncio.ensure_future(refusal(guess)) for guess in guesses], return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result()[0] for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        await site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest())  # from the same address, with a good token

        async def refused() -> list[tuple[str, str, str]]:
            return [entry for entry in await noted(site) if entry[1] == audit.AuditAction.LOGIN_REFUSED]

        async def is_noted() -> bool:
            return bool(await refused())

        await daemons.until(is_noted, "the note of a refused call")
        assert await refused() == [("ipv4:127.0.0.1", "login refused", LIST_JOBS)]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_role_that_is_too_low_is_held_up_noted_and_counted(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(refusal_delay_s=3600.0)) as site:
        token = await token_of(site, Role.VIEWER)
        viewer = Operator(site.channel, token)
        tries = [
            viewer.operators.AddOperator(admin_pb2.AddOperatorRequest()) for _ in range(operator_access.MAX_PENDING + 1)
        ]
        done, waiting = await asyncio.wait(
            [asyncio.ensure_future(refusal(one)) for one in tries], return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result()[0] for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        await viewer.jobs.ListJobs(admin_pb2.ListJobsRequest())  # calls that the role may make are still answered
        await site.operator.operators.AddOperator(admin_pb2.AddOperatorRequest(name="ben", role="viewer"))

        async def rows() -> list[audit.AuditRow]:
            found = await site.store.inner.audit.list_rows()
            return [row for row in found if row.action == audit.AuditAction.ROLE_REFUSED]

        async def is_noted() -> bool:
            return bool(await rows())

        await daemons.until(is_noted, "the note of a refused call")
        (row,) = await rows()
        assert (row.actor, row.subject) == (access.name_of(token), "/fedplat.wire.v1.Operators/AddOperator")
        assert json.loads(row.details)["why"].startswith("AddOperator needs the role admin")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.fault("F42")
@pytest.mark.slow
async def test_refused_calls_from_many_addresses_make_few_rows(folder: Path) -> None:
    """Each call comes from another address, according to a trusted proxy."""
    limits = Limits(refusal_delay_s=0.0, notes_per_minute=7.0)
    async with daemons.running(folder, limits=limits, trusted_proxies=("127.0.0.1",)) as site:
        for number in range(300):
            address = (
                "x-forwarded-for",
                f"2001:db8:{number:x}::1" if number % 2 else f"10.0.{number // 256}.{number % 256}",
            )
            await refusal(call(site, LIST_JOBS, address))
        for number in range(300):  # one customer of a provider: all in one /64
            await refusal(call(site, LIST_JOBS, ("x-forwarded-for", f"2001:db8:ffff::{number:x}")))
    store = await open_store(f"sqlite:///{folder / 'fedplat.sqlite'}")
    rows = await store.audit.list_rows()
    assert audit_log.find_problems(rows, await store.audit.read_head()) == []
    await store.close()
    noted = [row for row in rows if row.action == audit.AuditAction.LOGIN_REFUSED]
    left_out = [json.loads(row.details)["num_rows"] for row in rows if row.action == audit.AuditAction.NOT_NOTED]
    assert 7 <= len(noted) <= 9  # a few more come with time
    assert len(noted) + sum(left_out) == 301  # every network has a row or is counted in one
    assert len(left_out) <= 3


@pytest.mark.fault("F42")
async def test_a_client_that_fences_itself_makes_one_row_an_hour(site: Site) -> None:
    fenced = await site.enroll(key="the-one-client")
    for _ in range(20):
        latest = await site.enroll(key="the-one-client")
        assert (await refusal(fenced.check_in(0.0)))[0] is grpc.StatusCode.PERMISSION_DENIED
        fenced = latest
    assert len([entry for entry in await noted(site) if entry[1] == audit.AuditAction.CLIENT_FENCED]) == 1


async def test_models_that_come_and_go_are_noted(site: Site) -> None:
    job = await site.operator.create(job_file())
    viewer = Operator(site.channel, await token_of(site, Role.VIEWER))
    for _ in range(3):
        await viewer.export(job.job_id, 0)
    rows = [row for row in await site.store.inner.audit.list_rows() if row.action.startswith("model")]
    assert [(row.action, row.subject) for row in rows] == [
        (audit.AuditAction.MODEL_UPLOADED, job.model.digest),
        (audit.AuditAction.MODEL_EXPORTED, job.job_id),
    ]
    assert json.loads(rows[1].details) == {"version": 0, "digest": job.model.digest}
    assert rows[0].actor == ADMIN_NAME
    assert rows[1].actor != ADMIN_NAME


async def test_an_operators_requests_are_counted_and_those_of_others_go_on(folder: Path) -> None:
    limits = Limits(refusal_delay_s=0.0, operator_requests_per_minute=10.0)
    async with daemons.running(folder, limits=limits) as site:
        token = await token_of(site, Role.VIEWER)
        greedy = bearer(token)
        answers = await asyncio.gather(*(call(site, GET_STATUS, greedy) for _ in range(30)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, aio.AioRpcError)]
        assert len(answers) - len(refused) in (10, 11, 12)
        trailers = dict(refused[0].trailing_metadata() or ())
        assert trailers["fedplat-code"] == "TOO_MANY_REQUESTS"
        earliest, latest = map(float, str(trailers[wire.METADATA_RETRY]).split())
        assert latest > earliest >= 1.0
        with (
            AdminClient(Profile(server=site.address, token=token, insecure=True)) as client,
            pytest.raises(ServerRefusedError, match=r"at most 10 a minute; try again in [0-9.]+ s to [0-9.]+ s$"),
        ):
            await asyncio.to_thread(client.list_jobs)
        await site.operator.operators.GetStatus(admin_pb2.GetStatusRequest())


async def test_an_operators_calls_under_way_are_counted_until_they_end(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(refusal_delay_s=0.0, operator_calls=3)) as site:
        job = await site.operator.create(job_file())
        viewer = Operator(site.channel, await token_of(site, Role.VIEWER))
        watches = [viewer.watch(job.job_id) for _ in range(3)]
        for watch in watches:
            await anext(aiter(watch))
        code, text = await refusal(viewer.show(job.job_id))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text.endswith("at most 3 of one operator")
        await site.operator.show(job.job_id)
        watches[0].cancel()

        async def free() -> bool:
            try:
                await viewer.show(job.job_id)
            except aio.AioRpcError:
                return False
            return True

        await daemons.until(free, "a call that has ended")
        for watch in watches:
            watch.cancel()


async def test_nothing_works_while_operators_cannot_be_looked_up(site: Site) -> None:
    site.store.outage = True
    assert (await refusal(site.operator.show("x")))[0] is grpc.StatusCode.UNAVAILABLE
    site.store.outage = False


@pytest.mark.fault("F13")
async def test_a_report_with_other_content_is_refused_and_noted_once(site: Site) -> None:
    job = await site.operator.start(job_file(goal=2))
    client, other = await site.fleet(2)
    mine, _ = await site.assign([client, other])
    first = update_of(daemons.initial_model(), 1).to_bytes()
    again = update_of(daemons.initial_model(), 2).to_bytes()
    assert (await client.deliver(mine.token, first)).HasField("receipt")
    for _ in range(2):
        answer = await client.report(mine.token, digest_of(again))
        assert daemons.reason_name(answer.refusal.reason) == "REJECTED_CONFLICT"
    assert (await client.report(mine.token, digest_of(first))).HasField("receipt")
    rows = [row for row in await site.store.inner.audit.list_rows() if row.action == audit.AuditAction.REPORT_CONFLICT]
    assert [(row.actor, row.subject) for row in rows] == [(client.client_id, f"{job} round 1 attempt 1")]
    assert json.loads(rows[0].details) == {"first": digest_of(first)[:16], "other": digest_of(again)[:16]}


async def test_the_audit_log_is_read_in_pages(site: Site) -> None:
    await site.store.inner.audit.append(
        [audit.AuditEntry("a", audit.AuditAction.JOB_PAUSED, str(n)) for n in range(1500)]
    )
    seen: list[admin_pb2.AuditEvent] = []
    while True:
        after = seen[-1].sequence if seen else 0
        page = await site.operator.operators.ListAudit(admin_pb2.ListAuditRequest(after_sequence=after))
        if not page.events:
            break
        seen += page.events
    rows = await site.store.inner.audit.list_rows(limit=10_000)
    assert [event.hash for event in seen] == [row.hash for row in rows]
    assert audit_log.find_problems(rows, await site.store.inner.audit.read_head()) == []
