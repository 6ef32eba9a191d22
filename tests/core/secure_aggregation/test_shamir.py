"""Shares recover a secret, fewer tell nothing of it, and wrong ones are found."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import shamir
from support.secure_group import random_of

SECRET = bytes.fromhex("ff" * 31 + "fe")


def is_prime(number: int) -> bool:
    """Miller and Rabin's test with 20 bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 22):
        value = pow(base, odd, number)
        if value not in (1, number - 1) and all((value := value * value % number) != number - 1 for _ in range(twos)):
            return False
    return True


def shares_of(secret: bytes, threshold: int, holders: list[int]) -> dict[int, int]:
    shares = shamir.split(secret, threshold, holders, random_of("shares"))
    return dict(zip(holders, map(shamir.read_share, shares), strict=True))


def test_the_field_is_the_first_prime_above_all_secrets() -> None:
    assert [offset for offset in range(1, 298) if is_prime(2**256 + offset)] == [297]
    assert shamir.PRIME == 2**256 + 297


def test_shares_are_values_of_one_polynomial_of_the_right_degree() -> None:
    drawn = random_of("shares")(49 * 3)
    cubic, square, linear = (int.from_bytes(drawn[49 * i : 49 * i + 49], "big") for i in range(3))
    secret = int.from_bytes(SECRET, "big")
    for holder, share in shares_of(SECRET, 4, [0, 1, 7, 999]).items():
        x = holder + 1
        assert share == (secret + linear * x + square * x**2 + cubic * x**3) % shamir.PRIME


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    secret=st.binary(min_size=32, max_size=32),
    holders=st.sets(st.integers(0, 999), min_size=1, max_size=30),
)
def test_any_enough_shares_recover_the_secret_and_wrong_ones_are_found(
    data: st.DataObject, secret: bytes, holders: set[int]
) -> None:
    threshold = data.draw(st.integers(1, len(holders)))
    shares = shares_of(secret, threshold, sorted(holders))
    answered = data.draw(st.permutations(sorted(holders)))[: data.draw(st.integers(threshold, len(holders)))]
    found = {holder: shares[holder] for holder in answered}
    assert shamir.recover(found, threshold) == secret
    assert shamir.correct(found, threshold) == (secret, frozenset())
    wrong = answered[: (len(answered) - threshold) // 2]
    for holder in wrong:
        found[holder] = (found[holder] + data.draw(st.integers(1, shamir.PRIME - 1))) % shamir.PRIME
    assert shamir.correct(found, threshold) == (secret, frozenset(wrong))


def test_more_wrong_shares_than_can_be_told_apart_give_nothing_or_another_secret() -> None:
    shares = shares_of(SECRET, 4, list(range(9)))
    for holder in range(3):
        shares[holder] = (shares[holder] + holder + 1) % shamir.PRIME
    assert shamir.correct(shares, 4) is None


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    shares = shares_of(SECRET, 3, [0, 1, 2])
    for secret in (0, 1, int.from_bytes(SECRET, "big")):  # the value at 0 that a third share would make it
        third = (secret - 3 * shares[0] + 3 * shares[1]) % shamir.PRIME
        other = {0: shares[0], 1: shares[1], 2: third}
        assert shamir.recover(other, 3) == secret.to_bytes(32, "big")


def test_a_value_above_all_secrets_is_none() -> None:
    assert shamir.recover({0: 2**256 + 1}, 1) is None
    assert shamir.correct({0: 2**256 + 1, 1: 2**256 + 1}, 1) is None


def test_shares_that_are_not_of_the_field_are_refused() -> None:
    for share in (shamir.PRIME.to_bytes(33, "big"), b"\xff" * 33, bytes(32), bytes(34)):
        with pytest.raises(SecureAggregationError, match="not an element"):
            shamir.read_share(share)
    assert shamir.read_share((shamir.PRIME - 1).to_bytes(33, "big")) == shamir.PRIME - 1


def test_a_thousand_holders_share_and_recover() -> None:
    shares = dict(enumerate(map(shamir.read_share, shamir.split(SECRET, 667, range(1000), os.urandom))))
    assert shamir.recover({holder: shares[holder] for holder in range(999, 300, -1)}, 667) == SECRET
