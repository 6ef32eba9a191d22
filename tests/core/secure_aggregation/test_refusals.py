"""What a client refuses from the server: each is a way to learn more than the sum, or to mix attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.messages import (
    Confirmation,
    HeldShares,
    KeyAdvertisement,
    Member,
    Roster,
    Survivors,
    UnmaskAnswer,
    UnmaskRequest,
)
from fedplat.secure_aggregation.participant import Participant, ParticipantLimits
from fedplat.secure_aggregation.setup import AnySetup, keys_payload, survivors_payload
from support.secure_group import SecureGroup, enrolled_key, make_setup, public_key, random_of

refused = pytest.raises
SIZE = 6


def group_of(size: int = SIZE, **options: Any) -> SecureGroup:
    return SecureGroup(make_setup(size, **options), size)


def refuse_roster(group: SecureGroup, members: list[Member], reason: str, position: int = 0) -> None:
    with refused(SecureAggregationError, match=reason):
        group.participants[0].share(Roster(tuple(members), position).to_bytes())


def signed(setup: AnySetup, number: int, encryption: bytes, masking: bytes) -> KeyAdvertisement:
    return KeyAdvertisement(encryption, masking, enrolled_key(number).sign(keys_payload(setup, encryption, masking)))


def replace_keys(group: SecureGroup, position: int, encryption: bytes, masking: bytes) -> list[Member]:
    """Return the members with one whose keys were replaced, with a valid signature."""
    members = list(group.members)
    keys = signed(group.setup, position, encryption, masking)
    members[position] = msgspec.structs.replace(members[position], keys=keys)
    return members


def test_a_client_refuses_a_roster() -> None:
    group = group_of()
    first, second, *others = group.members
    rest, last = others[:-1], others[-1]
    for members, reason in (
        ([second, *others, first], "at this client's position"),
        ([second, second, *others], "at this client's position"),
        ([first, first, *others], "more than once"),
        ([first, second, *rest, msgspec.structs.replace(last, client_id="client-1")], "a client is on the roster more"),
        ([first, second, *rest, msgspec.structs.replace(last, public_key=public_key(1))], "an enrolled key is on the"),
        ([first, second, *rest, msgspec.structs.replace(last, keys=second.keys)], "a key is on the roster more"),
        ([first, second, *rest, msgspec.structs.replace(last, public_key=public_key(9))], "signature"),
        ([first, second], "the group has 2 clients; expected 3 to 6"),
        ([first, second, *others, member_of(9)], "the group has 7 clients; expected 3 to 6"),
    ):
        refuse_roster(group, members, reason)


def member_of(number: int) -> Member:
    other = SecureGroup(make_setup(SIZE), number + 1)
    return other.members[number]


def test_a_client_refuses_its_own_keys_under_another_name_and_other_keys_under_its_own() -> None:
    group = group_of()
    own = group.members[0].keys
    refuse_roster(group, replace_keys(group, 3, own.encryption_key, own.masking_key), "more than once")
    refuse_roster(group, replace_keys(group, 3, own.masking_key, bytes(31) + b"\x07"), "more than once")
    refuse_roster(group, replace_keys(group, 0, bytes(31) + b"\x07", own.masking_key), "at this client's position")
    refuse_roster(group, group.members, "position is 17", position=17)


def test_a_client_refuses_keys_that_everyone_can_compute_secrets_with() -> None:
    for weak in (bytes(32), b"\x01" + bytes(31)):
        group = group_of()
        keys = group.members[3].keys
        refuse_roster(group, replace_keys(group, 3, weak, keys.masking_key), "weak")
        refuse_roster(group, replace_keys(group, 3, keys.encryption_key, weak), "weak")


def test_a_client_refuses_the_same_key_in_another_encoding() -> None:
    group = group_of()
    key = bytearray(group.members[1].keys.encryption_key)
    key[31] |= 0x80  # X25519 ignores this bit
    refuse_roster(group, replace_keys(group, 3, bytes(key), group.members[3].keys.masking_key), "encoding")


def test_a_client_refuses_keys_signed_for_another_attempt() -> None:
    group = group_of()
    changes: list[dict[str, Any]] = [
        {"attempt": 2},
        {"round": 4},
        {"job_id": "other"},
        {"model_digest": "other"},
        {"task_digest": "other"},
        {"minimum": 4},
    ]
    for change in changes:
        members = list(group.members)
        keys = members[3].keys
        other = make_setup(SIZE, **change)
        members[3] = msgspec.structs.replace(members[3], keys=signed(other, 3, keys.encryption_key, keys.masking_key))
        refuse_roster(group, members, "signature of the keys at position 3")


def test_a_client_has_limits_of_its_own() -> None:
    def limited(**limits: Any) -> SecureGroup:
        return SecureGroup(make_setup(SIZE), SIZE, ParticipantLimits(**limits))

    with refused(SecureAggregationError, match="threshold is 0.666667; this client requires 0.9"):
        limited(min_threshold=0.9)
    refuse_roster(group := limited(min_survivors=7), group.members, "expected 7 to 6")
    refuse_roster(group := limited(trusted_keys=frozenset(map(public_key, range(1, 5)))), group.members, "position 5")
    limited(trusted_keys=frozenset(map(public_key, range(1, 6)))).share([0])
    refuse_roster(group := limited(trusted_keys=frozenset[bytes]()), group.members, "position 1 is not one")
    small = SecureGroup(make_setup(SIZE, neighbours=2), SIZE, ParticipantLimits(min_survivors=4))
    refuse_roster(small, small.members, "only 3 clients hold shares; this client requires 4")


def test_a_client_masks_one_vector_of_the_right_form() -> None:
    group = group_of(modulus=20, bits=10).reach_sharing()
    client, held = group.participants[0], group.held(0)
    wrong: list[tuple[Any, str]] = [
        (np.zeros(19, np.uint32), "19 entries; expected 20"),
        (np.zeros(20, np.int64), "int64"),
        (np.zeros((20, 1), np.uint32), "one dimension"),
        (np.full(20, 2**20, np.uint32), "not below 2.20"),
    ]
    for vector, reason in wrong:
        before = vector.copy()
        with refused(SecureAggregationError, match=reason):
            client.mask(held, vector)
        assert (vector == before).all()
    client.mask(held, group.draw(0))
    with refused(SecureAggregationError, match="masked already"):
        client.mask(held, group.draw(1))


def test_steps_have_an_order() -> None:
    group = group_of(confirm=True)
    fresh = Participant(group.setup, public_key(0), enrolled_key(0).sign, ParticipantLimits(), random_of("x"))
    roster = Roster(tuple(group.members), 0).to_bytes()
    survivors = Survivors(tuple(range(SIZE)), ())
    with refused(SecureAggregationError, match="before this client has advertised"):
        fresh.share(roster)
    with refused(SecureAggregationError, match="before the roster"):
        fresh.mask(HeldShares({}).to_bytes(), group.draw(0))
    group.reach_sharing()
    for ask in (
        lambda: group.participants[0].confirm(survivors.to_bytes()),
        lambda: group.participants[0].answer(UnmaskRequest(survivors).to_bytes()),
    ):
        with refused(SecureAggregationError, match="before this client has masked"):
            ask()
    with refused(SecureAggregationError, match="the job has no confirmation"):
        group_of().participants[0].confirm(survivors.to_bytes())


def test_a_client_takes_one_roster() -> None:
    group = group_of().reach_sharing()
    refuse_roster(group, group.members[:5], "two different messages as the roster")


def test_a_client_refuses_shares_of_strangers_and_too_few_shares() -> None:
    group = group_of(8, neighbours=4).reach_sharing()
    client, held = group.participants[0], HeldShares.from_bytes(group.held(0)).shares
    assert set(held) == {1, 2, 6, 7}
    with refused(SecureAggregationError, match="position 4, which is not a neighbour"):
        client.mask(HeldShares(held | {4: held[1]}).to_bytes(), group.draw(0))
    with refused(SecureAggregationError, match="position 0, which is not a neighbour"):
        client.mask(HeldShares(held | {0: held[1]}).to_bytes(), group.draw(0))
    with refused(SecureAggregationError, match="3 clients that hold shares of this one have sent shares; expected 4"):
        client.mask(HeldShares({1: held[1], 2: held[2]}).to_bytes(), group.draw(0))


def test_a_client_refuses_a_sum_in_which_few_share_masks_with_it() -> None:
    size = 75
    group = group_of(size).reach_sharing()
    client, near = group.participants[20], group.graph.peers(20)
    far, few = sorted({*range(size)} - {20, *near[6:]}), near[6:]
    assert len(far) + 1 >= group.graph.threshold
    held = HeldShares.from_bytes(group.held(20)).shares
    text = rf"6 of the {len(near)} clients that share masks with this one"
    with refused(SecureAggregationError, match=f"{text} have sent shares; expected 7"):
        client.mask(HeldShares({sender: held[sender] for sender in far}).to_bytes(), group.draw(20))
    client.mask(group.held(20), group.draw(20))
    with refused(SecureAggregationError, match=f"{text} survive; expected 7"):
        client.answer(UnmaskRequest(Survivors(tuple(sorted([*far, 20])), tuple(few))).to_bytes())


def other_position(group: SecureGroup) -> bytes:
    return group.held(1)


def changed_bytes(group: SecureGroup) -> bytes:
    held = HeldShares.from_bytes(group.held(0)).shares
    return HeldShares({sender: sealed[:-1] + bytes([sealed[-1] ^ 1]) for sender, sealed in held.items()}).to_bytes()


def swapped_senders(group: SecureGroup) -> bytes:
    held = HeldShares.from_bytes(group.held(0)).shares
    return HeldShares(dict(zip(held, [*list(held.values())[1:], held[1]], strict=True))).to_bytes()


@pytest.mark.parametrize("forge", [changed_bytes, swapped_senders])
def test_a_client_stops_if_the_shares_were_changed(forge: Callable[[SecureGroup], bytes]) -> None:
    group = group_of().reach_sharing()
    with refused(SecureAggregationError, match="only 0 of 5 clients' shares are for this client"):
        group.participants[0].mask(forge(group), group.draw(0))


@pytest.mark.fault("S4")
@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "other"},
        {"task_digest": "other"},
        {"attempt": 2},
        {"round": 9},
        {"job_id": "other"},
        {"bits": 19},
    ],
)
def test_a_client_stops_if_the_others_were_told_another_setup(change: dict[str, Any]) -> None:
    group, rival = SecureGroup(make_setup(SIZE), SIZE), SecureGroup(make_setup(SIZE, **change), SIZE)
    for one, other in zip(group.members, rival.members, strict=True):
        assert one.keys.encryption_key == other.keys.encryption_key
    group.share()
    rival.share()
    with refused(SecureAggregationError, match="the server may have told them something else"):
        group.participants[0].mask(rival.held(0), group.draw(0))


@pytest.mark.fault("S4")
def test_a_client_stops_if_the_others_have_another_roster() -> None:
    group = group_of(7).reach_sharing()
    smaller = Roster(tuple(group.members[:6]), 0).to_bytes()
    victim = Participant(group.setup, public_key(0), enrolled_key(0).sign, ParticipantLimits(), random_of("client 0"))
    victim.advertise()
    victim.share(smaller)
    held = HeldShares.from_bytes(group.held(0)).shares
    del held[6]
    with refused(SecureAggregationError, match="only 0 of 5"):
        victim.mask(HeldShares(held).to_bytes(), group.draw(0))


def test_a_neighbour_s_wrong_shares_do_not_end_the_attempt() -> None:
    group = group_of().reach_sharing()
    shares = group.sent[5].shares
    group.sent[5] = msgspec.structs.replace(group.sent[5], shares=shares | {1: bytes(82)})
    for position in range(SIZE):
        group.mask(position)
    request = group.request()
    for position in range(SIZE):
        group.answer(position, request)
    assert 5 not in group.answers[1].seed_shares
    group.unmask()
    assert group.total.tobytes() == group.expected.tobytes()


@pytest.mark.parametrize(
    ("survivors", "dropped", "reason"),
    [
        ((0, 1, 2, 3, 4), (4, 5), "named twice"),
        ((0, 1, 2, 3, 4, 4), (5,), "named twice"),
        ((0, 1, 2, 3, 4), (5, 5), "named twice"),
        ((0, 1, 2, 3, 4), (0, 5), "named twice"),
        ((1, 2, 3, 4), (0, 5), "not among the survivors"),
        ((1, 2, 3, 4), (5,), "not among the survivors"),
        ((0, 1, 2, 3, 4), (6,), "not below the size"),
        ((0, 1), (2, 3, 4, 5), "2 survivors; expected at least 3"),
        ((0, 1, 2), (3, 4, 5), "3 of the clients that hold shares of this one survive; expected 4"),
    ],
)
def test_a_client_refuses_survivors(survivors: tuple[int, ...], dropped: tuple[int, ...], reason: str) -> None:
    group = group_of().reach_masking(dropped=[5])
    request = UnmaskRequest(Survivors(survivors, dropped)).to_bytes()
    with refused(SecureAggregationError, match=reason):
        group.participants[0].answer(request)
    group.participants[0].answer(group.request())  # and it still answers the right request


def test_a_client_refuses_survivors_that_sent_no_shares() -> None:
    group = group_of()
    group.share(range(5))
    for position in range(5):
        group.mask(position)
    for survivors in (Survivors(tuple(range(6)), ()), Survivors(tuple(range(5)), (5,))):
        with refused(SecureAggregationError, match="sent no shares"):
            group.participants[0].answer(UnmaskRequest(survivors).to_bytes())


def test_a_client_requires_the_minimum_of_the_setup_and_its_own() -> None:
    for group, reason in (
        (SecureGroup(make_setup(7, minimum=6), 7), "5 survivors; expected at least 6"),
        (SecureGroup(make_setup(7), 7, ParticipantLimits(min_survivors=6)), "5 survivors; expected at least 6"),
    ):
        group.reach_masking(dropped=[5, 6])
        with refused(SecureAggregationError, match=reason):
            group.participants[0].answer(group.request())


def test_a_client_answers_once_and_never_with_both_shares_of_a_peer() -> None:
    group = group_of().reach_masking(dropped=[5])
    client = group.participants[0]
    first = client.answer(group.request())
    with refused(SecureAggregationError, match="two different messages as the request"):
        client.answer(UnmaskRequest(Survivors((0, 1, 2, 3), (4, 5))).to_bytes())
    assert client.answer(group.request()) == first


@pytest.mark.fault("S4")
def test_a_client_that_has_confirmed_answers_for_no_other_survivors() -> None:
    group = group_of(confirm=True).reach_masking(dropped=[5])
    client = group.participants[0]
    others = Survivors((0, 1, 2, 3), (4, 5))
    request = group.request(confirming=range(5))
    with refused(SecureAggregationError, match="two different messages as the survivors"):
        client.confirm(others.to_bytes())
    confirmations = UnmaskRequest.from_bytes(request).confirmations
    with refused(SecureAggregationError, match="it must not learn two sums"):
        client.answer(UnmaskRequest(others, confirmations).to_bytes())
    client.answer(request)


def test_a_client_answers_only_with_enough_valid_confirmations_of_its_holders() -> None:
    group = group_of(10, neighbours=4, confirm=True).reach_masking(dropped=[5])
    request = UnmaskRequest.from_bytes(group.request(confirming=[0, 1, 2, 8, 9, 3, 4]))
    client, payload = group.participants[0], survivors_payload(b"other context", request.survivors)
    valid = request.confirmations

    def refuse(confirmations: dict[int, bytes], reason: str) -> None:
        with refused(SecureAggregationError, match=reason):
            client.answer(UnmaskRequest(request.survivors, confirmations).to_bytes())

    refuse({}, "0 of the clients .* confirmed the survivors; expected 4")
    refuse({each: valid[each] for each in (0, 1, 2, 3, 4)}, "3 of the clients")  # 3 and 4 are not neighbours of 0
    refuse(valid | {1: valid[2]}, "position 1 has not confirmed")
    refuse(valid | {1: enrolled_key(1).sign(payload)}, "position 1 has not confirmed")
    client.answer(request.to_bytes())


@pytest.mark.parametrize("size", [3, 4, 6, 9])
def test_a_server_that_tells_clients_different_survivors_gets_both_secrets_of_none(size: int) -> None:
    victim, others = size - 1, range(size - 1)
    for split in range(size):
        group = group_of(size).reach_masking()
        views = {True: Survivors(tuple(range(size)), ()), False: Survivors(tuple(others), (victim,))}
        seeds = keys = 0
        for position in others:
            request = UnmaskRequest(views[position < split]).to_bytes()
            try:
                answer = UnmaskAnswer.from_bytes(group.participants[position].answer(request))
            except SecureAggregationError:  # too few survivors for this client
                continue
            seeds += victim in answer.seed_shares
            keys += victim in answer.key_shares
            assert not answer.seed_shares.keys() & answer.key_shares.keys()
        own = UnmaskRequest(views[True]).to_bytes()  # the victim itself refuses the other view
        seeds += victim in UnmaskAnswer.from_bytes(group.participants[victim].answer(own)).seed_shares
        assert min(seeds, keys) < group.graph.threshold


def test_with_confirmations_a_server_that_tells_clients_different_survivors_learns_nothing() -> None:
    group = group_of(confirm=True).reach_masking()
    views = [Survivors((0, 1, 2, 3, 4, 5), ()), Survivors((0, 1, 2, 3, 4), (5,))]
    confirmed: list[dict[int, bytes]] = [{}, {}]
    for position in range(5):
        view = position % 2
        content = group.participants[position].confirm(views[view].to_bytes())
        confirmed[view][position] = Confirmation.from_bytes(content).signature
    for position in range(5):
        view = position % 2
        with refused(SecureAggregationError, match="have confirmed the survivors; expected 4"):
            group.participants[position].answer(UnmaskRequest(views[view], confirmed[view]).to_bytes())


def test_messages_that_are_not_of_the_protocol_are_refused() -> None:
    group = group_of().reach_masking()
    fresh = group_of().participants[0]
    for content in (b"", b"\xc1", b"\x90", bytes(1_000_000), Confirmation(bytes(64)).to_bytes()):
        with refused(SecureAggregationError):
            fresh.share(content)
        with refused(SecureAggregationError):
            group.participants[0].answer(content)


def test_secrets_are_not_shown() -> None:
    group = group_of().reach_sharing()
    client = group.participants[0]
    secrets = [random_of("client 0")(32) for _ in range(1)]
    for value in vars(client).values():
        assert not any(each.hex() in repr(value) or repr(each)[2:-1] in repr(value) for each in secrets)
    client.mask(group.held(0), group.draw(0))
    assert client._secrets is None  # pyright: ignore[reportPrivateUsage] -- nothing else can leak them
