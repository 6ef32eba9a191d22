"""Malformed messages, drawn from a seed: rubbish, mutated golden messages, wrong types, impossible declarations.

Others are well formed and odd: ids with a NUL, labels and metrics of characters of four bytes, finite values and
weights that no training makes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2, gossip_pb2
from wire import make_golden

GOLDEN = {path.stem: path.read_bytes() for path in sorted(make_golden.FOLDER.glob("*.bin"))}
MODEL = Parameters.from_arrays({"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, "f4")})
HUGE = (2**31 - 1, 2**32 - 1, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
WIDE = "\U00020000"
"""A character of four bytes in UTF-8: limits that count characters let four times the bytes through."""
ODD_TEXTS = (
    *("\0", "c-0123456789abcde\0", "j-0123\0456789ab", "c-" + "g" * 16, "C-0123456789ABCDEF", " ", "\x1b[2J\x07"),
    *("\u202e\ufeff", "%s%n", "' OR 1=1 --", "../../pki/ca.key", WIDE * 63, WIDE * 1000, "x" * 100_000),
)
NUM_EXAMPLES = (5e-324, 1e-50, 1e-45, 1e-6, 1.0, 2.0, 1e15, 1e18, 1e308)
VALUES = (3e30, -3e30, 3e38, -3e38, 1e-45)
"""Finite in float32; the sum of a few of them, or one of them times a weight, may not be."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the server, and the names of the golden requests that it expects."""

    path: str
    client_streaming: bool
    server_streaming: bool
    requests: tuple[str, ...]
    type: type[Message]


def _methods() -> list[Method]:
    found: list[Method] = []
    for file in (fleet_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            for method in service.methods:
                wanted = method.input_type.name
                names = tuple(name for name in GOLDEN if name.partition(".")[0] == wanted)
                path = f"/{service.full_name}/{method.name}"
                made = message_factory.GetMessageClass(method.input_type)
                found.append(Method(path, method.client_streaming, method.server_streaming, names, made))
    return found


def _places(message: Message) -> list[Callable[[random.Random], None]]:
    """Functions that each put an odd text, number or entry into one field of a message."""
    found: list[Callable[[random.Random], None]] = []
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            if odd := _ODD.get(field.type):
                found.append(functools.partial(_put, message, field.name, odd))
        elif field.message_type.GetOptions().map_entry:
            found.append(functools.partial(_put_entry, getattr(message, field.name)))
        elif not field.is_repeated:
            found += _places(getattr(message, field.name))
    return found


_ODD: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_STRING: ODD_TEXTS,
    FieldDescriptor.TYPE_UINT32: [number for number in HUGE if number < 2**32],
    FieldDescriptor.TYPE_UINT64: HUGE,
    FieldDescriptor.TYPE_INT64: [number for number in HUGE if number < 2**63],
    FieldDescriptor.TYPE_DOUBLE: (float("nan"), float("inf"), -float("inf"), -1.0, 1e308, 5e-324),
}


def _put(message: Message, name: str, odd: Sequence[Any], rng: random.Random) -> None:
    value = rng.choice(odd)
    try:
        setattr(message, name, value)
    except (AttributeError, TypeError):  # a list: messages do not allow an assignment to it
        getattr(message, name).append(value)


def _put_entry(entries: Any, rng: random.Random) -> None:
    text = rng.choice(ODD_TEXTS)
    try:
        entries[text] = text
    except TypeError:  # metrics: their values are numbers
        entries[text] = rng.choice(_ODD[FieldDescriptor.TYPE_DOUBLE])


METHODS = _methods()
WITH_FIELDS = [method for method in METHODS if _places(method.type())]


@dataclasses.dataclass(frozen=True)
class Attack:
    """The messages for a method: several if it takes a stream."""

    kind: str
    method: Method
    messages: Sequence[bytes]


def draw(rng: random.Random) -> Attack:
    """The next attack."""
    kinds = list(_KINDS)
    kind = rng.choices(kinds, [_KINDS[name][0] for name in kinds])[0]
    method = rng.choice(WITH_FIELDS if kind == "odd field" else METHODS)
    make = _KINDS[kind][1]
    count = rng.randint(1, 4) if method.client_streaming else 1
    return Attack(kind, method, [make(rng, method) for _ in range(count)])


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data with a few small errors."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randint(0, len(content))
        match rng.randrange(7):
            case 0 if content:
                content[place % len(content)] ^= 1 << rng.randrange(8)
            case 1:
                content[place:place] = rng.randbytes(rng.randint(1, 16))
            case 2:
                del content[place : place + rng.randint(1, 16)]
            case 3:
                del content[place:]
            case 4:
                content[place:place] = content[: rng.randint(0, 64)] * rng.randint(1, 8)
            case 5:
                content[place : place + 4] = b"\xff\xff\xff\xff\x0f"
            case _:
                content[place:place] = rng.choice(list(GOLDEN.values()))[: rng.randint(1, 64)]
    return bytes(content)


def bad_file(rng: random.Random) -> bytes:
    """A safetensors file that is invalid, or differs from the expected one."""
    good = MODEL.to_bytes()
    match rng.randrange(9):
        case 0:
            return mutated(rng, good)
        case 1:
            return rng.choice(HUGE).to_bytes(8, "little") + good[8:]
        case 2:
            return _file({"weight": _entry([2 ** rng.randint(30, 70)], 0, 24)}, 24)
        case 3:
            start = rng.randint(0, 23)
            return _file({"weight": _entry([6], 0, 24), "bias": _entry([2], start, start + 8)}, 32)
        case 4:
            return good[:-4] + np.float32(rng.choice([np.nan, np.inf, -np.inf])).tobytes()
        case 5:
            return _file({_long(rng): _entry([6], 0, 24), "bias": _entry([2], 24, 32)}, 32)
        case 6:
            return _file({"weight": {**_entry([6], 0, 24), _long(rng): 1}, "bias": _entry([2], 24, 32)}, 32)
        case 7:
            return _file({"weight": _entry([int("9" * rng.randint(20, 4000))], 0, 24)}, 24)
        case _:
            return _file({f"t{n}": _entry([0], 0, 0) for n in range(rng.randint(1, 2000))}, 0)


def odd_report(rng: random.Random) -> tuple[bytes, float, dict[str, float]]:
    """An update of the right form, its number of examples and its metrics; each of the three may be odd."""
    update = MODEL.copy()
    update["weight"][rng.randrange(2), rng.randrange(3)] = rng.choice(VALUES)
    content = rng.choice((MODEL, update)).to_bytes()
    return content, rng.choice(NUM_EXAMPLES), rng.choice(_METRICS)(rng)


_METRICS: list[Callable[[random.Random], dict[str, float]]] = [
    lambda _: {},
    lambda _: {"loss": 0.5},
    lambda rng: {f"{rng.randrange(10**9)}{WIDE * 91}"[:100]: 1.0 for _ in range(64)},
    lambda rng: {f"m{rng.randrange(10**9)}": rng.choice((1e308, -1e308, 5e-324)) for _ in range(rng.choice((64, 65)))},
    lambda rng: {rng.choice(ODD_TEXTS): 1.0},
    lambda rng: {_long(rng): 1.0},
]


def _long(rng: random.Random) -> str:
    """A name that is too long, of characters that fill a log or control a terminal."""
    return rng.choice(("x", WIDE, "\x1b[2J", "\0")) * rng.choice((1001, 20_000, 100_000))


def _entry(shape: Sequence[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def _file(header: dict[str, dict[str, object]], size: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def _golden(rng: random.Random, method: Method) -> bytes:
    return GOLDEN[rng.choice(method.requests)]


def _odd_field(rng: random.Random, method: Method) -> bytes:
    """A golden message with one odd field: an id, a name, a token, a label, a number."""
    message = method.type.FromString(_golden(rng, method))
    rng.choice(_places(message))(rng)
    return message.SerializeToString()


def _shares(num_bytes: int) -> fleet_pb2.SecureMessage:
    return fleet_pb2.SecureMessage(shares=bytes(num_bytes))


def _key(largest: float) -> gossip_pb2.SiloMessage:
    key = gossip_pb2.SiloReport.OfferKey(attempt=2**32 - 1, largest=largest)
    return gossip_pb2.SiloMessage(known="x" * 5000, report=gossip_pb2.SiloReport(key=key))


def _declared(rng: random.Random, method: Method) -> bytes:
    """A well-formed message with impossible sizes, offsets and numbers."""
    digest, huge = str(make_golden.VALUES["digest"]), rng.choice(HUGE)
    number = rng.choice([float("nan"), float("inf"), -1.0, 1e308, -0.0])
    header = fleet_pb2.UploadHeader(token="x", digest=digest, size_bytes=huge, offset=rng.choice(HUGE))
    messages: list[Callable[[], bytes]] = [
        fleet_pb2.UploadRequest(header=header).SerializeToString,
        fleet_pb2.DownloadRequest(digest=digest, offset=huge).SerializeToString,
        fleet_pb2.ReportRequest(token="x", digest=digest, num_examples=number, update=bad_file(rng)).SerializeToString,
        fleet_pb2.HeartbeatRequest(token="x" * rng.randint(0, 5000), wait_s=number).SerializeToString,
        fleet_pb2.StepRequest(token="x", wait_s=number, secure=_shares(rng.choice([0, 1, 600_000]))).SerializeToString,
        fleet_pb2.StepRequest(token="x", wait_s=number, gossip=_key(number)).SerializeToString,
        fleet_pb2.CheckInRequest(protocol_version=1, trainers=["t"] * 5000, wait_s=number).SerializeToString,
        fleet_pb2.CheckInRequest(protocol_version=1, labels={f"l{n}": "x" for n in range(5000)}).SerializeToString,
        admin_pb2.UploadModelRequest(data=bad_file(rng)).SerializeToString,
        admin_pb2.CreateJobRequest(job_file="a = " + "[" * 5000, initial_digest=digest).SerializeToString,
        admin_pb2.WatchJobRequest(job="j", after_sequence=huge).SerializeToString,
        fleet_pb2.CheckInRequest(protocol_version=1, labels=wide_labels(rng), wait_s=0.0).SerializeToString,
    ]
    return rng.choice(messages)()


def wide_labels(rng: random.Random) -> dict[str, str]:
    """As many labels as the limits allow, each as long as a limit on characters allows."""
    return {f"{WIDE * 55}_{rng.randrange(10**6):06}_{n}"[:63]: WIDE * 200 for n in range(64)}


_KINDS: dict[str, tuple[int, Callable[[random.Random, Method], bytes]]] = {
    "random bytes": (20, lambda rng, _: rng.randbytes(rng.choice((0, 1, 10, 100, 2000)))),
    "mutated": (50, lambda rng, method: mutated(rng, _golden(rng, method))),
    "wrong type": (20, lambda rng, _: rng.choice(list(GOLDEN.values()))),
    "declared": (10, _declared),
    "odd field": (15, _odd_field),
}


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
