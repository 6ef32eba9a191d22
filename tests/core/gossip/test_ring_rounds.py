"""The coordinator of silos in a ring: attempts that are repeated, and means that stand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.gossip import stated
from fedplat.gossip.messages import (
    BeginRing,
    BeginRound,
    CommitAverage,
    EndJob,
    KeyOffered,
    RequestKeys,
    RingBroken,
    RingCompleted,
    SiloDeparted,
)
from support.gossip import Job, announced, rules


def start_ring(rounds: int = 2, minimum: int = 3) -> Job:
    job = Job(rules(minimum=minimum, rounds=rounds, exchange="ring"))
    job.announce("a", "b", "c", "d")
    assert job.of(RequestKeys) == [RequestKeys(1, 1, ("a", "b", "c", "d"))]
    return job


def test_a_ring_without_one_silo_is_repeated_with_new_keys() -> None:
    job = start_ring()
    job.offer("a", "b", "c", "d")
    assert job.of(BeginRing)
    job.send(SiloDeparted("b"))
    assert job.of(RequestKeys) == [RequestKeys(1, 2, ("a", "c", "d"))]
    job.offer("a", "c", "d")
    assert {member.silo for member in job.of(BeginRing)[0].members} == {"a", "c", "d"}
    assert job.send(RingCompleted("a", 1, 1, "old")) == ()
    job.complete("a", "c", "d")
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "c", "d"))]
    assert job.of(BeginRound) == [BeginRound(2, trains=True)]
    assert job.announce("b") == (CommitAverage(1, "mean", ("a", "c", "d")),)


def test_a_mean_that_one_silo_has_stands() -> None:
    """The difference of this mean and one without the lost silo would be that silo's model."""
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.complete("a", "c")
    job.send(SiloDeparted("b"))
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "c"))]


def test_a_mean_that_is_reported_late_stands() -> None:
    """Else this silo, and all whose reports are on their way, would have two means, without and with another silo."""
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.send(SiloDeparted("b"))
    assert job.of(RequestKeys)
    job.offer("a")
    assert job.send(RingCompleted("x", 1, 1, "mean"), RingCompleted("c", 1, 2, "mean")) == ()
    job.send(RingCompleted("c", 1, 1, "mean"))
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("c",))]
    assert job.of(BeginRound) == [BeginRound(2, trains=True)]
    assert job.announce("a", "b", "c", "d", mixed=1)
    assert job.send(RingCompleted("d", 1, 1, "mean")) == ()


def test_a_mean_that_two_silos_report_late_stands() -> None:
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.expire()
    assert job.send(RingCompleted("c", 1, 1, "mean")) == ()
    job.send(RingCompleted("a", 1, 1, "mean"))
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "c"))]


def start_ring_with_one_mean() -> Job:
    """A ring of which only "a" has reported a mean, and which is asked for keys again."""
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.complete("a", digest="of a")
    job.expire()
    assert job.of(CommitAverage) == []
    assert job.of(RequestKeys) == [RequestKeys(1, 2, ("a", "b", "c", "d"))]
    return job


def test_a_mean_that_one_silo_alone_reports_is_computed_again_by_the_same_silos() -> None:
    """It could report any model. The ring of the same silos has the same mean, which reveals nothing more."""
    job = start_ring_with_one_mean()
    job.announce("e")
    assert job.send(RingCompleted("a", 1, 1, "of a")) == ()  # it reports it again in place of a key
    job.offer("a", "b", "c", "d")
    assert {member.silo for member in job.of(BeginRing)[0].members} == {"a", "b", "c", "d"}
    job.complete("b", "c", "d", "a")
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "b", "c", "d"))]


def test_no_other_silo_joins_a_ring_that_is_repeated_for_a_mean() -> None:
    """The difference of the means of two rings would be the model of the other silo."""
    job = Job(rules(goal=5, minimum=3, exchange="ring"))
    job.announce("a", "b", "c", "d", "e")
    job.offer("a", "b", "c", "d")
    job.expire()
    job.expire()  # "e" offered no key
    assert job.of(RequestKeys) == [RequestKeys(1, 2, ("a", "b", "c", "d", "e"))]
    job.offer("e", "b", "c", "d")
    job.send(RingCompleted("a", 1, 1, "of a"))
    assert job.of(BeginRing) == []
    job.offer("e", "a")
    assert {member.silo for member in job.of(BeginRing)[0].members} == {"a", "b", "c", "d"}


@pytest.mark.parametrize("when", ["offering", "offers nothing", "reducing"])
def test_a_mean_that_one_silo_reports_stands_once_another_silo_is_lost(when: str) -> None:
    """The difference of the means of two rings would be the model of the lost silo."""
    job = start_ring_with_one_mean()
    if when == "offering":
        job.send(SiloDeparted("b"))
    elif when == "offers nothing":
        job.offer("a", "c", "d")
        job.expire()
    else:
        job.offer("a", "b", "c", "d")
        job.send(SiloDeparted("b"))
    assert job.of(CommitAverage) == [CommitAverage(1, "of a", ("a",))]


def test_a_mean_is_remembered_while_the_ring_of_the_same_silos_breaks() -> None:
    job = start_ring_with_one_mean()
    job.offer("a", "b", "c", "d")
    job.expire()
    assert job.of(RequestKeys) == [RequestKeys(1, 3, ("a", "b", "c", "d"))]
    job.send(SiloDeparted("b"))
    assert job.of(CommitAverage) == [CommitAverage(1, "of a", ("a",))]


def test_a_silo_that_reports_a_mean_and_leaves_does_not_decide() -> None:
    job = start_ring_with_one_mean()
    job.send(SiloDeparted("a"))
    job.offer("b", "c", "d")
    job.complete("b", "c", "d")
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("b", "c", "d"))]


def test_a_silo_cannot_replace_the_mean_by_breaking_rings() -> None:
    """It lets no other silo have the mean, and reports one of its own, again and again."""
    job = start_ring()
    for attempt in range(1, 10):
        names = [name for name in "abcd" if name in job.state.candidates]
        job.send(*(RingCompleted("a", 1, before, "of a") for before in range(1, attempt)))
        job.offer(*names)
        (ring,) = job.of(BeginRing)
        order = [member.silo for member in ring.members]
        job.complete("a", digest="of a")
        if "a" not in names:
            break
        for position, name in enumerate(order):
            if name != "a":
                first = order[position - 1] == "a"
                job.send(RingBroken(name, 1, attempt, order[position - 1], 3 if first else 4))
        assert job.of(CommitAverage) == []
    assert job.state.excluded == {"a"}
    job.complete("b", "c", "d")
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("b", "c", "d"))]


@pytest.mark.parametrize("chunks", [(), ("1", "2", "3", "4"), ("1",) * 5])
def test_the_report_of_a_silo_that_must_lie_does_not_count(chunks: tuple[str, ...]) -> None:
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.send(*(RingCompleted(name, 1, 1, "mean", 0.0, ("1", "2", "3", "4")) for name in "abc"))
    job.send(RingCompleted("d", 1, 1, "another", 0.0, chunks))
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "b", "c"))]
    assert job.of(BeginRound) == [BeginRound(2, trains=True)]


def test_different_means_are_not_accepted() -> None:
    """A chunk was changed on its way from the silo that made it to the next one, and it is not known by which."""
    job = start_ring()
    job.offer("a", "b", "c", "d")
    first, *others = (member.silo for member in job.of(BeginRing)[0].members)
    job.send(RingCompleted(first, 1, 1, "mean", 0.0, ("1", "2", "3", "4")))
    job.send(*(RingCompleted(name, 1, 1, "another", 0.0, ("1", "x", "3", "4")) for name in others))
    assert job.of(CommitAverage) == []
    assert job.of(RequestKeys) == [RequestKeys(1, 2, ("a", "b", "c", "d"))]
    assert job.state.suspects == {tuple(sorted((first, others[0])))}
    assert job.send(RingCompleted(first, 1, 1, "mean")) == ()


def test_two_silos_repeat_a_ring_that_broke_between_them() -> None:
    job = Job(rules(goal=2, minimum=2, rounds=1, tolerance=1.0))
    job.announce("a", "b")
    job.receive(("a", "b"), ("b", "a"))
    job.offer("a", "b", mixed=1)
    job.send(RingBroken("a", 1, 1, "b", 0), RingBroken("b", 1, 1, "a", 0))
    assert job.of(RequestKeys) == [RequestKeys(1, 2, ("a", "b"))]
    job.offer("a", "b", mixed=1)
    job.complete("a", "b")
    assert job.of(EndJob) == [EndJob("COMPLETED", "mean")]


def test_a_ring_that_has_too_few_silos_left_fails() -> None:
    job = start_ring(minimum=4)
    job.send(SiloDeparted("b"))
    (end,) = job.of(EndJob)
    assert end.reason == "round 1: 3 silos left for a ring (b left); expected 4"


def test_silos_that_offer_no_key_are_left_out() -> None:
    job = start_ring()
    job.offer("a", "b", "c")
    job.expire()
    assert {member.silo for member in job.of(BeginRing)[0].members} == {"a", "b", "c"}


def test_a_silo_that_leaves_twice_costs_one_attempt() -> None:
    job = start_ring()
    job.send(SiloDeparted("b"))
    assert job.state.attempt == 2
    assert job.send(SiloDeparted("b")) == ()
    assert (job.state.attempt, job.state.failures) == (2, 1)


def test_a_ring_is_repeated_at_once_if_a_silo_has_lost_its_key() -> None:
    """Otherwise the silos after one that was restarted would wait for it until the deadline."""
    job = start_ring()
    for attempt in range(1, 4):
        job.offer("a", "b", "c", "d")
        job.send(RingBroken("b", 1, attempt, "b", 0))
        assert job.of(RequestKeys) == [RequestKeys(1, attempt + 1, ("a", "b", "c", "d"))]
    assert (job.state.failures, job.state.suspects) == (0, frozenset())
    job.offer("a", "b", "c", "d")
    assert job.send(RingBroken("b", 1, 4, "b", 0)) == ()  # a silo cannot repeat a ring again and again
    job.expire()
    assert (job.state.attempt, job.state.failures) == (5, 1)


@pytest.mark.parametrize("silo", ["b", "c"])
def test_a_mean_stands_though_a_silo_has_lost_its_key(silo: str) -> None:
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.complete("a", "c")
    job.send(RingBroken(silo, 1, 1, silo, 0))
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "c"))]


def test_a_ring_of_too_few_silos_with_examples_reveals_no_mean() -> None:
    job = Job(msgspec.structs.replace(rules(minimum=3, exchange="ring"), by_examples=True))
    for silo in "abcd":
        event = announced(silo, 1)
        model = msgspec.structs.replace(event.model, num_examples=2.0 if silo in "ab" else 0.0)
        job.send(msgspec.structs.replace(event, model=model))
    job.offer("a", "b", "c", "d")
    (end,) = job.of(EndJob)
    assert end.reason.startswith("2 of the 4 silos of a ring have examples")


def announce_examples(*numbers: float, minimum: int = 3) -> Job:
    """Silos announce these numbers of examples."""
    job = Job(msgspec.structs.replace(rules(goal=len(numbers), minimum=minimum, exchange="ring"), by_examples=True))
    for silo, number in zip("abcdefgh", numbers, strict=False):
        event = announced(silo, 1)
        job.send(msgspec.structs.replace(event, model=msgspec.structs.replace(event.model, num_examples=number)))
    return job


@pytest.mark.parametrize(
    ("claims", "weights"),
    [
        ((10, 20, 30, 40), (10, 20, 30, 40)),
        ((10, 10, 10, 1e15), (10, 10, 10, 30)),  # at most the others together
        ((10, 10, 10, 10, 10, 10, 10, 1e15), (10, 10, 10, 10, 10, 10, 10, 70)),
        ((10, 10, 1e15), (10, 10, 20)),
        ((1, 1e15, 1e15), (1, 3, 3)),  # three quarters of what is left without the other
        ((1e-6, 5, 5, 5), (1e-6, 5, 5, 5)),
    ],
)
def test_no_claim_decides_the_mean_of_a_ring(claims: tuple[float, ...], weights: tuple[float, ...]) -> None:
    job = announce_examples(*claims)
    job.offer(*"abcdefgh"[: len(claims)])
    (ring,) = job.of(BeginRing)
    found = {place.silo: place.share for place in ring.members}
    total = sum(weights)
    assert [found[silo] for silo in sorted(found)] == pytest.approx([weight / total for weight in weights])
    stated.check_shares(list(found.values()))


@given(st.lists(st.floats(1e-6, 1e15) | st.sampled_from([1.0, 1e15]), min_size=3, max_size=20))
def test_silos_accept_the_rings_of_an_honest_coordinator(claims: list[float]) -> None:
    weights = stated.limit_weights({str(silo): number for silo, number in enumerate(claims)})
    total = sum(weights.values())
    assert max(weights.values()) <= 10 * sorted(claims)[(len(claims) - 1) // 2]
    stated.check_shares([weight / total for weight in weights.values()])


def test_a_silo_whose_numbers_would_round_all_models_away_is_left_out() -> None:
    job = start_ring()
    job.offer("a", "b", "c")
    job.send(KeyOffered(silo="d", round=1, attempt=1, key=b"d" * 32, largest=3.4e38))
    (ring,) = job.of(BeginRing)
    assert sorted(place.silo for place in ring.members) == ["a", "b", "c"]
    assert ring.bound == 2.0
    assert list(job.state.left_out) == ["d"]
    assert "3.4e+38, more than 100 times the median of all silos, 2" in job.state.left_out["d"]
    job.complete("a", "b", "c")
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("a", "b", "c"))]


def test_a_ring_that_would_be_too_small_without_such_a_silo_fails_with_its_name() -> None:
    job = Job(rules(goal=3, minimum=3, exchange="ring"))
    job.announce("a", "b", "c")
    job.offer("a", "b")
    job.send(KeyOffered(silo="c", round=1, attempt=1, key=b"c" * 32, largest=3.4e38))
    (end,) = job.of(EndJob)
    assert "2 silos left for a ring (c: the largest number of its model is 3.4e+38" in end.reason


def test_no_silo_decides_alone_whether_all_agree() -> None:
    """A norm that is not true would make every distance look small, and a distance would make it look large."""
    for changes, away in (({"squared_norm": 1e90}, 4.0), ({}, 1e90)):
        job = Job(rules(goal=4, minimum=4, exchange="ring", rounds=1))
        for silo in "abcd":
            event = announced(silo, 1)
            model = msgspec.structs.replace(event.model, **(changes if silo == "a" else {}))
            job.send(msgspec.structs.replace(event, model=model))
        job.offer("a", "b", "c", "d")
        number, attempt = job.state.round, job.state.attempt
        job.send(*(RingCompleted(each, number, attempt, "mean", away if each == "a" else 4.0) for each in "abcd"))
        assert 0.02 < job.state.consensus.relative < 2.0
