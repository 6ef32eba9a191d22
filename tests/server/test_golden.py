"""What clients and servers of released versions send is understood forever: their golden messages are replayed."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from fedplat.wire.v1 import fleet_pb2
from support import access
from support.daemons import Site
from support.raw_client import RawClient
from wire import make_golden

GOLDEN = sorted(make_golden.FOLDER.parent.glob("*/*.bin"))
TYPES = {descriptor.name: make_golden.class_of(descriptor) for descriptor in make_golden.descriptors()}
METHODS: list[MethodDescriptor] = [
    *fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].methods,
    *access.METHODS.values(),
]
UNKNOWN_FIELDS = bytes.fromhex("f8ff0701") + bytes.fromhex("fabf3f03616263")  # a number and a text, high tags
UNFIT = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED})


def message_of(path: Path) -> Message:
    return TYPES[path.name.partition(".")[0]].FromString(path.read_bytes())


def unknown_in(message: Message) -> int:
    """How many fields of a message, at any depth, this version does not know."""
    count = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            values = list(value.values()) if field.message_type.fields_by_name["value"].message_type else []
        else:
            values = list(value) if field.is_repeated else [value]
        count += sum(unknown_in(one) for one in values)
    return count


@pytest.mark.fault("F28")
def test_every_message_has_a_golden_one() -> None:
    kept = {path.stem for path in make_golden.FOLDER.glob("*.bin")}
    missing = {name for name, _ in make_golden.examples()} - kept
    assert not missing, "run python tests/wire/make_golden.py"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.fault("F28")
def test_golden_messages_are_read_and_written_back_unchanged(path: Path) -> None:
    message = message_of(path)
    assert unknown_in(message) == 0, "a field of a released version is gone"
    assert message.ListFields() or not path.stat().st_size  # of a version in which the message had no fields
    assert message.SerializeToString(deterministic=True) == path.read_bytes()


def requests_of(method: MethodDescriptor) -> list[Path]:
    return [path for path in GOLDEN if path.name.partition(".")[0] == method.input_type.name]


async def outcome(channel: aio.Channel, method: MethodDescriptor, request: bytes, metadata: object) -> tuple[str, str]:
    """Status and code of the answer to a request that is sent as it is."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    options = {"metadata": metadata, "timeout": 30.0}
    try:
        if method.client_streaming:
            await channel.stream_unary(name)(iter([request]), **options)  # pyright: ignore[reportArgumentType]
        elif method.server_streaming:
            async for _ in channel.unary_stream(name)(request, **options):  # pyright: ignore[reportArgumentType]
                pass
        else:
            await channel.unary_unary(name)(request, **options)  # pyright: ignore[reportArgumentType]
    except aio.AioRpcError as exc:
        if exc.code() in UNFIT or "not a message" in (exc.details() or ""):
            raise
        return exc.code().name, str(dict(exc.trailing_metadata() or ()).get("fedplat-code"))
    return "OK", ""


def metadata_for(client: RawClient, method: MethodDescriptor, request: bytes) -> object:
    if method.containing_service.name == "Fleet":
        return client.signed_bytes(method.name, request)
    return access.ADMIN_METADATA


@pytest.mark.fault("F28")
async def test_a_server_answers_golden_requests(site: Site) -> None:
    """Fields that this version does not know change no answer: a newer client may send them."""
    client = await site.enroll()
    answered: set[str] = set()
    for method in METHODS:
        assert requests_of(method), method.name
        for path in requests_of(method):
            old, new = path.read_bytes(), path.read_bytes() + UNKNOWN_FIELDS
            plain = await outcome(site.channel, method, old, metadata_for(client, method, old))
            newer = await outcome(site.channel, method, new, metadata_for(client, method, new))
            assert plain == newer, method.name
            answered.add(plain[0])
    assert {"OK", "NOT_FOUND"} <= answered
