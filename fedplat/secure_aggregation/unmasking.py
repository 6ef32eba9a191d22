"""The server's part in the secure aggregation of one attempt: check what clients send, forward it, remove the masks.

The server's steps in Bonawitz et al. 2017, Figure 4. Messages are checked when they arrive, so that a client's mistake
ends its own participation and does not reach the others. All functions raise `SecureAggregationError`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import primitives, shamir
from fedplat.secure_aggregation.messages import (
    Confirmation,
    HeldShares,
    KeyAdvertisement,
    Member,
    Roster,
    SealedShares,
    Share,
    Survivors,
    UnmaskAnswer,
    UnmaskRequest,
)
from fedplat.secure_aggregation.setup import AnySetup, BaseSetup, Graph, keys_payload, survivors_payload

_MAX_SEARCH = 1_000_000
"""Bound on the work of a search for right shares, in multiplications: less than a second."""


def check_keys(setup: BaseSetup, public_key: bytes, keys: KeyAdvertisement) -> None:
    """Check the keys that a client advertises; `public_key` is the one with which it is enrolled.

    The coordinator checks that no other client has advertised them: clients refuse a roster with the same key twice.
    """
    payload = keys_payload(setup, keys.encryption_key, keys.masking_key)
    if not primitives.is_signature(public_key, keys.signature, payload):
        raise SecureAggregationError("the signature of the keys is not that of the enrolled client over this attempt")
    for key in (keys.encryption_key, keys.masking_key):
        primitives.check_public_key(key)
    if keys.encryption_key == keys.masking_key:
        raise SecureAggregationError("both keys are the same; expected two key pairs")


def make_roster(members: Sequence[Member], position: int) -> bytes:
    """Return the message to the client at a position (`Roster`)."""
    return Roster(tuple(members), position).to_bytes()


def check_shares(graph: Graph, position: int, shares: SealedShares) -> None:
    """Check the encrypted shares of the client at a position: one for each neighbour."""
    if shares.shares.keys() != frozenset(graph.neighbours(position)):
        raise SecureAggregationError(
            f"there are shares for {len(shares.shares)} positions; expected one for each of {graph.degree} neighbours"
        )


def route_shares(graph: Graph, position: int, sent: Mapping[int, SealedShares]) -> bytes:
    """Return the message to the client at a position with the shares that it holds (`HeldShares`)."""
    held = {sender: sent[sender].shares[position] for sender in graph.neighbours(position) if sender in sent}
    return HeldShares(held).to_bytes()


def check_confirmation(
    setup: BaseSetup, members: Sequence[Member], position: int, survivors: Survivors, confirmation: Confirmation
) -> None:
    """Check the signature of the survivors by the client at a position."""
    payload = survivors_payload(setup.context(members), survivors)
    if not primitives.is_signature(members[position].public_key, confirmation.signature, payload):
        raise SecureAggregationError("the confirmation is not the client's signature of the survivors")


def make_request(survivors: Survivors, confirmations: Mapping[int, Confirmation]) -> bytes:
    """Return the message to survivors that asks for their shares (`UnmaskRequest`), the same for all of a group."""
    signatures = {position: confirmations[position].signature for position in sorted(confirmations)}
    return UnmaskRequest(survivors, signatures).to_bytes()


def check_answer(graph: Graph, position: int, survivors: Survivors, answer: UnmaskAnswer) -> None:
    """Check the answer of the client at a position: shares that it holds, of the right secret, and enough of them.

    Some may be missing: it could not decrypt those of a client that sent it wrong ones.
    """
    holders = frozenset(graph.holders(position))
    expected = (holders.intersection(survivors.survivors), holders.intersection(survivors.dropped))
    if not (answer.seed_shares.keys() <= expected[0] and answer.key_shares.keys() <= expected[1]):
        raise SecureAggregationError("the answer has a share that was not asked for")
    if len(answer.seed_shares) + len(answer.key_shares) < graph.threshold:
        raise SecureAggregationError(
            f"the answer has {len(answer.seed_shares) + len(answer.key_shares)} shares; "
            f"expected at least {graph.threshold}"
        )
    for share in (*answer.seed_shares.values(), *answer.key_shares.values()):
        shamir.read_share(share)


def remove_masks(  # noqa: PLR0913 -- all messages of a group
    setup: AnySetup,
    members: Sequence[Member],
    sent: Mapping[int, SealedShares],
    survivors: Survivors,
    answers: Mapping[int, UnmaskAnswer],
    total: primitives.Vector,
    workers: int = 1,
) -> Collection[int]:
    """Remove all masks from the sum of the survivors' masked vectors, in place, and return the sources of wrong shares.

    `total` is the sum modulo 2^modulus. Wrong shares are corrected as long as the answers are enough: up to half of
    those beyond the threshold, and in small groups all of those. A returned position gave a wrong share, or was dealt
    one: the two cannot be told apart. `workers` is the number of threads. If masks cannot be removed, the error names
    the clients whose masks they are, unless a single holder of their shares could be the cause.
    """
    alive, dropped = frozenset(survivors.survivors), frozenset(survivors.dropped)
    if alive & dropped or alive | dropped != frozenset(sent):
        raise SecureAggregationError("the survivors and the dropped clients are not those that sent shares")
    if len(total) != setup.encoding.length:
        raise SecureAggregationError(f"the sum has {len(total)} entries; expected {setup.encoding.length}")
    recovery = _Recovery(setup, members, Graph.of(setup.options, len(members)), answers)
    added: list[bytes] = []
    subtracted: list[bytes] = []
    seeds = {position: recovery.recover_seed(position, sent[position].commitment) for position in sorted(alive)}
    pairs = {position: recovery.recover_keys(position) for position in sorted(dropped)}
    recovery.require_all()
    for position, seed in seeds.items():
        assert seed is not None
        subtracted.append(primitives.derive_own_key(seed, recovery.context, position))
    for position, pair in pairs.items():
        assert pair is not None
        for peer in alive.intersection(recovery.graph.peers(position)):
            key = primitives.derive_pair_key(pair, members[peer].keys.masking_key, recovery.context, (position, peer))
            (added if peer > position else subtracted).append(key)
    primitives.apply_masks(total, setup.encoding.modulus, added, subtracted, workers)
    return frozenset(recovery.wrong)


class _Recovery:
    """Recovers the secrets of a group from the shares in its clients' answers."""

    def __init__(
        self, setup: AnySetup, members: Sequence[Member], graph: Graph, answers: Mapping[int, UnmaskAnswer]
    ) -> None:
        self.graph = graph
        self.context = setup.context(members)
        self.wrong: set[int] = set()
        self._lost: list[int] = []
        self._doubtful: set[int] = set()
        self._members = members
        self._answers = answers

    def require_all(self) -> None:
        """Raise `SecureAggregationError` if a secret could not be recovered."""
        if self._lost:
            clients = [self._members[position].client_id for position in self._lost]
            named = ", ".join(clients[:3]) + (f" and {len(clients) - 3} more" if len(clients) > 3 else "")
            # So many that the holders are the cause: clients that give wrong shares must not have all others excluded.
            are_few = len(clients) <= self.graph.degree + 1 - self.graph.threshold
            culprits = [self._members[each].client_id for each in self._lost if each not in self._doubtful]
            raise SecureAggregationError(
                f"the masks of {named} cannot be removed: too many shares of their secrets are wrong or missing, as "
                "when a client sends wrong ones to the others",
                clients=culprits if are_few else (),
            )

    def recover_seed(self, position: int, commitment: bytes) -> bytes | None:
        """Return the seed of a survivor's own mask; None if it cannot be recovered."""
        return self._recover(
            position,
            lambda answer: answer.seed_shares,
            lambda seed: primitives.commit_seed(seed, self.context, position) == commitment,
        )

    def recover_keys(self, position: int) -> primitives.KeyPair | None:
        """Return the masking keys of a client that dropped out; None if they cannot be recovered."""
        public = self._members[position].keys.masking_key
        secret = self._recover(
            position, lambda answer: answer.key_shares, lambda secret: primitives.KeyPair(secret).public == public
        )
        return primitives.KeyPair(secret) if secret is not None else None

    def _recover(
        self, position: int, shares_of: Callable[[UnmaskAnswer], Mapping[int, Share]], is_right: Callable[[bytes], bool]
    ) -> bytes | None:
        """Return the secret that shares recover, or None; first from holders that have given no wrong share so far.

        A correction finds holders to avoid, so that a client that gives only wrong shares costs one of them.
        """
        threshold = self.graph.threshold
        order = sorted(self.graph.holders(position), key=lambda holder: (holder in self.wrong, holder))
        shares = {
            holder: shamir.read_share(shares_of(self._answers[holder])[position])
            for holder in order
            if holder in self._answers and position in shares_of(self._answers[holder])
        }
        if len(shares) >= threshold:
            secret = shamir.recover(shares, threshold)
            if secret is not None and is_right(secret):
                return secret
            corrected = shamir.correct(shares, threshold)
            if corrected is not None and is_right(corrected[0]):
                self.wrong |= corrected[1]
                return corrected[0]
            if self._can_search(len(shares)) and (found := self._search(shares, is_right)) is not None:
                return found
        # One wrong share is corrected if there are two beyond the threshold; by a search, one is enough.
        num_answered = sum(holder in self._answers for holder in order)
        if num_answered <= threshold + (0 if self._can_search(num_answered) else 1):
            self._doubtful.add(position)
        self._lost.append(position)
        return None

    def _can_search(self, num_shares: int) -> bool:
        """Return whether to search: it takes little time, and no other secret is lost already."""
        threshold = self.graph.threshold
        is_short = num_shares >= threshold and math.comb(num_shares, threshold) * threshold**2 <= _MAX_SEARCH
        return is_short and not self._lost

    def _search(self, shares: Mapping[int, int], is_right: Callable[[bytes], bool]) -> bytes | None:
        """Return the secret that any `threshold` of the shares recover."""
        threshold = self.graph.threshold
        for holders in itertools.combinations(shares, threshold):
            right = {holder: shares[holder] for holder in holders}
            secret = shamir.recover(right, threshold)
            if secret is None or not is_right(secret):
                continue
            del right[holders[0]]
            others = shares.keys() - frozenset(holders)
            self.wrong |= {each for each in others if shamir.recover(right | {each: shares[each]}, threshold) != secret}
            return secret
        return None
