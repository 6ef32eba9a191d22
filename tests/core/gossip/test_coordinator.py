"""The coordinator of a decentralised job, with silos that are lost, late, restarted or lying."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.gossip.messages import (
    Announcement,
    AssignNeighbours,
    BeginRing,
    BeginRound,
    CommitAverage,
    CommitRow,
    EndJob,
    KeyOffered,
    ModelMissed,
    ModelReceived,
    RequestKeys,
    RingCompleted,
    SetTimer,
    SiloDeparted,
    TimerPassed,
)
from fedplat.gossip.state import GossipPhase, GossipState
from fedplat.gossip.topology import Exchange, Topology
from support.gossip import Job, announced, both, rules


def test_a_round_from_models_to_rows() -> None:
    job = Job(rules())
    assert job.commands == (BeginRound(1, trains=True), SetTimer(1, 60.0))
    assert job.announce("a", "b", "c") == ()
    job.announce("d")
    assert {each.silo: [n.silo for n in each.neighbours] for each in job.of(AssignNeighbours)} == {
        "a": ["b", "d"],
        "b": ["a", "c"],
        "c": ["b", "d"],
        "d": ["a", "c"],
    }
    assert job.of(AssignNeighbours)[0].neighbours[0].model.address == "b:1"
    assert job.receive(*both(("a", "b"), ("b", "c"), ("c", "d")), ("a", "d")) == ()
    job.receive(("d", "a"))
    (first, *_) = job.of(CommitRow)
    assert (first.round, first.silo, [name for name, _ in first.neighbours]) == (1, "a", ["b", "d"])
    assert [first.own, *(weight for _, weight in first.neighbours)] == pytest.approx([1 / 3] * 3)
    assert job.of(BeginRound) == [BeginRound(2, trains=True)]
    assert (job.state.confirmed, job.state.consensus.norm) == (4, 10.0)
    # Σ d² = 16 over the edges, λ₂ of a ring of four is 2, four silos.
    assert job.state.consensus.bound == pytest.approx(np.sqrt(16 / 2 / 4))


def test_only_edges_that_both_ends_confirm_count() -> None:
    job = Job(rules())
    job.announce("a", "b", "c", "d")
    job.receive(*both(("a", "b")), ("c", "b"), ("d", "c"))
    job.expire()
    assert job.of(CommitRow) == [
        CommitRow(1, "a", 0.5, (("b", 0.5),)),
        CommitRow(1, "b", 0.5, (("a", 0.5),)),
        CommitRow(1, "c", 1.0),
        CommitRow(1, "d", 1.0),
    ]


def test_what_is_missed_is_not_waited_for() -> None:
    job = Job(rules())
    job.announce("a", "b", "c", "d")
    job.receive(*both(("a", "b"), ("b", "c"), ("c", "d")), ("a", "d"))
    job.send(ModelMissed("d", "a", 1))
    assert job.state.confirmed == 3


def test_receipts_of_others_count_for_nothing() -> None:
    job = Job(rules())
    job.announce("a", "b", "c", "d")
    before = job.state
    job.send(
        ModelReceived("a", "b", 2, "b-1"),
        ModelReceived("a", "b", 1, "another"),
        ModelReceived("a", "c", 1, "c-1"),
        ModelReceived("x", "a", 1, "a-1"),
        ModelMissed("a", "c", 1),
        RingCompleted("a", 1, 0, "mean"),
        TimerPassed(before.timer - 1),
        announced("a", 1),
    )
    assert job.state.received == {}
    assert job.state.phase is GossipPhase.EXCHANGING
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="expected a number from 0 to 1e"):
            ModelReceived("a", "b", 1, "b-1", wrong)


def test_a_silo_that_missed_its_row_gets_it_again() -> None:
    job = Job(rules(goal=2, topology="complete", rounds=3))
    job.announce("a", "b")
    job.receive(*both(("a", "b")))
    row = CommitRow(1, "a", 0.5, (("b", 0.5),))
    assert job.of(CommitRow)[0] == row
    assert job.announce("a", mixed=0) == (row,)
    assert "a" not in job.state.announced
    job.announce("a", "b", mixed=1)
    assert job.of(AssignNeighbours)


def test_a_silo_that_left_is_not_waited_for() -> None:
    job = Job(rules())
    job.announce("a", "b", "c")
    job.send(SiloDeparted("d"))
    assert len(job.of(AssignNeighbours)) == 3
    job.receive(*both(("a", "b"), ("a", "c"), ("b", "c")))
    assert job.state.round == 2
    job.announce("a", "b", "c", mixed=1)
    assert job.of(AssignNeighbours)
    job.expire()
    assert job.state.away == {"d"}


def test_too_few_silos() -> None:
    job = Job(rules(minimum=3))
    job.announce("a", "b")
    assert job.expire() == (SetTimer(2, 60.0),)
    limited = Job(msgspec.structs.replace(rules(minimum=3), max_attempts=2))
    limited.expire()
    (end,) = limited.expire()
    assert end == EndJob(
        "FAILED",
        reason="0 silos announced a model for round 1; expected 3; 2 attempts failed (retry.max_attempts)",
    )
    assert limited.expire() == ()


def test_the_mean_of_silos_that_agree_is_exported() -> None:
    job = Job(rules(goal=3, topology="complete", rounds=1, tolerance=0.5))
    job.announce("a", "b", "c")
    job.receive(*both(("a", "b"), ("a", "c"), ("b", "c")))
    assert job.of(RequestKeys) == [RequestKeys(1, 1, ("a", "b", "c"))]
    job.offer("a")
    assert [(row.round, row.silo) for row in job.of(CommitRow)] == [(1, "a")]
    assert job.state.offers == {}
    job.offer("a", "b", "c", mixed=1)
    (ring,) = job.of(BeginRing)
    assert sorted(member.silo for member in ring.members) == ["a", "b", "c"]
    assert [member.share for member in ring.members] == [1 / 3] * 3
    assert ring.bound == 2.0
    job.complete("a", "b", "c", away=1.0)
    assert job.commands == (CommitAverage(1, "mean", ("a", "b", "c")), EndJob("COMPLETED", "mean"))
    assert job.state.consensus.relative == pytest.approx(0.1)


def test_silos_that_do_not_agree_export_nothing() -> None:
    job = Job(rules(goal=2, topology="complete", rounds=1, tolerance=0.01, settle_rounds=1))
    job.announce("a", "b")
    job.receive(*both(("a", "b")))
    assert job.of(BeginRound) == [BeginRound(2, trains=False)]
    job.announce("a", "b", mixed=1)
    job.receive(*both(("a", "b")))
    (end,) = job.of(EndJob)
    assert end.status == "FAILED"
    assert "do not agree after 1 round without training: their models are 0.1 of their norm apart" in end.reason


def test_the_distance_from_the_mean_decides() -> None:
    """The estimate of one confirmed edge was too low: the silos that nothing was heard of are far away."""
    job = Job(rules(goal=4, topology="pairs", rounds=1, tolerance=0.5))
    job.announce("a", "b", "c", "d")
    (pair, *_) = sorted(job.state.edges)
    job.receive(*both(pair))
    job.expire()
    assert job.state.phase is GossipPhase.OFFERING_KEYS
    job.offer("a", "b", "c", "d", mixed=1)
    job.complete("a", "b", "c", "d", away=100.0)
    assert job.of(BeginRound) == [BeginRound(2, trains=False)]
    assert job.state.average is None


def test_a_silo_in_the_place_of_one_that_left_is_waited_for() -> None:
    """Else the exchange would begin without the slowest silo in each round, as one has gone."""
    job = Job(rules(rounds=3))
    job.announce("a", "b", "c", "d")
    job.expire()
    job.send(SiloDeparted("d"))
    assert job.announce("e", "a", "b", mixed=1) == ()
    job.announce("c", mixed=1)
    assert (job.state.phase, job.state.present) == (GossipPhase.EXCHANGING, ["a", "b", "c", "e"])


def test_numbers_whose_sums_overflow_are_refused() -> None:
    """They would end the coordinator: `math.fsum` raises `OverflowError`."""
    for make in (
        lambda: Announcement(digest="a", size_bytes=1, squared_norm=1e308),
        lambda: Announcement(digest="a", size_bytes=1, num_examples=1e308),
        lambda: ModelReceived("a", "b", 1, "b", 1e308),
        lambda: RingCompleted("a", 1, 1, "mean", 1e308),
        lambda: KeyOffered(silo="a", round=1, attempt=1, key=bytes(32), largest=1e39),
    ):
        with pytest.raises(ValueError, match="expected a number from 0 to"):
            make()


class Silos:
    """Silos with numbers for models, whose messages are lost and which restart: a reference for the rows."""

    def __init__(self, names: list[str], directed: bool, rng: np.random.Generator) -> None:
        self.values = {name: float(rng.standard_normal()) for name in names}
        self.weights = dict.fromkeys(names, 1.0)
        self.mixed = dict.fromkeys(names, 0)
        self.stored: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in names}
        self.directed = directed

    def mix(self, row: CommitRow) -> None:
        if self.mixed[row.silo] >= row.round:
            return
        value, weight = row.own * self.values[row.silo], row.own * self.weights[row.silo]
        for sender, share in row.neighbours:
            value += share * self.stored[row.silo][sender][0]
            weight += share * self.stored[row.silo][sender][1]
        self.values[row.silo], self.mixed[row.silo] = value, row.round
        self.weights[row.silo] = weight if self.directed else 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3, 7),
    st.sampled_from(["ring", "pairs", "exponential", "grid"]),
    st.sampled_from(["neighbours", "push-sum"]),
    st.integers(0, 2**32),
    st.floats(0, 0.6),
)
def test_the_total_is_conserved_whatever_is_lost(
    count: int, topology: Topology, exchange: Exchange, seed: int, loss: float
) -> None:
    """Receipts, rows and whole silos are lost at random; a silo that returns mixes the row that it missed."""
    rng = np.random.default_rng(seed)
    names = [f"silo-{number}" for number in range(count)]
    silos = Silos(names, exchange == "push-sum", rng)
    total = sum(silos.values.values())
    job = Job(rules(goal=count, minimum=1, rounds=12, topology=topology, exchange=exchange, settle_rounds=0))
    while job.state.phase is not GossipPhase.ENDED and job.state.round < 12:
        announce_some(job, silos, rng, loss)
        exchange_some(job, silos, rng, loss)
    for row in job.state.rows.values():
        silos.mix(row)
    assert sum(silos.values.values()) == pytest.approx(total, abs=1e-12)
    assert sum(silos.weights.values()) == pytest.approx(count, abs=1e-12)


def announce_some(job: Job, silos: Silos, rng: np.random.Generator, loss: float) -> None:
    for name in silos.values:
        if rng.random() < loss / 2:
            job.send(SiloDeparted(name))
            continue
        for command in job.announce(name, mixed=silos.mixed[name]):
            if isinstance(command, CommitRow) and command.round < job.state.round:
                silos.mix(command)
    if job.state.phase is GossipPhase.ANNOUNCING:
        job.expire()


def exchange_some(job: Job, silos: Silos, rng: np.random.Generator, loss: float) -> None:
    names = list(job.state.announced)
    for receiver, sender in itertools.product(names, names):
        is_sent = job.state.phase is GossipPhase.EXCHANGING and rng.random() >= loss
        if is_sent and _is_link(job.state, receiver, sender):
            silos.stored[receiver][sender] = silos.values[sender], silos.weights[sender]
            job.receive((receiver, sender))
            deliver(job, silos, rng, loss)
    if job.state.phase is GossipPhase.EXCHANGING:
        job.expire()
        deliver(job, silos, rng, loss)


def _is_link(state: GossipState, receiver: str, sender: str) -> bool:
    edges = {(second, first) for first, second in state.edges}
    return (receiver, sender) in (edges if state.rules.options.is_directed else edges | state.edges)


def deliver(job: Job, silos: Silos, rng: np.random.Generator, loss: float) -> None:
    for row in job.of(CommitRow):
        if rng.random() >= loss:
            silos.mix(row)
