"""The messages between an engine and its worker processes: small msgpack records that refer to arrays by slot."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from fedplat.model import Parameters

MAX_BYTES = 1 << 16
"""The largest message, in bytes."""
MAX_FAILURE = 1 << 14
"""The longest error text, in characters."""


class StateSlot(Struct, frozen=True, array_like=True):
    """A client state in shared memory: its slot and its size in bytes."""

    slot: int
    size: int


class TrainTask(Struct, frozen=True, tag=True, array_like=True):
    """A training or scoring task of one client.

    `base` is the slot of the version, `before` the client state at the start if there is one. `update` and `after` are
    the slots to write the update and the new client state to; a task that scores uses neither.
    """

    number: int
    client: int
    version: int
    seed: int
    fraction: float
    base: int
    update: int
    before: StateSlot | None
    after: int
    scores: bool
    round_number: int = 0


class ScoreRequest(Struct, frozen=True, tag=True, array_like=True):
    """A request to score the model in slot `base` on the central test examples [start, stop)."""

    number: int
    base: int
    start: int
    stop: int


class Done(Struct, frozen=True, array_like=True):
    """The reply to a request. `note` is the new client state if it changed; `failure` is the error text, or ""."""

    number: int
    metrics: dict[str, float] = {}
    note: StateSlot | None = None
    failure: str = ""


encode = msgspec.msgpack.encode
requests = msgspec.msgpack.Decoder(TrainTask | ScoreRequest)
replies = msgspec.msgpack.Decoder(Done)
_contents = msgspec.msgpack.Decoder(dict[str, memoryview])


def pack_state(contents: Mapping[str, Parameters]) -> bytes:
    """Encode a client state."""
    return encode({name: values.to_bytes() for name, values in contents.items()})


def unpack_state(content: bytes) -> dict[str, Parameters]:
    """Decode a client state that `pack_state` encoded."""
    return {name: Parameters.from_bytes(values) for name, values in _contents.decode(content).items()}
