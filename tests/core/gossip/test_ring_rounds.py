"""The coordinator of silos in a ring: attempts that are repeated, and means that stand."""

from __future__ import annotations

import msgspec
import pytest

from fedplat.gossip.messages import (
    BeginRing,
    BeginRound,
    CommitAverage,
    EndJob,
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


@pytest.mark.parametrize("cause", ["a silo left", "the time is over"])
def test_a_mean_that_is_reported_late_stands(cause: str) -> None:
    """Else this silo, and all whose reports are on their way, would have two means, without and with another silo."""
    job = start_ring()
    job.offer("a", "b", "c", "d")
    if cause == "a silo left":
        job.send(SiloDeparted("b"))
    else:
        job.expire()
    assert job.of(RequestKeys)
    job.offer("a")
    assert job.send(RingCompleted("x", 1, 1, "mean"), RingCompleted("c", 1, 2, "mean")) == ()
    job.send(RingCompleted("c", 1, 1, "mean"))
    assert job.of(CommitAverage) == [CommitAverage(1, "mean", ("c",))]
    assert job.of(BeginRound) == [BeginRound(2, trains=True)]
    assert job.announce("a", "b", "c", "d", mixed=1)
    assert job.send(RingCompleted("d", 1, 1, "mean")) == ()


def test_different_means_are_not_accepted() -> None:
    job = start_ring()
    job.offer("a", "b", "c", "d")
    job.complete("a", "b", "c")
    job.complete("d", digest="another")
    assert job.of(CommitAverage) == []
    assert job.of(RequestKeys) == [RequestKeys(1, 2, ("a", "b", "c", "d"))]
    assert job.send(RingCompleted("d", 1, 1, "another")) == ()


def test_a_ring_that_has_too_few_silos_left_fails() -> None:
    job = start_ring(minimum=4)
    job.send(SiloDeparted("b"))
    (end,) = job.of(EndJob)
    assert end.reason == "round 1: 3 silos are left for a ring (b left); expected 4"


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
