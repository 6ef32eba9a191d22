"""Who may call: tickets, keys and sessions, and how invalid ones are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc import aio

from fedplat import wire
from fedplat.wire import auth
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import admin_pb2, fleet_pb2, model_pb2
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.coordination import revocation
from fedplat_server.database.records import Enrollment, EnrollmentToken
from fedplat_server.database.store import open_store
from fedplat_server.errors import RefusedError
from support import daemons, databases
from support.daemons import Gate, RawClient, Site, initial_model, reason_name, update_of
from support.faulty_store import FaultyStore
from support.jobs import job_file
from support.raw_client import CHALLENGE, Metadata, private_key

S = grpc.StatusCode


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the code of a call that is refused."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    codes = [value for key, value in caught.value.trailing_metadata() if key == auth.METADATA_CODE]
    return caught.value.code(), str(codes[0])


def every_call(client: RawClient) -> tuple[Any, ...]:
    renewal = fleet_pb2.RenewCertificateRequest()
    return (
        client.check_in(0.0),
        client.upload("token", b"content"),
        client.query("token", "0" * 64),
        client.download("0" * 64),
        client.heartbeat("token"),
        client.report("token"),
        client.fail("token", model_pb2.REASON_TRAINER_ERROR),
        client.stub.RenewCertificate(renewal, metadata=client.signed("RenewCertificate", renewal)),
    )


# --- calls within a session ------------------------------------------------------------------------------------------


async def test_every_call_must_be_signed_with_the_clients_key(site: Site) -> None:
    client, stranger = await site.fleet(2)
    client.key = stranger.key
    for call in every_call(client):
        assert await refused(call) == (S.UNAUTHENTICATED, "BAD_SIGNATURE")


async def test_sessions_that_were_never_opened_are_unknown(site: Site) -> None:
    client = await site.enroll()
    for session_id in ("no-session", "x" * 2000, client.client_id):
        client.session_id = session_id
        for call in every_call(client):
            assert await refused(call) == (S.UNAUTHENTICATED, "SESSION_UNKNOWN")


BAD_COUNTERS = ("", "0", "-1", "+1", "1.0", "1e3", "²", "9" * 19, "9" * 20, " 1")


async def test_calls_that_do_not_name_their_caller(site: Site) -> None:
    client = await site.enroll()
    request = fleet_pb2.CheckInRequest(protocol_version=wire.PROTOCOL_VERSION)
    good = dict(client.signed("CheckIn", request))
    cases: list[dict[str, str | bytes]] = [{}, {"authorization": "Bearer abc"}]
    cases += [{key: value for key, value in good.items() if key != missing} for missing in good]
    cases += [{**good, auth.METADATA_COUNTER: counter} for counter in BAD_COUNTERS if counter.isascii()]
    cases += [{**good, auth.METADATA_SIGNATURE: signature} for signature in (b"", b"x" * 63, b"x" * 64)]
    for metadata in cases:
        status, code = await refused(client.stub.CheckIn(request, metadata=tuple(metadata.items())))
        assert (status, code in ("UNAUTHENTICATED", "BAD_SIGNATURE")) == (S.UNAUTHENTICATED, True), metadata
    await client.stub.CheckIn(request, metadata=tuple(good.items()))


@pytest.mark.fault("F21")
async def test_a_replayed_call_is_refused(site: Site) -> None:
    client = await site.enroll()
    request = fleet_pb2.CheckInRequest(protocol_version=wire.PROTOCOL_VERSION)
    metadata = client.signed("CheckIn", request)
    await client.stub.CheckIn(request, metadata=metadata)
    for _ in range(2):
        assert await refused(client.stub.CheckIn(request, metadata=metadata)) == (S.UNAUTHENTICATED, "REPLAYED")
    await client.refusal()  # the session is still open


@pytest.mark.fault("F21")
async def test_calls_in_another_order_are_accepted_once_each(site: Site) -> None:
    client = await site.enroll()
    request = fleet_pb2.CheckInRequest(protocol_version=wire.PROTOCOL_VERSION)
    signed = [client.signed("CheckIn", request) for _ in range(6)]
    for number in (4, 1, 5, 0, 3, 2):
        await client.stub.CheckIn(request, metadata=signed[number])
    for metadata in signed:
        assert await refused(client.stub.CheckIn(request, metadata=metadata)) == (S.UNAUTHENTICATED, "REPLAYED")


@pytest.mark.fault("F21")
async def test_a_signature_fits_one_message_of_one_method_of_one_session(site: Site) -> None:
    client, other = await site.fleet(2)
    request = fleet_pb2.QueryUploadRequest(token="t", digest="0" * 64)
    metadata = client.signed("QueryUpload", request)
    altered = fleet_pb2.QueryUploadRequest(token="u", digest="0" * 64)
    assert (await refused(client.stub.QueryUpload(altered, metadata=metadata)))[1] == "BAD_SIGNATURE"
    heartbeat = fleet_pb2.HeartbeatRequest.FromString(request.SerializeToString()[:3])
    assert (await refused(client.stub.Heartbeat(heartbeat, metadata=metadata)))[1] == "BAD_SIGNATURE"
    elsewhere = {**dict(metadata), auth.METADATA_SESSION: other.session_id}
    assert (await refused(client.stub.QueryUpload(request, metadata=tuple(elsewhere.items()))))[1] == "BAD_SIGNATURE"
    later = {**dict(metadata), auth.METADATA_COUNTER: "77"}
    assert (await refused(client.stub.QueryUpload(request, metadata=tuple(later.items()))))[1] == "BAD_SIGNATURE"
    assert (await refused(client.stub.QueryUpload(request, metadata=metadata)))[1] == "STALE_ASSIGNMENT"


@pytest.mark.fault("F21")
async def test_the_header_of_an_upload_is_signed(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    content = update_of(initial_model(), 0).to_bytes()
    header = fleet_pb2.UploadHeader(token=token, digest=daemons.digest_of(content), size_bytes=len(content))
    signed = fleet_pb2.UploadRequest(header=header)
    header.size_bytes += 1
    parts = [fleet_pb2.UploadRequest(header=header), fleet_pb2.UploadRequest(data=content)]
    assert (await refused(client.stream(lambda: iter(parts), signed)))[1] == "BAD_SIGNATURE"
    assert (await client.deliver(token, content)).HasField("receipt")


async def test_after_a_restart_a_session_is_unknown_and_a_new_one_continues(folder: Any) -> None:
    async with daemons.running(folder) as site:
        client = await site.enroll(key="the-one-client")
    async with daemons.running(folder) as site:
        again = RawClient(site.channel, client.key)
        again.client_id, again.session_id = client.client_id, client.session_id
        assert await refused(again.check_in(0.0)) == (S.UNAUTHENTICATED, "SESSION_UNKNOWN")
        await again.open_session()
        await again.refusal()


# --- one key at two places -------------------------------------------------------------------------------------------


@pytest.mark.fault("F30")
async def test_a_new_session_fences_the_older_one(site: Site) -> None:
    first = await site.enroll(key="the-one-client")
    second = await site.enroll(key="the-one-client")
    assert first.client_id == second.client_id
    await second.refusal()
    for call in every_call(first):
        assert await refused(call) == (S.PERMISSION_DENIED, "FENCED")
    await second.refusal()


# --- proofs of possession --------------------------------------------------------------------------------------------


async def opening(client: RawClient, metadata: Metadata) -> tuple[grpc.StatusCode, str]:
    return await refused(client.stub.OpenSession(client.opening(), metadata=metadata))


@pytest.mark.fault("F21")
async def test_a_nonce_is_good_once(site: Site) -> None:
    client = await site.enroll()
    nonce = (await client.stub.GetChallenge(CHALLENGE)).nonce
    metadata = client.proven("OpenSession", client.opening(), nonce)
    await client.stub.OpenSession(client.opening(), metadata=metadata)
    assert await opening(client, metadata) == (S.UNAUTHENTICATED, "CHALLENGE_EXPIRED")


async def test_nonces_that_are_not_the_servers_prove_nothing(site: Site) -> None:
    client = await site.enroll()
    nonce = (await client.stub.GetChallenge(CHALLENGE)).nonce
    for bad in (b"", b"x", bytes(56), nonce[:-1], nonce[:-1] + bytes([nonce[-1] ^ 1]), nonce + b"x"):
        metadata = client.proven("OpenSession", client.opening(), bad)
        assert await opening(client, metadata) == (S.UNAUTHENTICATED, "CHALLENGE_EXPIRED")
    metadata = client.proven("Enroll", client.opening(), nonce)  # for another method
    assert await opening(client, metadata) == (S.UNAUTHENTICATED, "BAD_SIGNATURE")
    assert await opening(client, metadata) == (S.UNAUTHENTICATED, "CHALLENGE_EXPIRED")  # the call before has used it up
    client.client_id = "c-nobody"
    nonce = (await client.stub.GetChallenge(CHALLENGE)).nonce
    assert await opening(client, client.proven("OpenSession", client.opening(), nonce)) == (
        S.UNAUTHENTICATED,
        "CLIENT_UNKNOWN",
    )


# --- enrollment -------------------------------------------------------------------------------------------------------


def newcomer(site: Site, seed: str = "a newcomer") -> RawClient:
    return RawClient(site.channel, private_key(seed))


async def enrolling(client: RawClient, ticket: Ticket, **fields: Any) -> None:
    good = {"population": ticket.population, "idempotency_key": "a-good-key", "token": ticket.secret}
    await client.enroll(**{**good, **fields})


async def enrollments(site: Site) -> list[admin_pb2.Enrollment]:
    return list((await site.operator.clients.ListEnrollments(admin_pb2.ListEnrollmentsRequest())).enrollments)


async def test_a_ticket_carries_what_a_client_needs(site: Site) -> None:
    ticket = await site.operator.ticket("demo")
    assert (ticket.server, ticket.population, ticket.tls, ticket.ca) == ("127.0.0.1:7443", "demo", False, "")
    assert len(ticket.secret) == 43  # 256 bits
    client = newcomer(site)
    await enrolling(client, ticket)
    await client.open_session()
    await client.refusal()


async def test_enrollments_that_are_refused(site: Site) -> None:
    ticket = await site.operator.ticket()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"population": ""}, "population"),
        ({"population": "a/b"}, "population"),
        ({"population": "x" * 64}, "population"),
        ({"idempotency_key": "short"}, "idempotency key"),
        ({"idempotency_key": "x" * 201}, "idempotency key"),
        ({"idempotency_key": "nul\x00-in-the-key"}, "idempotency key"),
        ({"labels": {"a b": ""}}, "label"),
    )
    for fields, said in cases:
        with pytest.raises(aio.AioRpcError, match=said) as caught:
            await enrolling(newcomer(site), ticket, **fields)
        assert caught.value.code() is S.INVALID_ARGUMENT
    await enrolling(newcomer(site), ticket)  # none of these calls has used it up


async def test_a_key_must_be_proven_to_enroll(site: Site) -> None:
    ticket = await site.operator.ticket()
    thief, owner = newcomer(site), Ed25519PrivateKey.generate()
    public = owner.public_key().public_bytes_raw()
    assert await refused(enrolling(thief, ticket, public_key=public)) == (S.UNAUTHENTICATED, "BAD_SIGNATURE")
    for key in (b"", b"x" * 31, b"x" * 33, bytes(32)):
        assert await refused(enrolling(thief, ticket, public_key=key)) == (S.UNAUTHENTICATED, "BAD_SIGNATURE")
    await enrolling(thief, ticket)


async def test_tokens_of_no_use_let_no_client_in_and_give_a_reason(site: Site) -> None:
    (used_id, used), (foreign_id, foreign), (revoked_id, revoked) = [await site.operator.enrollment() for _ in range(3)]
    await enrolling(newcomer(site, "the first"), used, idempotency_key="the-first-key")
    await site.operator.clients.RevokeEnrollment(admin_pb2.RevokeEnrollmentRequest(enrollment_id=revoked_id))
    unknown = Ticket(used.server, "demo", "x" * 43)
    expired_id, expired = await site.operator.enrollment(expires_s=1e-6)
    cases = (
        (used, {}, S.PERMISSION_DENIED, "used up"),
        (foreign, {"population": "other"}, S.PERMISSION_DENIED, "another population"),
        (revoked, {}, S.PERMISSION_DENIED, "revoked"),
        (expired, {}, S.PERMISSION_DENIED, "expired"),
        (unknown, {}, S.UNAUTHENTICATED, "is unknown"),
        (Ticket("s", "demo", ""), {}, S.UNAUTHENTICATED, "is unknown"),
    )
    for ticket, fields, status, said in cases:
        with pytest.raises(aio.AioRpcError, match=said) as caught:
            await enrolling(newcomer(site), ticket, **fields)
        assert caught.value.code() is status
        assert ticket.secret not in (caught.value.details() or "") or not ticket.secret
    states = {one.enrollment_id: one.state for one in await enrollments(site)}
    assert [states[each] for each in (used_id, foreign_id, revoked_id, expired_id)] == [
        "used up",
        "open",
        "revoked",
        "expired",
    ]


async def test_a_repeated_enrollment_gives_the_same_client_and_uses_no_token_up(site: Site) -> None:
    ticket = await site.operator.ticket(num_uses=1)
    first, second = newcomer(site), newcomer(site)
    await enrolling(first, ticket)
    await enrolling(second, ticket)
    assert first.client_id == second.client_id
    with pytest.raises(aio.AioRpcError, match="another public key") as caught:
        await enrolling(newcomer(site, "somebody else"), ticket)
    assert caught.value.code() is S.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "fields",
    [{"expires_s": 0.0}, {"expires_s": -1.0}, {"expires_s": float("nan")}, {"expires_s": 1e9}, {"num_uses": 2_000_000}],
)
async def test_tokens_must_have_an_end(site: Site, fields: dict[str, Any]) -> None:
    with pytest.raises(aio.AioRpcError, match=r"expires|uses") as caught:
        await site.operator.ticket(**fields)
    assert caught.value.code() is S.INVALID_ARGUMENT


# --- revocation ------------------------------------------------------------------------------------------------------


async def revoke(site: Site, client: RawClient) -> admin_pb2.Client:
    return await site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=client.client_id))


@pytest.mark.fault("F30")
async def test_revocation_works_at_the_next_request_whatever_it_is(site: Site) -> None:
    client = await site.enroll(key="the-one-client")
    await client.refusal()
    assert (await revoke(site, client)).state == "revoked"
    for call in every_call(client):
        assert await refused(call) == (S.PERMISSION_DENIED, "REVOKED")
    assert await refused(client.open_session()) == (S.PERMISSION_DENIED, "REVOKED")
    again = client.enroll(population="demo", idempotency_key="the-one-client", token="x")
    assert await refused(again) == (S.PERMISSION_DENIED, "REVOKED")
    assert (await revoke(site, client)).state == "revoked"  # safe to repeat
    unknown = site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id="c-nobody"))
    assert await refused(unknown) == (S.NOT_FOUND, "NO_SUCH_CLIENT")


async def test_a_leaked_ticket_is_revoked_with_its_clients(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """More clients than one transaction, and one call, can revoke; those of another ticket stay."""
    monkeypatch.setattr(revocation, "BATCH", 2)
    monkeypatch.setattr(revocation, "MAX_REVOKED", 4)
    honest = await site.enroll()
    leaked, ticket = await site.operator.enrollment(num_uses=20)
    thieves = [newcomer(site, f"thief {number}") for number in range(5)]
    for number, thief in enumerate(thieves):
        await enrolling(thief, ticket, idempotency_key=f"key of thief {number}")
        await thief.open_session()
    polls = [thief.check_in() for thief in thieves]
    await site.waiting(len(thieves))
    listed = (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest())).clients
    assert {one.client_id for one in listed if one.enrollment_id == leaked} == {one.client_id for one in thieves}
    enrolled = [row for row in await site.store.inner.audit.list_rows() if row.action == "client enrolled"]
    assert sum(f'"enrollment":"{leaked}"' in row.details for row in enrolled) == len(thieves)
    request, counts = admin_pb2.RevokeEnrollmentRequest(enrollment_id=leaked, with_clients=True), list[int]()
    while not counts or request.page_token:
        answer = await site.operator.clients.RevokeEnrollment(request)
        assert answer.state == "revoked"
        counts.append(answer.num_revoked_clients)
        request.page_token = answer.next_page_token
    assert counts == [4, 1]
    for poll, thief in zip(polls, thieves, strict=True):
        assert await refused(poll) == (S.PERMISSION_DENIED, "REVOKED")
        assert await refused(thief.open_session()) == (S.PERMISSION_DENIED, "REVOKED")
    assert await refused(enrolling(newcomer(site), ticket)) == (S.PERMISSION_DENIED, "TOKEN_REFUSED")
    await honest.refusal()
    rows = [row for row in await site.store.inner.audit.list_rows() if row.action == "client revoked"]
    assert {row.subject for row in rows} == {thief.client_id for thief in thieves}


async def test_revocation_ends_the_long_poll_of_a_free_client(site: Site) -> None:
    client = await site.enroll()
    waiting = client.check_in()
    await site.waiting(1)
    await revoke(site, client)
    assert await refused(waiting) == (S.PERMISSION_DENIED, "REVOKED")
    await site.waiting(0)


async def test_revocation_ends_the_work_of_a_client_and_the_round_continues(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, over_selection=2.0))
    good, bad = await site.fleet(2)
    good_work, bad_work = await site.assign([good, bad])
    beat = bad.heartbeat(bad_work.token)
    await site.operator.until(job, "assignment", "TRAINING")
    await revoke(site, bad)
    assert await refused(beat) == (S.PERMISSION_DENIED, "REVOKED")
    assert (await refused(bad.deliver(bad_work.token, update_of(initial_model(), 1))))[1] == "REVOKED"
    assert (await good.deliver(good_work.token, update_of(initial_model(), 0))).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.reasons(job))[bad.client_id] == "FAILED an operator revoked the client"
    assert (await site.operator.versions(job))[-1].num_updates == 1


async def test_a_client_that_is_revoked_while_it_is_looked_up_is_not_remembered(tmp_path: Path) -> None:
    store = FaultyStore(await open_store(databases.create_sqlite(tmp_path / "fedplat.sqlite")))
    await store.inner.clients.add_enrollment_token(EnrollmentToken("t", "demo", 1, 1, 0.0, 9e9), b"hash")
    await store.inner.clients.enroll(Enrollment("c", "demo", {}, "1", b"key", b"hash", "the-key"))
    directory = ClientDirectory(store.clients)
    gate = Gate()
    store.after["find_clients"] = gate
    looking_up = asyncio.create_task(directory.find("c"))
    await gate.reached.wait()
    del store.after["find_clients"]
    revoked = await store.inner.clients.revoke_client("c")
    assert revoked is not None
    directory.replace(revoked)
    gate.open()
    await looking_up
    with pytest.raises(RefusedError, match="revoked"):
        await directory.find("c")
    await store.close()


# --- assignment tokens -----------------------------------------------------------------------------------------------


@pytest.mark.fault("F21")
async def test_an_assignment_token_is_bound_to_client_job_round_and_attempt_and_single_use(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, rounds=2))
    client = await site.enroll()
    first = await client.assignment()
    assert len(first.token) == 43  # 256 bits
    update = update_of(initial_model(), 0)
    stranger = await site.enroll()
    assert (
        reason_name((await stranger.report(first.token, daemons.digest_of(update.to_bytes()))).refusal.reason)
        == "STALE"
    )
    assert (await refused(stranger.upload(first.token, update.to_bytes())))[1] == "STALE_ASSIGNMENT"
    assert (await client.deliver(first.token, update)).HasField("receipt")
    await site.operator.until(job, "version", "1")
    second = await client.assignment()
    assert second.token != first.token
    other = update_of(initial_model(), 1)
    # In the next round the old token still means the old assignment, which is over.
    assert (await refused(client.upload(first.token, other.to_bytes())))[1] == "STALE_ASSIGNMENT"
    refusal = (await client.report(first.token, daemons.digest_of(other.to_bytes()))).refusal
    assert reason_name(refusal.reason) == "REJECTED_CONFLICT"
    assert (await client.deliver(second.token, other)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
