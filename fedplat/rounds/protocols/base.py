"""Which protocol a job has: the only switch between kinds. `record` has the record itself.

Code that is common to all kinds (`attempts`, `closing`, `selection`, `coordinator`) asks `protocol_of`, always with the
job in hand and never with a record that it has kept. So a wrapper (`private`) also applies where the functions of the
inner record call common code, which asks again.

A job has one protocol for its training (`training_of`), and attempts of other kinds have theirs: the same job is
averaged in one attempt and evaluated in the next. An assignment that outlives its attempt keeps the kind of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from fedplat.job import JobSpec
from fedplat.rounds.records import JobState
from fedplat.rounds.states import AttemptKind
from fedplat.rounds.transition import Context, Transition

if TYPE_CHECKING:
    from fedplat.rounds.protocols.record import RoundProtocol

Handler = Callable[[JobState, Any, Context], Transition]


class AttemptSizes(NamedTuple):
    """The numbers of an attempt: `goal` reports close it, `minimum` are enough, `target` clients work for it."""

    goal: int
    minimum: int
    target: int


class Ending(Enum):
    """What an open attempt does after one of its assignments has ended, or its deadline has passed.

    `WAIT_FOR_CLIENTS`: no client works for it, and it waits for others as long as a selection.
    """

    WAIT = auto()
    WAIT_FOR_CLIENTS = auto()
    CLOSE = auto()
    FAIL = auto()


class Roll(NamedTuple):
    """The members whose presence is asked for now; `is_last`: those that are absent have no more time."""

    members: Collection[str]
    is_last: bool


_PROTOCOLS: dict[str, RoundProtocol] = {}


def register(protocol: RoundProtocol) -> RoundProtocol:
    """Add a protocol to the table (`registry` imports all of them)."""
    assert protocol.name not in _PROTOCOLS
    _PROTOCOLS[protocol.name] = protocol
    return protocol


def training_name(spec: JobSpec) -> str:
    """Return the name of the protocol of a job's training: the only place that asks for the tables of a job file."""
    if spec.flower is not None:
        return "flower_app"
    name = "secure" if spec.secure_aggregation is not None else str(spec.mode.__struct_config__.tag)
    return f"private {name}" if spec.privacy is not None else name


def training_of(job: JobState) -> RoundProtocol:
    """Return the protocol of a job's training."""
    return find_training(job.spec)


def find_training(spec: JobSpec) -> RoundProtocol:
    """Return the protocol of the training of a job with this file."""
    return _PROTOCOLS[training_name(spec)]


_OTHERS: Mapping[AttemptKind, str] = {AttemptKind.EVALUATE: "evaluation", AttemptKind.WARM_START: "warm_start"}


def protocol_of(job: JobState, kind: AttemptKind) -> RoundProtocol:
    """Return the protocol of a job's attempts, or assignments, of a kind."""
    return training_of(job) if kind is AttemptKind.TRAIN else _PROTOCOLS[_OTHERS[kind]]


def list_protocols(job: JobState) -> tuple[RoundProtocol, ...]:
    """Return the protocols that may begin the next attempt, in their order."""
    return _PROTOCOLS["warm_start"], _PROTOCOLS["evaluation"], training_of(job)


def list_registered() -> Mapping[str, RoundProtocol]:
    """Return all protocols by name."""
    return _PROTOCOLS
