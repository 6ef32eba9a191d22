"""The words in which cases are written: what a client is given to do, and what goes wrong at which call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fedplat.model import FLOATING, Parameters
from fedplat.wire.v1 import fleet_pb2

TRAINER = "conformance"
"""The name of the trainer, and of the evaluator, that a client under test has."""
NUM_EXAMPLES = 7.0
"""What they report."""
REPORTED, DROPPED = "REPORTED", "DROPPED"
"""How an assignment ends besides the reasons of failures: by its report, or without a word of the client."""
Window: TypeAlias = tuple[float, float]


def train(base: Parameters) -> Parameters:
    """Return what the trainer must make of a model: 1 is added to each floating-point entry, rounded to its type."""
    trained = base.copy()
    for spec in trained.schema.tensors:
        if spec.dtype in FLOATING:
            values = trained[spec.name]
            wide = values.astype("f8" if spec.dtype == "F64" else "f4")
            values[...] = (wide + 1).astype(values.dtype)
    return trained


@dataclass(frozen=True)
class RefuseCall:
    """The server refuses the call with an error code; `retry` is the window of the next try."""

    code: str
    retry: Window | None = None


@dataclass(frozen=True)
class Lose:
    """The connection breaks: after the call was served, or before."""

    is_served: bool


@dataclass(frozen=True)
class Kill:
    """The client is killed and started again, after the call was served or before; it gets no answer."""

    is_served: bool


@dataclass(frozen=True)
class CutFile:
    """The connection breaks after so many bytes of a file have been sent or, of an upload, received."""

    num_bytes: int


@dataclass(frozen=True)
class KeepPart:
    """The server keeps so many bytes of an upload, and returns their number."""

    num_bytes: int


@dataclass(frozen=True)
class ProxyPage:
    """Something before the server answers with a page of HTML."""

    status: int
    from_bytes: int = 0
    """The least size of the request's body."""


@dataclass(frozen=True)
class ChangeAnswer:
    """The body of the answer is changed."""

    change: Callable[[bytes], bytes]


@dataclass(frozen=True)
class SendNoWork:
    """A check-in without an assignment."""

    reason: int
    retry: Window


@dataclass(frozen=True)
class EndAssignment:
    """The answer, of a heartbeat or a report, ends the assignment; the client is free within the window."""

    reason: int
    retry: Window


Action: TypeAlias = (
    RefuseCall | Lose | Kill | CutFile | KeepPart | ProxyPage | ChangeAnswer | SendNoWork | EndAssignment
)


@dataclass(frozen=True)
class Fault:
    """What happens at some calls of a method: from the `first` one to the `last` one, counted from 1."""

    method: str
    action: Action
    first: int = 1
    last: float = 1

    def applies(self, method: str, number: int) -> bool:
        """Return whether it happens at this call. The method "*" stands for all with messages."""
        same = self.method == method or (self.method == "*" and method != "Download")
        return same and self.first <= number <= self.last


ALWAYS = math.inf


@dataclass(frozen=True, kw_only=True)
class ScriptedTask:
    """An assignment, and how it may end."""

    model: Parameters
    outcome: tuple[str, ...] = (REPORTED,)
    config: Mapping[str, bool | int | float | str] = field(default_factory=dict[str, bool | int | float | str])
    alter: Callable[[fleet_pb2.Assignment], None] = lambda assignment: None
    """Changes the message."""
    is_inline: bool = True
    is_evaluation: bool = False
    served: bytes | None = None
    """What the server sends as the model's file, if that is another one."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a client has sent, for the checks of cases: the offsets of files, and the numbers of calls by method."""

    offsets: Mapping[str, list[int]]
    counts: Mapping[str, int]
    sizes: Mapping[str, list[int]]
    progress: list[float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case: `rule` states what must hold."""

    name: str
    rule: str
    tasks: tuple[ScriptedTask, ...]
    faults: tuple[Fault, ...] = ()
    transports: tuple[str, ...] = ("http", "grpc")
    is_last: bool = False
    """Whether the client must end by itself, with an exit status other than 0."""
    stops: bool = False
    """Whether the client is told to stop (SIGTERM) at its first heartbeat."""
    check: Callable[[Sent], str] = lambda sent: ""
    """Returns what else is wrong."""
