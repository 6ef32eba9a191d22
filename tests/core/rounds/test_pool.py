"""The pool of clients that may be drawn, compared with a plain set, and which of them rest."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.rounds import ParticipationHistory
from fedplat.rounds.demand import EligibleClients
from fedplat.sampling import Candidates, Uniform
from support.rounds.driver import make_client
from support.rounds.pools import key, names, took_part


def test_clients_that_come_and_go_leave_no_gap() -> None:
    rng, expected = np.random.default_rng(0), set[str]()
    pool = EligibleClients(lambda client: client.client_id != "c7", ParticipationHistory(), key(1))
    for _ in range(3000):
        name = f"c{rng.integers(40)}"
        if name in expected or rng.random() < 0.3:
            pool.leave(name)
            expected.discard(name)
        else:
            pool.enter(make_client(name, labels={"name": name}))
            expected.add(name)
            expected.discard("c7")
        assert len(pool) == len(expected)
    assert names(pool) == expected
    assert [pool[i].client_id for i in range(len(pool))] == pool.values_of("name")


def test_it_is_what_policies_draw_from() -> None:
    memory = ParticipationHistory()
    for name, round_ in (("a", 1), ("gone", 1), ("c", 2)):
        memory.record(took_part(name, round_))
    pool: EligibleClients = EligibleClients(lambda _: True, memory, key(3))
    for name in "abc":
        pool.enter(make_client(name))
    candidates: Candidates = pool
    known = {pool[index].client_id: past.round for index, past in candidates.list_known()}
    assert known == {"a": 1, "c": 2}
    assert (candidates.round, len(candidates), candidates.values_of("none")) == (3, 3, [None] * 3)
    assert sorted(Uniform().draw(candidates, 5, np.random.default_rng(0))) == [0, 1, 2]


@pytest.mark.parametrize("num_known", [1, 5])
def test_the_known_are_found_whether_they_or_the_waiting_are_fewer(num_known: int) -> None:
    memory = ParticipationHistory()
    for i in range(num_known):
        memory.record(took_part(f"c{i}", 1))
    pool = EligibleClients(lambda _: True, memory, key(2))
    for i in (2, 0, 1):
        pool.enter(make_client(f"c{i}"))
    expected = [index for index in range(3) if int(pool[index].client_id[1:]) < num_known]
    assert [index for index, _ in pool.list_known()] == expected


def test_a_client_that_took_part_in_the_attempt_itself_rests() -> None:
    """An attempt that draws again must not draw it; another attempt at the round may, and the next rounds may not."""
    memory = ParticipationHistory(min_separation=1)
    memory.record(took_part("a", 1, 1))
    pool = EligibleClients(lambda _: True, memory, key(1, 1))
    for name in "ab":
        pool.enter(make_client(name))
    assert (names(pool), pool.num_resting) == ({"b"}, 1)
    pool.advance_to(key(1, 2))
    assert (names(pool), pool.num_resting) == ({"a", "b"}, 0)
    pool.advance_to(key(2, 1))
    assert (names(pool), pool.num_resting) == ({"b"}, 1)
    pool.advance_to(key(2, 2))
    assert names(pool) == {"b"}
    pool.advance_to(key(3, 1))
    assert (names(pool), pool.num_resting) == ({"a", "b"}, 0)


def test_who_leaves_while_resting_is_gone() -> None:
    memory = ParticipationHistory(min_separation=2)
    memory.record(took_part("a", 1))
    pool = EligibleClients(lambda _: True, memory, key(2))
    pool.enter(make_client("a"))
    pool.leave("a")
    pool.advance_to(key(9))
    assert (len(pool), pool.num_resting) == (0, 0)


def test_without_a_rest_no_client_rests() -> None:
    memory = ParticipationHistory()
    memory.record(took_part("a", 2, 1))
    assert [memory.rounds_to_rest("a", round_, number) for round_ in (2, 3) for number in (1, 2)] == [0] * 4
