"""What a silo and the server say to each other in a step of a decentralised job, and what a silo has to do now.

A silo sends a `SiloMessage` and gets a `SiloStep`; `gossip.proto` has messages with the same fields. `instruct` derives
the instruction from the stored state of the job and from what the silo has done, so that a message may be repeated, and
a silo or a server that was restarted continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated

from msgspec import Meta, Struct

from fedplat.errors import GossipError
from fedplat.gossip import messages, topology
from fedplat.gossip.state import GossipPhase, GossipState

FEATURE = "gossip.1"
"""The feature of clients whose owner allows that they exchange models with other clients."""
MAX_SILOS = 200
"""Maximum number of silos that a server coordinates in a job."""
MAX_MESSAGE_BYTES = 64 * 2**10
"""Maximum size of a silo's message."""
MAX_STEP_BYTES = 2**20
"""Maximum size of what the server answers."""
MAX_KNOWN = 100
"""Maximum length of `known`."""
Key = Annotated[bytes, Meta(min_length=messages.KEY_BYTES, max_length=messages.KEY_BYTES)]


class GossipSetup(Struct, frozen=True, kw_only=True):
    """What a silo gets with its assignment: whether it trains, how models are exchanged, and the step size of CHOCO."""

    trains: bool
    exchange: topology.Exchange
    gamma: float | None = None


# --- from a silo -------------------------------------------------------------------------------------------


class Announce(Struct, frozen=True, tag="announce"):
    """The silo has trained; neighbours can have its model. `metrics` are those of the training."""

    model: messages.Announcement
    metrics: Annotated[dict[str, float], Meta(max_length=100)] = {}


class Received(Struct, frozen=True):
    """The silo has stored a neighbour's model, at this squared distance from its own."""

    sender: messages.SiloName
    digest: messages.Digest
    squared_distance: float

    def __post_init__(self) -> None:
        messages.check_magnitudes(self, "squared_distance")


class Exchanged(Struct, frozen=True, tag="exchanged"):
    """Models that the silo has stored, and senders whose models it cannot get."""

    received: Annotated[tuple[Received, ...], Meta(max_length=MAX_SILOS)] = ()
    missed: Annotated[tuple[messages.SiloName, ...], Meta(max_length=MAX_SILOS)] = ()


class OfferKey(Struct, frozen=True, tag="key"):
    """A fresh key for an attempt at a ring, and the largest magnitude in the silo's model."""

    attempt: messages.Number
    key: Key
    signature: messages.Signature
    largest: float


class Completed(Struct, frozen=True, tag="completed"):
    """The silo has the mean of a ring (`RingCompleted`)."""

    attempt: messages.Number
    digest: messages.Digest
    squared_distance: float
    chunks: Annotated[tuple[messages.Digest, ...], Meta(max_length=messages.MAX_RING)] = ()


class Broken(Struct, frozen=True, tag="broken"):
    """The silo gives up an attempt at a ring: the chunk of a step from this sender did not arrive.

    With itself as the sender: it cannot go on, or has the mean, but no chunks for others any more.
    """

    attempt: messages.Number
    sender: messages.SiloName
    step: messages.Number


SiloReport = Announce | Exchanged | OfferKey | Completed | Broken


class Progress(Struct, frozen=True):
    """What a silo has done: the last round that it has mixed, and that of the last mean that it has adopted."""

    mixed_round: messages.Number = 0
    adopted_round: messages.Number = 0


class SiloMessage(Struct, frozen=True, kw_only=True):
    """What a silo sends in a step. `known` is that of its last step, if it waits until what it does is over."""

    done: Progress = Progress()
    known: Annotated[str, Meta(max_length=MAX_KNOWN)] = ""
    report: SiloReport | None = None


def to_events(silo: str, round_number: int, mixed_round: int, report: SiloReport) -> list[messages.GossipEvent]:
    """Return the events that a silo's report stands for. Raises `GossipError` for numbers that are out of range."""
    try:
        match report:
            case Announce():
                return [messages.SiloAnnounced(silo, round_number, report.model, mixed_round)]
            case Exchanged():
                received = [
                    messages.ModelReceived(silo, each.sender, round_number, each.digest, each.squared_distance)
                    for each in report.received
                ]
                return [*received, *(messages.ModelMissed(silo, each, round_number) for each in report.missed)]
            case OfferKey():
                return [
                    messages.KeyOffered(
                        silo=silo,
                        round=round_number,
                        attempt=report.attempt,
                        key=report.key,
                        largest=report.largest,
                        mixed_round=mixed_round,
                        signature=report.signature,
                    )
                ]
            case Completed():
                distance, chunks = report.squared_distance, report.chunks
                return [messages.RingCompleted(silo, round_number, report.attempt, report.digest, distance, chunks)]
            case Broken():
                return [messages.RingBroken(silo, round_number, report.attempt, report.sender, report.step)]
    except ValueError as exc:
        raise GossipError(str(exc)) from exc


# --- to a silo ---------------------------------------------------------------------------------------------


class Contact(Struct, frozen=True):
    """A silo as another one sees it: the key with which it is enrolled, its address, and its key for the relay.

    Without an address its files come through the server's relay.
    """

    silo: messages.SiloName
    public_key: Key
    address: Annotated[str, Meta(max_length=300)] = ""
    relay_key: Annotated[bytes, Meta(max_length=messages.KEY_BYTES)] = b""
    relay_signature: messages.Signature = b""


class Offered(Struct, frozen=True):
    """A model that a silo offers."""

    contact: Contact
    digest: messages.Digest
    size_bytes: messages.Size
    delta: messages.Delta | None = None


class Wait(Struct, frozen=True, tag="wait"):
    """There is nothing to do yet."""


class FetchModels(Struct, frozen=True, tag="fetch"):
    """Get these models, store them, and report each."""

    models: Annotated[tuple[Offered, ...], Meta(max_length=MAX_SILOS)]


class Weight(Struct, frozen=True):
    """The weight of a neighbour's model."""

    silo: messages.SiloName
    weight: float


class MixModels(Struct, frozen=True, tag="mix"):
    """Mix the stored models by a row of W (`CommitRow`)."""

    round: messages.Number
    silo: Annotated[str, Meta(max_length=200)]
    own: float
    neighbours: Annotated[tuple[Weight, ...], Meta(max_length=MAX_SILOS)] = ()

    @classmethod
    def by(cls, row: messages.CommitRow) -> MixModels:
        """Return the instruction for a row."""
        return cls(row.round, row.silo, row.own, tuple(Weight(*each) for each in row.neighbours))

    @property
    def row(self) -> messages.CommitRow:
        """The row."""
        weights = tuple((each.silo, each.weight) for each in self.neighbours)
        return messages.CommitRow(self.round, self.silo, self.own, weights)


class SendKey(Struct, frozen=True, tag="key"):
    """Offer a fresh key for an attempt at a ring."""

    attempt: messages.Number


class ReduceModels(Struct, frozen=True, tag="reduce"):
    """Take part in a ring; `contacts` are its members in order."""

    ring: messages.BeginRing
    contacts: Annotated[tuple[Contact, ...], Meta(max_length=messages.MAX_RING)]


class AdoptMean(Struct, frozen=True, tag="adopt"):
    """Replace the model by the mean of a ring, which these silos have. `is_last`: the job exports it."""

    round: messages.Number
    digest: messages.Digest
    holders: Annotated[tuple[Contact, ...], Meta(max_length=messages.MAX_RING)]
    is_last: bool


class Leave(Struct, frozen=True, tag="leave"):
    """The round is over for this silo; it checks in for the next one."""


Instruction = Wait | FetchModels | MixModels | SendKey | ReduceModels | AdoptMean | Leave


class SiloStep(Struct, frozen=True, kw_only=True):
    """An instruction, the time for it, and the silos that may get this silo's model and the last mean from it.

    `known` changes with the phase: a silo that sends it back gets an answer when what it does is over. Those of the
    `mean_receivers` that have a relay key wait for the mean in the relay.
    """

    instruction: Instruction
    known: Annotated[str, Meta(max_length=MAX_KNOWN)]
    round: messages.Number
    remaining_s: float
    model_receivers: Annotated[tuple[Contact, ...], Meta(max_length=MAX_SILOS)] = ()
    mean_receivers: Annotated[tuple[Contact, ...], Meta(max_length=2 * MAX_SILOS)] = ()


def instruct(
    state: GossipState, silo: str, done: Progress, contact: Callable[[str], Contact]
) -> Wait | FetchModels | MixModels | SendKey | ReduceModels | AdoptMean:
    """Return what a silo has to do now. `contact` returns a silo as others see it."""
    row, average = state.rows.get(silo), state.average
    if row is not None and done.mixed_round < row.round:
        return MixModels.by(row)
    if average is not None and done.adopted_round < average.round and _is_for(state, silo):
        holders = tuple(contact(name) for name in average.holders if name != silo)
        return AdoptMean(average.round, average.digest, holders, state.phase is GossipPhase.ENDED)
    match state.phase:
        case GossipPhase.EXCHANGING if awaited := state.awaited.get(silo):
            return FetchModels(
                tuple(
                    Offered(contact(name), model.digest, model.size_bytes, model.delta)
                    for name in sorted(awaited)
                    if (model := state.announced[name])
                )
            )
        case GossipPhase.OFFERING_KEYS if silo in state.candidates and silo not in state.offers:
            return SendKey(state.attempt)
        case GossipPhase.REDUCING if silo in state.offers and not (silo in state.completed or silo in state.broken):
            assert state.ring is not None
            return ReduceModels(state.ring, tuple(contact(member.silo) for member in state.ring.members))
        case _:
            return Wait()


def list_model_receivers(state: GossipState, silo: str) -> list[str]:
    """Return the silos that still await the model of a silo."""
    if state.phase is not GossipPhase.EXCHANGING:
        return []
    return sorted(receiver for receiver, senders in state.awaited.items() if silo in senders)


def list_mean_receivers(state: GossipState, silo: str, waiting: Collection[str] = ()) -> list[str]:
    """Return the silos that may get the last mean from a silo that has it: all that take part in the job.

    `waiting` are those that wait for it in the relay, such as one that takes part for the first time.
    """
    if state.average is None or silo not in state.average.holders:
        return []
    return sorted(state.members.union(state.away, state.announced, waiting) - {silo})[: 2 * MAX_SILOS]


def relayed_bytes(
    state: GossipState, sender: str, receiver: str, name: str, waiting: Collection[str] = (), mean_bytes: int = 0
) -> int | None:
    """Return the size of the file of this name that a silo may send to another through the server; None: it may not.

    It is the size before encryption. `waiting` are the silos that wait for the last mean, whose file has `mean_bytes`
    as that of the initial model.
    """
    own = state.announced.get(sender)
    if own is not None and receiver in list_model_receivers(state, sender):
        files = {own.digest: own.size_bytes} | ({own.delta.digest: own.delta.size_bytes} if own.delta else {})
        return files.get(name)
    if state.phase is GossipPhase.REDUCING and state.ring is not None and own is not None:
        names = [member.silo for member in state.ring.members]
        is_next = sender in names and names[(names.index(sender) + 1) % len(names)] == receiver
        known = {chunk_name(state.attempt, step) for step in range(2 * (len(names) - 1))}
        return own.size_bytes // len(names) + 4 if is_next and name in known else None
    average = state.average
    if average is not None and own is not None and sender in average.holders and receiver in waiting:
        return mean_bytes if name == average.digest else None
    return None


def chunk_name(attempt: int, step: int) -> str:
    """Return the name under which the chunk of a step of a ring goes through the server."""
    return f"ring/{attempt}/{step}"


def _is_for(state: GossipState, silo: str) -> bool:
    """Return whether a silo may have the last mean: all do if rings are the exchange, else those of the last round."""
    return state.rules.options.exchange == "ring" or silo in state.announced
