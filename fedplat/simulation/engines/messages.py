"""What an engine and its worker processes tell each other: small records as msgpack, and arrays by their slots."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from fedplat.model import Parameters

MAX_BYTES = 1 << 16
"""Of one message."""
MAX_FAILURE = 1 << 14
"""Characters of a failure's text."""


class Note(Struct, frozen=True, array_like=True):
    """Where something of so many bytes lies that a client remembers."""

    slot: int
    size: int


class TrainTask(Struct, frozen=True, tag=True, array_like=True):
    """One work. `base` is the version's slot, `update` that for the result, `after` that for what to remember.

    One that scores uses neither of the latter.
    """

    number: int
    client: int
    version: int
    seed: int
    fraction: float
    base: int
    update: int
    before: Note | None
    after: int
    scores: bool


class ScoreRequest(Struct, frozen=True, tag=True, array_like=True):
    """Scores the model in a slot on the held-out examples [start, stop)."""

    number: int
    base: int
    start: int
    stop: int


class Done(Struct, frozen=True, array_like=True):
    """What came of a request. `note` is what the client remembers now, if that is new; `failure` says what failed."""

    number: int
    metrics: dict[str, float] = {}
    note: Note | None = None
    failure: str = ""


encode = msgspec.msgpack.encode
requests = msgspec.msgpack.Decoder(TrainTask | ScoreRequest)
replies = msgspec.msgpack.Decoder(Done)
_contents = msgspec.msgpack.Decoder(dict[str, memoryview])


def pack_state(contents: Mapping[str, Parameters]) -> bytes:
    """What a client remembers, as bytes."""
    return encode({name: values.to_bytes() for name, values in contents.items()})


def unpack_state(content: bytes) -> dict[str, Parameters]:
    """The same from its bytes."""
    return {name: Parameters.from_bytes(values) for name, values in _contents.decode(content).items()}
