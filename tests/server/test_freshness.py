"""What distinguishes a fresh call from a repeated one: the window of counters, and nonces."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedplat.wire import auth
from fedplat_server.auth import authentication
from fedplat_server.auth.authentication import (
    CHALLENGE_VALID_S,
    MAX_OF_CLIENT,
    MAX_USED_CHALLENGES,
    RANDOM_BYTES,
    SIZE,
    Challenges,
    ReplayWindow,
    Sessions,
)

pytestmark = pytest.mark.fault("F21")
NEAR = st.integers(1, 40)
FAR = st.integers(1, 5 * SIZE)
ANY = st.integers(-5, auth.MAX_COUNTER)

# --- counters --------------------------------------------------------------------------------------------------------


@given(st.lists(NEAR | FAR | ANY, max_size=60))
@example([1, 1])
@example([0])
@example([SIZE, 0, 1, SIZE + 1, 1, 2, 2])
@example([5, auth.MAX_COUNTER, 5])
def test_each_counter_is_accepted_once_and_none_that_is_too_old(numbers: list[int]) -> None:
    """Compared with a model that remembers everything."""
    now, seen = ReplayWindow(), {0}
    for number in numbers:
        good = number not in seen and number > max(seen) - SIZE and number >= 0
        after = now.accept(number)
        assert (after is not None) == good, number
        if after is not None:
            now = after
            seen.add(number)
        assert now.highest == max(seen)


@given(st.permutations(range(1, 60)))
def test_whatever_the_order_all_are_accepted_once(numbers: list[int]) -> None:
    now: ReplayWindow | None = ReplayWindow()
    for number in numbers:
        assert now is not None
        now = now.accept(number)
    assert now is not None
    assert all(now.accept(number) is None for number in numbers)


@given(st.lists(FAR | ANY, max_size=30))
def test_a_window_takes_no_more_memory_than_its_size(numbers: list[int]) -> None:
    now = ReplayWindow()
    for number in numbers:
        now = now.accept(number) or now
        assert 0 <= now.seen < 1 << SIZE
    assert sys.getsizeof(now.seen) < 300


def test_a_refused_number_changes_nothing() -> None:
    now = ReplayWindow().accept(7)
    assert now is not None
    assert now.accept(7) is None
    assert now == ReplayWindow(7, authentication.ReplayWindow().accept(7).seen)  # pyright: ignore[reportOptionalMemberAccess]
    assert dataclasses.replace(now).accept(6) is not None


# --- sessions --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 40)), max_size=80))
def test_sessions_that_are_remembered_have_a_bound(steps: list[tuple[bool, int, int]]) -> None:
    """Each client has a bound, too, so that it cannot evict others' sessions by opening many."""
    sessions, opened = Sessions(max_sessions=10), list[tuple[str, str]]()
    for is_opening, client, which in steps:
        if is_opening or not opened:
            opened.append((f"s-{len(opened)}", f"c-{client}"))
            sessions.open(*opened[-1], len(opened))
            assert sessions.find(opened[-1][0]) is not None
        else:
            found = sessions.find(opened[which % len(opened)][0])
            assert found is None or found.client_id == opened[which % len(opened)][1]
        known = [client_id for session_id, client_id in opened if sessions.find(session_id) is not None]
        assert len(known) <= 10
        assert all(known.count(client_id) <= MAX_OF_CLIENT for client_id in known)


def test_a_client_that_opens_many_sessions_pushes_no_other_out() -> None:
    sessions = Sessions(max_sessions=10)
    sessions.open("quiet", "c-1", 1)
    for number in range(1000):
        sessions.open(f"s-{number}", "c-2", number)
    assert sessions.find("quiet") is not None


# --- nonces ----------------------------------------------------------------------------------------------------------

KEY = b"k" * 32
MOMENTS = st.floats(0.0, 1e6)


def random(number: int) -> bytes:
    return number.to_bytes(RANDOM_BYTES, "big")


@given(MOMENTS, st.floats(0.0, 3 * CHALLENGE_VALID_S))
@example(0.0, 0.0)
@example(5.0, CHALLENGE_VALID_S + 0.01)
def test_a_nonce_is_good_once_and_for_a_while(made: float, later: float) -> None:
    mine = Challenges(KEY)
    nonce = mine.new(made, random(1))
    is_good = int((made + later) * 1000) - int(made * 1000) <= CHALLENGE_VALID_S * 1000
    assert mine.redeem(nonce, made + later) == is_good
    for again in (0.0, later, CHALLENGE_VALID_S, 10 * CHALLENGE_VALID_S):
        assert not mine.redeem(nonce, made + later + again)


@given(MOMENTS, st.data())
def test_no_other_bytes_are_a_nonce(moment: float, data: st.DataObject) -> None:
    mine = Challenges(KEY)
    nonce = mine.new(moment, random(1))
    place = data.draw(st.integers(0, len(nonce) - 1))
    forged = bytearray(nonce)
    forged[place] ^= data.draw(st.integers(1, 255))
    shorter, longer = nonce[:place], nonce + data.draw(st.binary(min_size=1, max_size=40))
    foreign = Challenges(b"j" * 32).new(moment, random(1))
    for bad in (bytes(forged), shorter, longer, foreign, data.draw(st.binary(max_size=80))):
        assert not mine.redeem(bad, moment)
    assert mine.redeem(nonce, moment)  # none of the bad nonces has used it up


@given(st.lists(st.tuples(st.integers(0, 19), st.floats(0.0, 100.0)), max_size=60))
def test_nonces_in_any_order_at_any_time_are_good_once_each(steps: list[tuple[int, float]]) -> None:
    mine, now, taken = Challenges(KEY), 0.0, set[int]()
    nonces = [mine.new(10.0 * number, random(number)) for number in range(20)]
    for number, pause in steps:
        now += pause
        if mine.redeem(nonces[number], now):
            assert number not in taken
            taken.add(number)
        else:
            assert number in taken or now > 10.0 * number + CHALLENGE_VALID_S


def test_used_nonces_take_bounded_memory_and_are_never_good_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many are used at once, the oldest are refused rather than accepted twice."""
    assert MAX_USED_CHALLENGES >= 10_000
    monkeypatch.setattr(authentication, "MAX_USED_CHALLENGES", 50)
    mine = Challenges(KEY)
    nonces = [mine.new(number / 1000, random(number)) for number in range(200)]
    assert all(mine.redeem(nonce, 1.0) for nonce in nonces)
    assert len(mine._used) == 50  # pyright: ignore[reportPrivateUsage]
    assert not any(mine.redeem(nonce, 1.0) for nonce in nonces)
    assert mine.redeem(mine.new(1.0, random(999)), 1.0)


def test_nonces_that_have_expired_are_forgotten() -> None:
    mine = Challenges(KEY)
    for number in range(100):
        assert mine.redeem(mine.new(float(number), random(number)), float(number))
    assert mine.redeem(mine.new(1000.0, random(1000)), 1000.0)
    assert len(mine._used) == 1  # pyright: ignore[reportPrivateUsage]
