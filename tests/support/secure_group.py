"""A group of clients in one attempt of secure aggregation, and the server's part, in one process and step by step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedplat.secure_aggregation import unmasking
from fedplat.secure_aggregation.messages import (
    Confirmation,
    KeyAdvertisement,
    Member,
    SealedShares,
    SecureAggregation,
    Survivors,
    UnmaskAnswer,
    word_of,
)
from fedplat.secure_aggregation.participant import Participant, ParticipantLimits
from fedplat.secure_aggregation.setup import AnySetup, Encoding, ExactEncoding, ExactSetup, Graph, Setup

NO_LIMITS = ParticipantLimits()
Vector = npt.NDArray[np.unsignedinteger[Any]]


@functools.cache
def enrolled_key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"enrolled %d" % number).digest())


def public_key(number: int) -> bytes:
    return enrolled_key(number).public_key().public_bytes_raw()


def random_of(name: str) -> Callable[[int], bytes]:
    """Return a source of bytes that are the same in every run; each call returns others."""
    calls = iter(range(1_000_000))
    return lambda size: hashlib.shake_256(f"{name} {next(calls)}".encode()).digest(size)


OWN = {"job_id": "job", "round": 3, "attempt": 1, "model_digest": "model", "minimum": 3, "task_digest": "task"}


def make_exact_setup(encoding: ExactEncoding, **options: Any) -> ExactSetup:
    """Return a setup for a group whose replies are integers."""
    own: dict[str, Any] = {**OWN}
    return ExactSetup(**own, options=SecureAggregation(**options), encoding=encoding)


def make_setup(size: int, *, length: int = 20, **changes: Any) -> Setup:
    """Return a setup for a group; `changes` are of the options, or of the setup itself."""
    own: dict[str, Any] = {**OWN}
    own |= {name: changes.pop(name) for name in list(changes) if name in own}
    options = SecureAggregation(**changes)
    encoding = Encoding(length - 1, 1.0, options.bits, options.modulus, 0.0, size)
    return Setup(**own, options=options, encoding=encoding)


@dataclasses.dataclass
class SecureGroup:
    """A group whose clients have advertised their keys; `sent`, `total` and so on are what the server has of them."""

    setup: AnySetup
    size: int
    limits: ParticipantLimits = NO_LIMITS

    def __post_init__(self) -> None:
        self.participants = [
            Participant(self.setup, public_key(i), enrolled_key(i).sign, self.limits, random_of(f"client {i}"))
            for i in range(self.size)
        ]
        keys = [KeyAdvertisement.from_bytes(each.advertise()) for each in self.participants]
        for i, each in enumerate(keys):
            unmasking.check_keys(self.setup, public_key(i), each)
        self.members = [Member(f"client-{i}", public_key(i), each) for i, each in enumerate(keys)]
        self.graph = Graph.of(self.setup.options, self.size)
        self.sent: dict[int, SealedShares] = {}
        self.vectors: dict[int, Vector] = {}
        self.word = word_of(self.setup.encoding.modulus)
        self.total: Vector = np.zeros(self.setup.encoding.length, self.word)
        self.answers: dict[int, UnmaskAnswer] = {}

    def share(self, positions: Iterable[int] | None = None) -> None:
        for position in range(self.size) if positions is None else positions:
            sealed = self.participants[position].share(unmasking.make_roster(self.members, position))
            shares = SealedShares.from_bytes(sealed)
            unmasking.check_shares(self.graph, position, shares)
            self.sent[position] = shares

    def held(self, position: int) -> bytes:
        return unmasking.route_shares(self.graph, position, self.sent)

    def draw(self, position: int) -> Vector:
        encoding = self.setup.encoding
        values = np.random.default_rng(position).integers(0, 2**encoding.modulus, encoding.length, np.uint64)
        values[:2] = 0, 2**encoding.modulus - 1
        return values.astype(self.word)

    def mask(self, position: int, vector: Vector | None = None) -> Vector:
        """Let a client mask its vector, random if none is given, and add it to the sum."""
        vector = self.draw(position) if vector is None else vector
        masked = vector.copy()
        self.participants[position].mask(self.held(position), masked)
        self.vectors[position] = vector
        self.total = self.reduce(self.total + masked)
        return masked

    @property
    def survivors(self) -> Survivors:
        dropped = self.sent.keys() - self.vectors.keys()
        return Survivors(tuple(sorted(self.vectors)), tuple(sorted(dropped)))

    def request(self, confirming: Collection[int] = ()) -> bytes:
        confirmations = {
            position: Confirmation.from_bytes(self.participants[position].confirm(self.survivors.to_bytes()))
            for position in confirming
        }
        for position, each in confirmations.items():
            unmasking.check_confirmation(self.setup, self.members, position, self.survivors, each)
        return unmasking.make_request(self.survivors, confirmations)

    def answer(self, position: int, request: bytes) -> None:
        answer = UnmaskAnswer.from_bytes(self.participants[position].answer(request))
        unmasking.check_answer(self.graph, position, self.survivors, answer)
        self.answers[position] = answer

    def reach_sharing(self) -> SecureGroup:
        self.share()
        return self

    def reach_masking(self, dropped: Collection[int] = ()) -> SecureGroup:
        self.share()
        for position in range(self.size):
            if position not in dropped:
                self.mask(position)
        return self

    def reach_answers(self, dropped: Collection[int] = ()) -> SecureGroup:
        self.reach_masking(dropped)
        request = self.request()
        for position in self.survivors.survivors:
            self.answer(position, request)
        return self

    def unmask(self, workers: int = 1) -> Collection[int]:
        return unmasking.remove_masks(
            self.setup, self.members, self.sent, self.survivors, self.answers, self.total, workers
        )

    @property
    def expected(self) -> Vector:
        """The sum of the survivors' vectors."""
        return self.reduce(sum(self.vectors.values(), start=np.zeros_like(self.total)))

    def reduce(self, vector: Vector) -> Vector:
        return vector & self.word.type(2**self.setup.encoding.modulus - 1)
