"""A client's part in the secure aggregation of one attempt.

The client's steps in Bonawitz et al. 2017, Figure 4, with the checks of a client that does not trust the server. The
private part is the vector, the secrets from which masks are derived, and the shares of other clients' secrets. What a
participant returns is public: a server that sees all of it learns the sum of the survivors' vectors, as long as fewer
than `Graph.threshold` of the holders of a client's secrets work with it (less than a third of them, by default, if the
server tells different clients different things).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import messages, primitives, shamir
from fedplat.secure_aggregation.primitives import KeyPair, ShareLink, SharePair, check_public_key, is_signature
from fedplat.secure_aggregation.setup import AnySetup, Graph, keys_payload, survivors_payload


class ParticipantLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """What a client requires of a secure aggregation, whatever the server says.

    `min_survivors` is the minimum number of clients in a sum, of those that hold shares of this one and itself.
    `min_threshold` is the minimum part of the holders of a secret that must answer to recover it. `trusted_keys` are
    the only others that may be in its group, by the public keys with which they are enrolled; None: any. With
    `require_confirmation`, clients must confirm the survivors to each other.
    """

    min_survivors: Annotated[int, Meta(ge=3)] = 3
    min_threshold: Annotated[float, Meta(ge=0.5, le=1.0)] = 0.5
    trusted_keys: frozenset[bytes] | None = None
    require_confirmation: bool = False


@dataclasses.dataclass(frozen=True)
class _Secrets:
    """What must not leave the client before it has masked its vector; after that it is not needed."""

    encryption: KeyPair = dataclasses.field(repr=False)
    masking: KeyPair = dataclasses.field(repr=False)
    seed: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A position in a group."""

    members: Sequence[messages.Member]
    position: int
    graph: Graph
    context: bytes

    @property
    def neighbours(self) -> list[int]:
        return self.graph.neighbours(self.position)

    @property
    def peers(self) -> list[int]:
        return self.graph.peers(self.position)

    @property
    def holders(self) -> list[int]:
        return self.graph.holders(self.position)

    def keys_of(self, position: int) -> messages.KeyAdvertisement:
        return self.members[position].keys


class Participant:
    """A client in one attempt: `advertise`, `share`, `mask`, `confirm` if the job has it, and `answer`, in this order.

    Each step happens once. The same input again returns the same bytes, so that a message can be sent again; another
    input raises. All methods raise `SecureAggregationError` for what the client must not accept, and then have changed
    nothing. `sign` signs with the key with which the client is enrolled, whose public key is `public_key`.

        participant = Participant(setup, public_key, sign, ParticipantLimits())
        keys = participant.advertise()  # to the server, which answers with the roster
        shares = participant.share(roster)  # to the server, which answers with the shares held for others
        participant.mask(held, vector)  # then `vector` is sent
        answer = participant.answer(request)  # to the server, which asks for it once the survivors are known
    """

    def __init__(
        self,
        setup: AnySetup,
        public_key: bytes,
        sign: Callable[[bytes], bytes],
        limits: ParticipantLimits,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if setup.options.threshold < limits.min_threshold:
            raise SecureAggregationError(
                f"the job's threshold is {setup.options.threshold:g}; this client requires {limits.min_threshold:g}"
            )
        if limits.require_confirmation and not setup.options.confirm:
            raise SecureAggregationError(
                "this client requires that clients confirm the survivors to each other; the job needs "
                "[secure_aggregation] confirm = true"
            )
        self._setup = setup
        self._public_key = public_key
        self._sign = sign
        self._limits = limits
        self._random = random
        self._advertisement: messages.KeyAdvertisement | None = None
        self._secrets: _Secrets | None = None
        self._place: _Place | None = None
        self._own_shares: SharePair | None = None
        self._senders: frozenset[int] | None = None
        self._held: dict[int, SharePair] = {}
        self._survivors: messages.Survivors | None = None
        self._done: dict[str, tuple[bytes, bytes]] = {}

    def advertise(self) -> bytes:
        """Return the public keys for this attempt, signed (`KeyAdvertisement`)."""
        if self._advertisement is None:
            secrets = _Secrets(KeyPair.draw(self._random), KeyPair.draw(self._random), self._random(messages.KEY_BYTES))
            encryption, masking = secrets.encryption.public, secrets.masking.public
            signature = self._sign(keys_payload(self._setup, encryption, masking))
            self._secrets = secrets
            self._advertisement = messages.KeyAdvertisement(encryption, masking, signature)
        return self._advertisement.to_bytes()

    def share(self, roster: bytes) -> bytes:
        """Return encrypted shares of this client's secrets for its neighbours on a roster (`SealedShares`)."""
        return self._once("roster", roster, self._share)

    def mask(self, held: bytes, vector: primitives.Vector) -> None:
        """Add this client's masks to its vector, in place, and open the shares that it holds (`HeldShares`).

        A vector is masked once only: the difference of two vectors under the same masks is the difference of both.
        Shares that cannot be opened are left out as long as enough others remain, so that no client can make its
        neighbours give up.
        """
        secrets, place = self._secrets, self._place
        if place is None:
            raise SecureAggregationError("the shares of others came before the roster")
        if secrets is None:
            raise SecureAggregationError("a vector was masked already; a new attempt draws new masks")
        self._check_vector(vector)
        sealed = messages.HeldShares.from_bytes(held).shares
        self._check_senders(place, sealed.keys())
        opened = _open_shares(place, secrets, sealed)
        if len(opened) + 1 < place.graph.threshold:
            raise SecureAggregationError(
                f"only {len(opened)} of {len(sealed)} clients' shares are for this client, in this attempt and with "
                f"this roster; expected {place.graph.threshold - 1}: the server may have told them something else"
            )
        added = [primitives.derive_own_key(secrets.seed, place.context, place.position)]
        subtracted: list[bytes] = []
        for peer in sealed.keys() & frozenset(place.peers):
            pair = (place.position, peer)
            key = primitives.derive_pair_key(secrets.masking, place.keys_of(peer).masking_key, place.context, pair)
            (added if peer > place.position else subtracted).append(key)
        primitives.apply_masks(vector, self._setup.encoding.modulus, added, subtracted)
        self._senders, self._held, self._secrets = frozenset(sealed), opened, None

    def confirm(self, survivors: bytes) -> bytes:
        """Return this client's signature of the survivors (`Confirmation`); it accepts no others after that."""
        if not self._setup.options.confirm:
            raise SecureAggregationError("the job has no confirmation of survivors, but the server asks for one")
        return self._once("survivors", survivors, self._confirm)

    def answer(self, request: bytes) -> bytes:
        """Return the shares with which the masks are removed from the sum of the survivors (`UnmaskAnswer`).

        With `confirm`, `Graph.threshold` of the holders of this client's secrets must have signed the same survivors
        (Bonawitz et al. 2017, Figure 4, round 3). Two sets of so many have a third of the holders in common with the
        default threshold, and an honest client signs once: if fewer than a third work with the server, all clients with
        these holders answer for the same sum. In a graph that holds from each client to the next ones.
        """
        return self._once("request", request, self._answer)

    def _once(self, name: str, content: bytes, compute: Callable[[bytes], bytes]) -> bytes:
        digest = hashlib.sha256(content).digest()
        if name not in self._done:
            self._done[name] = digest, compute(content)
        first, output = self._done[name]
        if first != digest:
            raise SecureAggregationError(f"the server sent two different messages as the {name} of one attempt")
        return output

    def _share(self, content: bytes) -> bytes:
        if self._secrets is None or self._advertisement is None:
            raise SecureAggregationError("the roster came before this client has advertised its keys")
        secrets, roster = self._secrets, messages.Roster.from_bytes(content)
        self._check_roster(roster, self._advertisement)
        graph = Graph.of(self._setup.options, len(roster.members))
        self._check_graph(graph)
        place = _Place(roster.members, roster.position, graph, self._setup.context(roster.members))
        seed_shares, key_shares = (
            dict(zip(place.holders, shamir.split(each, graph.threshold, place.holders, self._random), strict=True))
            for each in (secrets.seed, secrets.masking.secret)
        )
        sealed = {
            holder: ShareLink(place.context, place.position, holder).seal(
                secrets.encryption,
                place.keys_of(holder).encryption_key,
                SharePair(seed_shares[holder], key_shares[holder]),
            )
            for holder in place.neighbours
        }
        commitment = primitives.commit_seed(secrets.seed, place.context, place.position)
        self._place = place
        self._own_shares = SharePair(seed_shares[place.position], key_shares[place.position])
        return messages.SealedShares(sealed, commitment).to_bytes()

    def _check_roster(self, roster: messages.Roster, own: messages.KeyAdvertisement) -> None:
        members, position = roster.members, roster.position
        minimum = max(self._setup.minimum, self._limits.min_survivors)
        maximum = self._setup.encoding.max_clients
        if not minimum <= len(members) <= maximum:
            raise SecureAggregationError(f"the group has {len(members)} clients; expected {minimum} to {maximum}")
        if position >= len(members):
            raise SecureAggregationError(f"the position is {position} in a group of {len(members)}")
        if members[position].public_key != self._public_key or members[position].keys != own:
            raise SecureAggregationError("another client's key, or another key, is at this client's position")
        keys = [key for each in members for key in (each.keys.encryption_key, each.keys.masking_key)]
        for name, values in (
            ("a client", [each.client_id for each in members]),
            ("an enrolled key", [each.public_key for each in members]),
            ("a key", keys),
        ):
            if len(set(values)) < len(values):
                raise SecureAggregationError(f"{name} is on the roster more than once")
        for key in keys:
            check_public_key(key)
        self._check_members(members)

    def _check_members(self, members: Sequence[messages.Member]) -> None:
        trusted = None if self._limits.trusted_keys is None else self._limits.trusted_keys | {self._public_key}
        for position, member in enumerate(members):
            if trusted is not None and member.public_key not in trusted:
                raise SecureAggregationError(f"the client at position {position} is not one that this client trusts")
            payload = keys_payload(self._setup, member.keys.encryption_key, member.keys.masking_key)
            if not is_signature(member.public_key, member.keys.signature, payload):
                raise SecureAggregationError(f"the signature of the keys at position {position} is not valid")

    def _check_graph(self, graph: Graph) -> None:
        holders, limits = graph.degree + 1, self._limits
        if holders < limits.min_survivors:
            raise SecureAggregationError(
                f"only {holders} clients hold shares; this client requires {limits.min_survivors}"
            )
        if graph.threshold < limits.min_threshold * holders or 2 * graph.threshold <= holders:
            raise SecureAggregationError(
                f"{graph.threshold} of {holders} shares recover a secret; this client requires "
                f"{limits.min_threshold:g} of them, and more than half"
            )

    def _check_vector(self, vector: primitives.Vector) -> None:
        encoding = self._setup.encoding
        primitives.check_vector(vector, encoding.modulus)
        if len(vector) != encoding.length:
            raise SecureAggregationError(f"the vector has {len(vector)} entries; expected {encoding.length}")
        if int(np.max(vector)) >> encoding.modulus:
            raise SecureAggregationError(f"an entry of the vector is not below 2^{encoding.modulus}")

    def _check_senders(self, place: _Place, senders: Collection[int]) -> None:
        unknown = frozenset(senders) - frozenset(place.neighbours)
        if unknown:
            raise SecureAggregationError(f"there are shares of position {min(unknown)}, which is not a neighbour")
        minimum = max(place.graph.threshold, self._limits.min_survivors)
        if len(senders) + 1 < minimum:
            raise SecureAggregationError(
                f"{len(senders) + 1} clients that hold shares of this one have sent shares; expected {minimum}"
            )
        _check_peers(place, senders, "have sent shares")

    def _confirm(self, content: bytes) -> bytes:
        place = self._accept(messages.Survivors.from_bytes(content))
        assert self._survivors is not None
        return messages.Confirmation(self._sign(survivors_payload(place.context, self._survivors))).to_bytes()

    def _answer(self, content: bytes) -> bytes:
        request = messages.UnmaskRequest.from_bytes(content)
        survivors = request.survivors
        place = self._accept(survivors, request.confirmations if self._setup.options.confirm else None)
        assert self._own_shares is not None
        held = self._held | {place.position: self._own_shares}
        answer = messages.UnmaskAnswer(
            {position: held[position].seed for position in survivors.survivors if position in held},
            {position: held[position].key for position in survivors.dropped if position in held},
        )
        self._held, self._own_shares = {}, None
        return answer.to_bytes()

    def _accept(
        self, survivors: messages.Survivors, confirmations: Mapping[int, messages.Signature] | None = None
    ) -> _Place:
        """Check survivors, and commit to them: no other ones are accepted after that."""
        place, senders = self._place, self._senders
        if place is None or senders is None:
            raise SecureAggregationError("the server names survivors before this client has masked its vector")
        if self._survivors is not None and survivors != self._survivors:
            raise SecureAggregationError("the server named other survivors before: it must not learn two sums")
        self._check_survivors(place, senders, survivors)
        if confirmations is not None:
            _check_confirmations(place, survivors, confirmations)
        self._survivors = survivors
        return place

    def _check_survivors(self, place: _Place, senders: frozenset[int], survivors: messages.Survivors) -> None:
        alive, dropped = frozenset(survivors.survivors), frozenset(survivors.dropped)
        if len(alive | dropped) < len(survivors.survivors) + len(survivors.dropped):
            raise SecureAggregationError("a position is named twice as a survivor or dropped, or as both")
        if max(alive | dropped, default=0) >= len(place.members):
            raise SecureAggregationError(f"a position is not below the size of the group, {len(place.members)}")
        if place.position not in alive:
            raise SecureAggregationError("this client sent its vector, but is not among the survivors")
        holders = frozenset(place.holders)
        if not (alive | dropped) & holders <= senders | {place.position}:
            raise SecureAggregationError("a neighbour that sent no shares is named as a survivor or dropped")
        minimum = max(self._setup.minimum, self._limits.min_survivors)
        if len(alive) < minimum:
            raise SecureAggregationError(f"there are {len(alive)} survivors; expected at least {minimum}")
        minimum = max(place.graph.threshold, self._limits.min_survivors)
        if len(alive & holders) < minimum:
            raise SecureAggregationError(
                f"{len(alive & holders)} of the clients that hold shares of this one survive; expected {minimum}"
            )
        _check_peers(place, alive & senders, "survive")


def _check_peers(place: _Place, left: Collection[int], do: str) -> None:
    """Check that a quarter of the clients that share masks with this one are left, which fails by chance only rarely.

    Honest servers lose so many of them only together with so many clients that the attempt fails anyway.
    """
    peers = place.peers
    found, least = len(frozenset(left).intersection(peers)), max(2, len(peers) // 4)
    if found < least:
        raise SecureAggregationError(
            f"{found} of the {len(peers)} clients that share masks with this one {do}; expected {least}"
        )


def _open_shares(place: _Place, secrets: _Secrets, sealed: Mapping[int, bytes]) -> dict[int, SharePair]:
    opened: dict[int, SharePair] = {}
    for sender, content in sealed.items():
        link = ShareLink(place.context, sender, place.position)
        try:
            opened[sender] = link.open(secrets.encryption, place.keys_of(sender).encryption_key, content)
        except SecureAggregationError:
            continue
    return opened


def _check_confirmations(
    place: _Place, survivors: messages.Survivors, confirmations: Mapping[int, messages.Signature]
) -> None:
    payload = survivors_payload(place.context, survivors)
    signers = frozenset(place.holders) & frozenset(survivors.survivors) & confirmations.keys()
    for position in signers:
        if not is_signature(place.members[position].public_key, confirmations[position], payload):
            raise SecureAggregationError(f"position {position} has not confirmed these survivors")
    if len(signers) < place.graph.threshold:
        raise SecureAggregationError(
            f"{len(signers)} of the clients that hold shares of this one have confirmed the survivors; "
            f"expected {place.graph.threshold}"
        )
