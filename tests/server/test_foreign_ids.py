"""Ids that no server has made, from strangers and from operators: refused by their form, whatever the database."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from grpc import aio

from fedplat.wire import auth
from fedplat.wire.v1 import admin_pb2
from support import daemons
from support.raw_client import RawClient, private_key

pytestmark = [pytest.mark.calm, pytest.mark.fault("F40")]  # they count answers, and a storm has others
NUM_HONEST, NUM_ATTACKERS = 60, 8
NUL = "c-0123456789abc\x00ef"


def code_of(error: aio.AioRpcError) -> str:
    """The code of a refusal."""
    return str(dict(error.trailing_metadata() or ()).get(auth.METADATA_CODE, error.code().name))


async def opened(client: RawClient) -> str:
    """What became of a session that a client wanted to open."""
    try:
        request = client.opening()
        client.opened(await client.stub.OpenSession(request, metadata=await client.proof("OpenSession", request)))
    except aio.AioRpcError as exc:
        return code_of(exc)
    return "ok"


async def opened_at_last(client: RawClient) -> str:
    """What became of it in the end: on a busy machine, calls that wait too long for a turn are refused, and retried."""
    while (answer := await opened(client)) == "TOO_MANY_REQUESTS":
        pass
    return answer


async def attack(attacker: RawClient, over: asyncio.Event) -> Counter[str]:
    answers = Counter[str]()
    while not over.is_set():
        answers[await opened(attacker)] += 1
    return answers


@pytest.mark.slow
async def test_honest_sessions_beside_ids_that_postgresql_refuses(tmp_path: Path, postgres: str) -> None:
    """After a restart all of them are looked up in the database, in the same queries as what the strangers send."""
    (tmp_path / "data").mkdir()
    async with daemons.running(tmp_path / "data", database=postgres) as site:
        known = [await site.enroll(key=f"the-client-{number}") for number in range(NUM_HONEST)]
    async with daemons.running(tmp_path / "data", database=postgres) as site:
        honest = [RawClient(site.channel, client.key) for client in known]
        for client, before in zip(honest, known, strict=True):
            client.client_id = before.client_id
        attackers = [RawClient(site.channel, private_key(f"attacker {n}")) for n in range(NUM_ATTACKERS)]
        for attacker in attackers:
            attacker.client_id = NUL
        over = asyncio.Event()
        attacks = [asyncio.create_task(attack(attacker, over)) for attacker in attackers]
        answers = Counter(await asyncio.gather(*(opened_at_last(client) for client in honest)))
        over.set()
        heard = sum(await asyncio.gather(*attacks), Counter[str]())
    assert answers == {"ok": NUM_HONEST}
    assert heard.total() >= NUM_ATTACKERS
    assert heard.keys() - {"TOO_MANY_REQUESTS"} == {"CLIENT_UNKNOWN"}


@pytest.mark.parametrize("text", ["\x00", NUL, "c-0123456789ABCDEF", "x" * 5000])
async def test_ids_that_no_server_has_made_are_refused(tmp_path: Path, any_database: str, text: str) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    async with daemons.running(tmp_path / "data", database=any_database) as site:
        operator = site.operator
        stranger = RawClient(site.channel, private_key("a stranger"))
        stranger.client_id = text
        assert await opened(stranger) == ("TOO_LARGE" if len(text) > 1000 else "CLIENT_UNKNOWN")
        calls = {
            "NO_SUCH_CLIENT": operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=text)),
            "NO_SUCH_ENROLLMENT": operator.clients.RevokeEnrollment(
                admin_pb2.RevokeEnrollmentRequest(enrollment_id=text)
            ),
            "NO_SUCH_OPERATOR": operator.operators.RemoveOperator(admin_pb2.RemoveOperatorRequest(name=text)),
        }
        for code, call in calls.items():
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert code_of(caught.value) == code
        for request in (
            admin_pb2.ListClientsRequest(page_token=text),
            admin_pb2.ListClientsRequest(population=f"{text}\x00"),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await operator.clients.ListClients(request)
            assert code_of(caught.value) == "INVALID_REQUEST"
