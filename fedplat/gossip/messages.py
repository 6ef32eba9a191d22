"""The events and commands of a decentralised job: digests, sizes, addresses, distances and weights, never models."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from fedplat.claims import MAX_EXAMPLES

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_RING = 1000
"""Maximum number of silos in a ring."""
MAX_NUMBER = 1e100
"""More than the squared norm of any model of float32 numbers; sums of many of these are finite, too."""
MAX_ENTRY = float(np.finfo(np.float32).max)
Digest = Annotated[str, Meta(min_length=1, max_length=200)]
SiloName = Annotated[str, Meta(min_length=1, max_length=200)]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Size = Annotated[int, Meta(ge=0, le=2**60)]
Signature = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


def check_magnitudes(owner: object, *names: str, largest: float = MAX_NUMBER) -> None:
    """Raise `ValueError` unless fields of a record are numbers from 0 to `largest`."""
    for name in names:
        value: float = getattr(owner, name)
        if not 0.0 <= value <= largest:
            raise ValueError(f"{name} is {value}; expected a number from 0 to {largest:g}")


class Delta(Struct, frozen=True):
    """A smaller file for those that have the file with the digest `base`: the step from it to the announced one."""

    digest: Digest
    size_bytes: Size
    base: Digest


class Announcement(Struct, frozen=True, kw_only=True):
    """What a silo announces of the model that neighbours may get from it; with a codec, of its public copy.

    `squared_norm` is ‖x‖² of its model. `relay_key` is a public key for files through the server, with the signature by
    the key with which the silo is enrolled. Raises `ValueError` for numbers that are negative, not finite or too large.
    """

    digest: Digest
    size_bytes: Size
    address: Annotated[str, Meta(max_length=300)] = ""
    num_examples: float = 1.0
    squared_norm: float = 0.0
    delta: Delta | None = None
    relay_key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    relay_signature: Signature = b""

    def __post_init__(self) -> None:
        check_magnitudes(self, "num_examples", largest=MAX_EXAMPLES)
        check_magnitudes(self, "squared_norm")


class SiloAnnounced(Struct, frozen=True):
    """A silo has trained and stored its model of a round; `mixed_round` is the last round that it has mixed."""

    silo: SiloName
    round: Number
    model: Announcement
    mixed_round: Number = 0


class ModelReceived(Struct, frozen=True):
    """A silo has stored a neighbour's model, which is at this squared distance from its own."""

    silo: SiloName
    sender: SiloName
    round: Number
    digest: Digest
    squared_distance: float = 0.0

    def __post_init__(self) -> None:
        check_magnitudes(self, "squared_distance")


class ModelMissed(Struct, frozen=True):
    """A silo has given up to get a neighbour's model in a round."""

    silo: SiloName
    sender: SiloName
    round: Number


class KeyOffered(Struct, frozen=True, kw_only=True):
    """A silo offers a fresh public key for one attempt at a ring; `largest` is the largest magnitude in its model.

    The signature is by the key with which the silo is enrolled.
    """

    silo: SiloName
    round: Number
    attempt: Number
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    largest: float
    mixed_round: Number = 0
    signature: Signature = b""

    def __post_init__(self) -> None:
        check_magnitudes(self, "largest", largest=MAX_ENTRY)


class RingCompleted(Struct, frozen=True):
    """A silo has the mean of a ring, with this digest, at this squared distance from its own model.

    `chunks` are digests of the complete chunks, in order, from which it follows where one was changed.
    """

    silo: SiloName
    round: Number
    attempt: Number
    digest: Digest
    squared_distance: float = 0.0
    chunks: Annotated[tuple[Digest, ...], Meta(max_length=MAX_RING)] = ()

    def __post_init__(self) -> None:
        check_magnitudes(self, "squared_distance")


class RingBroken(Struct, frozen=True):
    """A silo gives up an attempt at a ring: the chunk of a step from this sender did not arrive."""

    silo: SiloName
    round: Number
    attempt: Number
    sender: SiloName
    step: Number


class SiloDeparted(Struct, frozen=True):
    """A silo is gone: it was silent for too long, or said so."""

    silo: SiloName


class SiloReturned(Struct, frozen=True):
    """A silo that was gone is back and works for the round, so that the others wait for it again."""

    silo: SiloName


class TimerPassed(Struct, frozen=True):
    """The time of a phase is over; `timer` is that of its `SetTimer`."""

    timer: Number


GossipEvent = (
    SiloAnnounced
    | ModelReceived
    | ModelMissed
    | KeyOffered
    | RingCompleted
    | RingBroken
    | SiloDeparted
    | SiloReturned
    | TimerPassed
)


class BeginRound(Struct, frozen=True):
    """Ask all silos for their models of a round, after training if `trains`."""

    round: int
    trains: bool


class Neighbour(Struct, frozen=True):
    """A silo, and what it has announced."""

    silo: str
    model: Announcement


class AssignNeighbours(Struct, frozen=True):
    """Tell a silo which models to get; with a link of one direction, those of its senders only."""

    round: int
    silo: str
    neighbours: tuple[Neighbour, ...]


class CommitRow(Struct, frozen=True):
    """Tell a silo its row of W: the weight of its own model, and that of each neighbour's.

    A silo mixes the models that it has stored, once, before it announces the next one; again after a restart, with the
    same result. A silo that took no part in a round has the row e_i, and gets no command.
    """

    round: int
    silo: str
    own: float
    neighbours: tuple[tuple[str, float], ...] = ()


class RequestKeys(Struct, frozen=True):
    """Ask silos for fresh keys for an attempt at a ring.

    A silo that has the mean of an earlier attempt of the round reports it again (`RingCompleted`), and offers no key.
    """

    round: int
    attempt: int
    members: tuple[str, ...]


class RingPlace(Struct, frozen=True):
    """A silo of a ring: its address, its key with the signature, and the share of its model in the mean."""

    silo: str
    address: str
    key: bytes
    share: float
    signature: bytes = b""


class BeginRing(Struct, frozen=True):
    """Begin an attempt at a ring among members, in this order; `bound` is at least the magnitude of all entries."""

    round: int
    attempt: int
    members: tuple[RingPlace, ...]
    bound: float


class CommitAverage(Struct, frozen=True):
    """Tell silos that the mean with this digest is the model; who does not have it gets it from one of `holders`."""

    round: int
    digest: str
    holders: tuple[str, ...]


class SetTimer(Struct, frozen=True):
    """Replace the timer of the job."""

    timer: int
    seconds: float


class EndJob(Struct, frozen=True):
    """The job has ended: COMPLETED with the digest of the exported mean, or FAILED with a reason."""

    status: Literal["COMPLETED", "FAILED"]
    digest: str = ""
    reason: str = ""


GossipCommand = BeginRound | AssignNeighbours | CommitRow | RequestKeys | BeginRing | CommitAverage | SetTimer | EndJob
