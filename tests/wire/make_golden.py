"""Writes the golden messages: one file of serialized bytes for each message of the protocol.

    python tests/wire/make_golden.py

Run it when the proto files change. It writes what is not there yet and changes no file that is: **the files of a
released version are frozen**, since clients of that version send these bytes forever. Before the first release (only
then) `--all` writes all of them again. `tests/server/test_golden.py` replays them.

A message with alternatives (`oneof`) has a file for each: `CheckInResponse.assignment.bin`. Values come from the names
of the fields (`VALUES`), so that they look like what clients and servers really send.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from fedplat import wire
from fedplat.wire.v1 import admin_pb2, events_pb2, fleet_pb2, gossip_pb2, model_pb2

FOLDER = Path(__file__).resolve().parent / "golden" / f"protocol-{wire.PROTOCOL_VERSION}"
FILES = (model_pb2.DESCRIPTOR, gossip_pb2.DESCRIPTOR, fleet_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, events_pb2.DESCRIPTOR)
JOB_FILE = (
    'name = "toy"\npopulation = "demo"\ntrainer = "toy"\nrounds = 3\n'
    '[model]\ninitial = "m.safetensors"\n[selection]\ngoal = 2\nwhere = "region == \'eu\'"\n'
)
VALUES: dict[str, object] = {
    "protocol_version": wire.PROTOCOL_VERSION,
    "software_version": "0.1.0",
    "population": "demo",
    "labels": {"region": "eu", "memory_mb": "4096"},
    "config": {"epochs": 5, "learning_rate": 0.125},
    "metrics": {"loss": 0.5, "accuracy": 0.875},
    "client_metrics": {"loss": 0.5},
    "server_metrics": {"accuracy": 0.875},
    "num_jobs": {"RUNNING": 2, "COMPLETED": 1},
    "trainers": ["toy", "digits"],
    "evaluators": ["scorer"],
    "codecs": ["bf16"],
    "uplink": '{"codec":"bf16"}',
    "codec": '{"codec":"bf16"}',
    "trainer": "toy",
    "type": "round.committed",
    "types": ["round.committed", "job.failed"],
    "url": "https://example.org/fedplat",
    "webhook_id": "w-0123456789ab",
    "secret": "whsec_ZmVkcGxhdCBnb2xkZW4gc2VjcmV0IG9mIDMyIGJ5dGU=",
    "token": "Zm9ydHktdGhyZWUgY2hhcmFjdGVycyBvZiBiYXNlNjQ",
    "digest": hashlib.sha256(b"a golden model").hexdigest(),
    "base_digest": hashlib.sha256(b"the model before").hexdigest(),
    "initial_digest": hashlib.sha256(b"a golden model").hexdigest(),
    "idempotency_key": "5f0c3a52-6d0f-4a83-9f3a-000000000001",
    "client_id": "c-0123456789abcdef",
    "job": "j-0123456789ab",
    "job_id": "j-0123456789ab",
    "job_name": "toy",
    "job_file": JOB_FILE,
    "name": "toy",
    "text": "the attempt reached its goal without this client: ünïcödé",
    "reason": "the job was paused",
    "exchange": "ring",
    "entity": "attempt",
    "from_state": "SELECTING",
    "to_state": "COLLECTING",
    "state": "waiting",
    "wait_s": 0.125,
    "min_s": 1.0,
    "max_s": 5.0,
    "num_examples": 128.0,
    "offset": 0,
    "size_bytes": 4096,
    "received_bytes": 2048,
}
_INTEGERS = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)


def descriptors() -> list[Descriptor]:
    """Every message of the protocol."""
    return [message for file in FILES for message in file.message_types_by_name.values()]


def class_of(descriptor: Descriptor) -> type[Message]:
    """The Python class of a message."""
    return message_factory.GetMessageClass(descriptor)


def examples() -> Iterator[tuple[str, Message]]:
    """A name and a message for each file."""
    for descriptor in descriptors():
        choices = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
        if not choices:
            yield descriptor.name, example(descriptor)
        for oneof in choices:
            for field in oneof.fields:
                yield f"{descriptor.name}.{field.name}", example(descriptor, field.name)


def example(descriptor: Descriptor, choice: str = "") -> Message:
    """A message with every field set; of alternatives, `choice` or the first."""
    message = class_of(descriptor)()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and not oneof.name.startswith("_"):
            names = [other.name for other in oneof.fields]
            if field.name != (choice if choice in names else names[0]):
                continue
        _fill(message, field)
    return message


def _fill(message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(message, field)
    elif field.is_repeated and field.message_type is not None:
        getattr(message, field.name).add().CopyFrom(example(field.message_type))
    elif field.is_repeated:
        value = VALUES.get(field.name)
        getattr(message, field.name).extend(value if isinstance(value, list) else [_scalar(field)])
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(example(field.message_type))
    else:
        setattr(message, field.name, _scalar(field))


def _fill_map(message: Message, field: FieldDescriptor) -> None:
    entries = getattr(message, field.name)
    assert field.message_type is not None
    value_field = field.message_type.fields_by_name["value"]
    given = VALUES.get(field.name)
    for key, value in (given if isinstance(given, dict) else {"one": 1}).items():
        if value_field.message_type is not None:
            entries[key].CopyFrom(example(value_field.message_type, "int_value" if value == 5 else "double_value"))
        elif value_field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            entries[key] = str(value)
        else:
            entries[key] = value


def _scalar(field: FieldDescriptor) -> object:
    kind, value = field.cpp_type, VALUES.get(field.name)
    if field.enum_type is not None:
        return field.enum_type.values[1].number
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return hashlib.sha256(field.name.encode()).digest()
        return value if isinstance(value, str) else f"a {field.name.replace('_', ' ')}"
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if kind in _INTEGERS:
        return value if isinstance(value, int) else field.number
    return value if isinstance(value, float) else 1_700_000_000.0 if field.name.endswith("unix_s") else 0.75


def main(arguments: list[str]) -> None:
    """Writes the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, message in examples():
        path = FOLDER / f"{name}.bin"
        if "--all" in arguments or not path.exists():
            path.write_bytes(message.SerializeToString(deterministic=True))
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
