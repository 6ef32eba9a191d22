"""What the server refuses from clients, and how it finds wrong shares."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import unmasking
from fedplat.secure_aggregation.messages import (
    SHARE_BYTES,
    Confirmation,
    KeyAdvertisement,
    SealedShares,
    Survivors,
    UnmaskAnswer,
)
from fedplat.secure_aggregation.setup import keys_payload
from support.secure_group import SecureGroup, enrolled_key, make_setup, public_key

refused = pytest.raises


def lie(group: SecureGroup, liars: Iterable[int], about: int) -> None:
    """Replace some holders' shares of the secret of one position."""
    for liar in liars:
        answer = group.answers[liar]
        seeds, keys = dict(answer.seed_shares), dict(answer.key_shares)
        target = seeds if about in seeds else keys
        target[about] = bytes([target[about][0], target[about][1] ^ 1]) + target[about][2:]
        group.answers[liar] = UnmaskAnswer(seeds, keys)


def test_wrong_shares_are_found_and_the_others_used() -> None:
    group = SecureGroup(make_setup(15), 15).reach_answers(dropped=[2])
    lie(group, [0, 9], about=1)
    lie(group, [9], about=2)
    lie(group, [9], about=14)
    assert group.graph.threshold == 10
    assert group.unmask() == {0, 9}
    assert group.total.tobytes() == group.expected.tobytes()


def test_a_client_that_lies_about_every_secret_costs_one_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SecureGroup(make_setup(12), 12).reach_answers()
    corrections: list[int] = []
    correct = unmasking.shamir.correct

    def count(shares: dict[int, int], threshold: int) -> object:
        corrections.append(1)
        return correct(shares, threshold)

    monkeypatch.setattr(unmasking.shamir, "correct", count)
    for about in range(12):
        lie(group, [3, 5], about=about)
    assert group.unmask() == {3, 5}
    assert len(corrections) == 1
    assert group.total.tobytes() == group.expected.tobytes()


def test_too_many_wrong_shares_end_the_attempt_and_name_the_client() -> None:
    group = SecureGroup(make_setup(12), 12).reach_answers()
    lie(group, [3, 5, 7, 9, 11], about=1)
    masked = group.total.copy()
    with refused(SecureAggregationError, match="the masks of client-1 cannot be removed") as caught:
        group.unmask()
    assert caught.value.clients == ("client-1",)
    assert group.total.tobytes() == masked.tobytes()


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_one_liar_neither_stops_a_small_group_nor_has_another_client_blamed(size: int) -> None:
    group = SecureGroup(make_setup(size), size).reach_answers()
    lie(group, [0], about=1)
    lie(group, [0], about=2)
    assert group.unmask() == {0}
    assert group.total.tobytes() == group.expected.tobytes()


@pytest.mark.parametrize("size", [4, 5, 30])
def test_a_client_is_not_blamed_if_one_holder_of_its_shares_could_be_the_cause(size: int) -> None:
    group = SecureGroup(make_setup(size), size).reach_answers()
    for position in range(group.graph.threshold, size):
        del group.answers[position]
    lie(group, [0], about=1)
    with refused(SecureAggregationError, match="the masks of client-1 cannot be removed") as caught:
        group.unmask()
    assert caught.value.clients == ()


def test_a_wrong_commitment_ends_the_attempt_and_names_its_client() -> None:
    group = SecureGroup(make_setup(5), 5).reach_answers()
    group.sent[3] = msgspec.structs.replace(group.sent[3], commitment=bytes(32))
    with refused(SecureAggregationError, match="the masks of client-3 cannot be removed") as caught:
        group.unmask()
    assert caught.value.clients == ("client-3",)


def test_clients_that_lie_about_all_do_not_have_all_blamed() -> None:
    group = SecureGroup(make_setup(12), 12).reach_answers()
    for about in range(12):
        lie(group, [3, 5, 7, 9, 11], about=about)
    with refused(
        SecureAggregationError, match="of client-0, client-1, client-2 and 9 more cannot be removed"
    ) as caught:
        group.unmask()
    assert caught.value.clients == ()


def test_too_few_answers_end_the_attempt() -> None:
    group = SecureGroup(make_setup(6), 6).reach_answers(dropped=[5])
    for position in (3, 4):
        del group.answers[position]
    with refused(SecureAggregationError, match="cannot be removed"):
        group.unmask()


def test_the_survivors_must_be_those_that_sent_shares() -> None:
    group = SecureGroup(make_setup(4), 4).reach_answers()
    for survivors in (Survivors((0, 1, 2), ()), Survivors((0, 1, 2, 3), (3,))):
        with refused(SecureAggregationError, match="not those that sent shares"):
            unmasking.remove_masks(group.setup, group.members, group.sent, survivors, group.answers, group.total)
    with refused(SecureAggregationError, match="19 entries; expected 20"):
        unmasking.remove_masks(group.setup, group.members, group.sent, group.survivors, group.answers, group.total[:-1])


def test_keys_are_checked_when_they_arrive() -> None:
    group = SecureGroup(make_setup(4), 4)
    keys = group.members[0].keys

    def refuse(reason: str, encryption: bytes = keys.encryption_key, masking: bytes = keys.masking_key) -> None:
        signature = enrolled_key(0).sign(keys_payload(group.setup, encryption, masking))
        with refused(SecureAggregationError, match=reason):
            unmasking.check_keys(group.setup, public_key(0), KeyAdvertisement(encryption, masking, signature))

    refuse("weak", encryption=bytes(32))
    refuse("weak", masking=b"\x01" + bytes(31))
    refuse("encoding", masking=keys.masking_key[:-1] + bytes([keys.masking_key[-1] | 0x80]))
    refuse("both keys are the same", encryption=keys.masking_key)
    for setup, key in ((make_setup(4, attempt=2), public_key(0)), (group.setup, public_key(1))):
        with refused(SecureAggregationError, match="signature"):
            unmasking.check_keys(setup, key, keys)


def test_shares_confirmations_and_answers_are_checked_when_they_arrive() -> None:
    group = SecureGroup(make_setup(8, neighbours=4, confirm=True), 8).reach_masking(dropped=[7])
    shares = group.sent[0].shares
    for changed in ({**shares, 4: shares[1]}, {each: shares[each] for each in (1, 2, 6)}, {**shares, 0: shares[1]}):
        with refused(SecureAggregationError, match="one for each of 4 neighbours"):
            unmasking.check_shares(group.graph, 0, SealedShares(changed, bytes(32)))

    confirmation = Confirmation.from_bytes(group.participants[1].confirm(group.survivors.to_bytes()))
    unmasking.check_confirmation(group.setup, group.members, 1, group.survivors, confirmation)
    for position, survivors in ((2, group.survivors), (1, Survivors((0, 1, 2, 3, 4, 5), (6, 7)))):
        with refused(SecureAggregationError, match="not the client's signature"):
            unmasking.check_confirmation(group.setup, group.members, position, survivors, confirmation)

    request = group.request(confirming=range(7))
    answer = UnmaskAnswer.from_bytes(group.participants[0].answer(request))
    assert set(answer.seed_shares) == {0, 1, 2, 6}
    assert set(answer.key_shares) == {7}
    share = answer.seed_shares[0]
    for seeds, keys, reason in (
        ({**answer.seed_shares, 4: share}, answer.key_shares, "not asked for"),
        ({**answer.seed_shares, 7: share}, answer.key_shares, "not asked for"),
        (answer.seed_shares, {1: share}, "not asked for"),
        ({0: share, 1: share}, answer.key_shares, "3 shares; expected at least 4"),
        ({**answer.seed_shares, 0: b"\xff" * SHARE_BYTES}, answer.key_shares, "not an element"),
    ):
        with refused(SecureAggregationError, match=reason):
            unmasking.check_answer(group.graph, 0, group.survivors, UnmaskAnswer(seeds, keys))
    unmasking.check_answer(group.graph, 0, group.survivors, answer)
