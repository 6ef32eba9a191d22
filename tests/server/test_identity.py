"""Who may call: enrolment, credentials, and what becomes of those that are not valid."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_server.clients import ClientBook
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.store.port import Store
from fedplat_server.testing import MemoryStore
from server.harness import FaultyStore, Gate, Site

INVALID: tuple[Sequence[tuple[str, str | bytes]], ...] = (
    (),
    (("authorization", ""),),
    (("authorization", "Bearer"),),
    (("authorization", "Bearer "),),
    (("authorization", "Basic abc"),),
    (("authorization", "bearer abc"),),
    (("authorization", "Bearer unknown"),),
    (("authorization", "Bearer " + "x" * 4000),),
    (("authorization", "Bearer ' OR 1=1 --"),),
    (("authorization-bin", b"\xff\xfe"),),
)


async def test_calls_without_a_valid_credential(site: Site) -> None:
    client = await site.enrol()
    for metadata in INVALID:
        client.metadata = metadata  # pyright: ignore[reportAttributeAccessIssue]
        calls = (
            client.check_in(0.0),
            client.upload("token", b"content"),
            client.query("token", "0" * 64),
            client.download("0" * 64),
            client.heartbeat("token"),
            client.report("token"),
            client.fail("token", model_pb2.REASON_TRAINER_ERROR),
        )
        for call in calls:
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, metadata
            assert ("fedplat-code", "UNAUTHENTICATED") in [tuple(pair) for pair in caught.value.trailing_metadata()]


async def test_enrolling_again_gives_the_same_client_a_new_credential(site: Site) -> None:
    first = await site.enrol(key="the-same-key")
    await first.refusal()
    second = await site.enrol(key="the-same-key")
    assert first.client_id == second.client_id
    await second.refusal()
    with pytest.raises(aio.AioRpcError) as caught:
        await first.refusal()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_enrolments_that_are_refused(site: Site) -> None:
    client = await site.enrol()
    good: dict[str, Any] = {"population": "demo", "idempotency_key": "a-good-key", "protocol_version": 1}
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
        with pytest.raises(aio.AioRpcError) as caught:
            await client.stub.Enroll(fleet_pb2.EnrollRequest(**{**good, **fields}))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert said in (caught.value.details() or "")


async def test_a_client_of_another_population_is_told_what_is_wrong(site: Site) -> None:
    await site.enrol("demo", key="the-same-key")
    with pytest.raises(aio.AioRpcError) as caught:
        await site.enrol("other", key="the-same-key")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "population" in (caught.value.details() or "")


async def test_a_credential_that_is_replaced_while_it_is_looked_up_is_not_remembered() -> None:
    store = FaultyStore(cast(Store, MemoryStore()))
    book = ClientBook(cast(Store, store))
    _, old = await book.enroll("demo", {}, "1", "the-same-key")
    gate = Gate()
    store.after["client_by_credential"] = gate
    looking_up = asyncio.create_task(book.authenticate(f"Bearer {old}"))
    await gate.reached.wait()
    del store.after["client_by_credential"]
    await book.enroll("demo", {}, "1", "the-same-key")
    gate.open()
    await looking_up
    with pytest.raises(RefusedError) as caught:
        await book.authenticate(f"Bearer {old}")
    assert caught.value.code is Code.UNAUTHENTICATED
