"""Access for tests: an operator that every daemon of the tests knows, and channels with and without TLS."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio

from fedplat.wire.v1 import admin_pb2, events_pb2
from fedplat_server.config import TlsFiles
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import OperatorError
from fedplat_server.records.audit import OperatorRecord, Role, hash_token

Stub = TypeVar("Stub")
ADMIN_TOKEN = "fedplat_op_" + "x" * 43
"""The token of an operator with the role admin."""
ADMIN_METADATA = (("authorization", f"Bearer {ADMIN_TOKEN}"),)
SERVICES = [one for file in (admin_pb2, events_pb2) for one in file.DESCRIPTOR.services_by_name.values()]
"""The services for operators."""
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods
}
"""Their methods, by path."""


def name_of(token: str) -> str:
    """The name of the operator that `add_operator` makes for a token."""
    return f"tester-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


ADMIN_NAME = name_of(ADMIN_TOKEN)


class _Authorized:
    """A stub that sends a token with every call."""

    def __init__(self, stub: object, token: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._stub, name), metadata=self._metadata)


def authorized(stub: Stub, token: str = ADMIN_TOKEN) -> Stub:
    """A stub that sends a token with every call."""
    return cast(Stub, _Authorized(stub, token))


async def add_operator(
    store: Store, token: str = ADMIN_TOKEN, role: Role = Role.ADMIN, expires_unix_s: float | None = None
) -> None:
    """Makes an operator with this token, unless there is one."""
    with contextlib.suppress(OperatorError):
        await store.operators.add_operator(OperatorRecord(name_of(token), role, 0.0, expires_unix_s), hash_token(token))


async def add_operator_to(database: str) -> None:
    """Makes the operator of the tests in a database."""
    store = await open_store(database)
    try:
        await add_operator(store)
    finally:
        await store.close()


def channel(port: int, files: TlsFiles | None, options: Sequence[tuple[str, Any]] = ()) -> aio.Channel:
    """A channel to a daemon that has these certificates."""
    if files is None or files.ca is None:
        return aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    return secure_channel(port, files.ca.read_bytes())


def secure_channel(port: int, ca: bytes) -> aio.Channel:
    """A channel with its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return aio.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca), options=options)
