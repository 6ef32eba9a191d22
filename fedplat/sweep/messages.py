"""Messages between a sweep and its worker processes: one line of JSON each."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """What a worker needs for all its runs. `runs` is the folder of the run folders; both folders are absolute."""

    base_text: str
    base_folder: str
    runs: str
    metric: str
    maximize: bool
    best: bool
    target: float
    checkpoint_s: float


class StepRequest(Struct, frozen=True, kw_only=True):
    """A run to compute until the end of the round `until`, or until its end if that is 0.

    `folder` is the name of its run folder; `changes` are those of the base file, as `key=value` texts.
    """

    folder: str
    changes: list[str]
    until: int


class RoundReply(Struct, frozen=True, kw_only=True, tag="round"):
    """A round of the run in progress has ended; `value` is the metric if it was scored."""

    round: int
    value: float | None


class DoneReply(Struct, frozen=True, kw_only=True, tag="done"):
    """The run has reached its round; its outcome is in its folder."""


class FailureReply(Struct, frozen=True, kw_only=True, tag="failure"):
    """The run has raised an error; `is_usage` is true for a mistake of the user."""

    text: str
    is_usage: bool


WorkerReply = RoundReply | DoneReply | FailureReply

_encoder = msgspec.json.Encoder()
_setup = msgspec.json.Decoder(WorkerSetup)
_request = msgspec.json.Decoder(StepRequest)
_reply: msgspec.json.Decoder[WorkerReply] = msgspec.json.Decoder(WorkerReply)
decode_setup, decode_request, decode_reply = _setup.decode, _request.decode, _reply.decode


def encode_line(message: Struct) -> bytes:
    """Return a message as one line."""
    return _encoder.encode(message) + b"\n"
