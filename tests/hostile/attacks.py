"""Malformed messages, drawn from a seed: rubbish, mutated golden messages, wrong types, impossible declarations."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Sequence

import numpy as np

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from wire import make_golden

GOLDEN = {path.stem: path.read_bytes() for path in sorted(make_golden.FOLDER.glob("*.bin"))}
MODEL = Parameters.from_arrays({"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, "f4")})
HUGE = (2**31 - 1, 2**32 - 1, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the server, and the names of the golden requests that it expects."""

    path: str
    client_streaming: bool
    server_streaming: bool
    requests: tuple[str, ...]


def _methods() -> list[Method]:
    found: list[Method] = []
    for file in (fleet_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            for method in service.methods:
                wanted = method.input_type.name
                names = tuple(name for name in GOLDEN if name.partition(".")[0] == wanted)
                path = f"/{service.full_name}/{method.name}"
                found.append(Method(path, method.client_streaming, method.server_streaming, names))
    return found


METHODS = _methods()


@dataclasses.dataclass(frozen=True)
class Attack:
    """What is sent to a method; several messages to those that take a stream."""

    kind: str
    method: Method
    messages: Sequence[bytes]


def draw(rng: random.Random) -> Attack:
    """The next attack."""
    kinds = list(_KINDS)
    kind = rng.choices(kinds, [_KINDS[name][0] for name in kinds])[0]
    method = rng.choice(METHODS)
    make = _KINDS[kind][1]
    count = rng.randint(1, 4) if method.client_streaming else 1
    return Attack(kind, method, [make(rng, method) for _ in range(count)])


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data with a few small damages."""
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
    """A safetensors file that is none, or not quite the one that it should be."""
    good = MODEL.to_bytes()
    match rng.randrange(6):
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
        case _:
            return _file({f"t{n}": _entry([0], 0, 0) for n in range(rng.randint(1, 2000))}, 0)


def _entry(shape: Sequence[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def _file(header: dict[str, dict[str, object]], size: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def _golden(rng: random.Random, method: Method) -> bytes:
    return GOLDEN[rng.choice(method.requests)]


def _declared(rng: random.Random, method: Method) -> bytes:
    """Well-formed, with sizes, offsets and numbers that nobody can mean."""
    digest, huge = str(make_golden.VALUES["digest"]), rng.choice(HUGE)
    number = rng.choice([float("nan"), float("inf"), -1.0, 1e308, -0.0])
    header = fleet_pb2.UploadHeader(token="x", digest=digest, size_bytes=huge, offset=rng.choice(HUGE))
    messages: list[Callable[[], bytes]] = [
        fleet_pb2.UploadRequest(header=header).SerializeToString,
        fleet_pb2.DownloadRequest(digest=digest, offset=huge).SerializeToString,
        fleet_pb2.ReportRequest(token="x", digest=digest, num_examples=number, update=bad_file(rng)).SerializeToString,
        fleet_pb2.HeartbeatRequest(token="x" * rng.randint(0, 5000), wait_s=number).SerializeToString,
        fleet_pb2.CheckInRequest(protocol_version=1, trainers=["t"] * 5000, wait_s=number).SerializeToString,
        fleet_pb2.CheckInRequest(protocol_version=1, labels={f"l{n}": "x" for n in range(5000)}).SerializeToString,
        admin_pb2.UploadModelRequest(data=bad_file(rng)).SerializeToString,
        admin_pb2.CreateJobRequest(job_file="a = " + "[" * 5000, initial_digest=digest).SerializeToString,
        admin_pb2.WatchJobRequest(job="j", after_sequence=huge).SerializeToString,
    ]
    return rng.choice(messages)()


_KINDS: dict[str, tuple[int, Callable[[random.Random, Method], bytes]]] = {
    "random bytes": (20, lambda rng, _: rng.randbytes(rng.choice((0, 1, 10, 100, 2000)))),
    "mutated": (50, lambda rng, method: mutated(rng, _golden(rng, method))),
    "wrong type": (20, lambda rng, _: rng.choice(list(GOLDEN.values()))),
    "declared": (10, _declared),
}


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
