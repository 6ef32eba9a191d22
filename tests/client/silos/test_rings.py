"""Rings of real silos: the mean, the bytes, and what breaks one; chunks at ports, through the relay, and both."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat.gossip.messages import BeginRing, RingPlace
from fedplat.gossip.mixing import add_parts, quantize_share, read_integer_mean
from fedplat.gossip.ring import Ring, RingMember, key_payload
from fedplat.gossip.steps import Contact
from fedplat.model import Vector
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.wire.v1 import model_pb2
from fedplat_client._protocols.gossip.fetching import BrokenRingError, RingRun
from fedplat_client.cancellation import Stop
from fedplat_client.errors import Cancelled
from fedplat_client.task import Control
from support.polling import until
from support.secure_group import random_of
from support.silo_networks import NetworkedSilo, Networks, impatient_networks_in, networks_in

SIZE = 1_003
BOUND = 8.0
STOP = Stop(model_pb2.REASON_CLIENT_STOPPED, "the ring is repeated")
PORTS = {"ports": [True] * 4, "relay": [False] * 4, "both": [True, False, True, True, False]}


@pytest.fixture
def networks(tmp_path: Path) -> Generator[Networks]:
    with networks_in(tmp_path) as made:
        yield made


def models_of(count: int, size: int = SIZE) -> list[Vector]:
    rng = np.random.default_rng(count)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


def shares_of(count: int) -> list[float]:
    return [2 * number / (count * (count + 1)) for number in range(1, count + 1)]


def key_of(silo: NetworkedSilo) -> KeyPair:
    return KeyPair.draw(random_of(f"ring {silo.name}"))


def ring_of(silos: Sequence[NetworkedSilo], size: int = SIZE, attempt: int = 1) -> Ring:
    places: list[RingPlace] = []
    for silo, share in zip(silos, shares_of(len(silos)), strict=True):
        key = key_of(silo).public
        signature = silo.enrolled.sign(key_payload("job", 1, attempt, silo.name, key))
        places.append(RingPlace(silo.name, silo.contact.address, key, share, signature))
    return Ring(job_id="job", round=1, attempt=attempt, members=tuple(places), bound=BOUND, size=size)


def contacts_of(silos: Sequence[NetworkedSilo]) -> list[Contact]:
    return [silo.contact for silo in silos]


def join(silo: NetworkedSilo, silos: Sequence[NetworkedSilo], model: Vector) -> RingRun:
    return begin(ring_of(silos, model.size), contacts_of(silos), silo, model)


def begin(ring: Ring, contacts: Sequence[Contact], silo: NetworkedSilo, model: Vector) -> RingRun:
    begun = BeginRing(ring.round, ring.attempt, ring.members, ring.bound)
    return RingRun(ring.job_id, begun, contacts, key_of(silo), model, silo.network, is_secret=True)


class Rings:
    """The runs of all silos in threads; each keeps its last chunks until all have ended."""

    def __init__(self, runs: Sequence[RingRun], controls: Sequence[Control]) -> None:
        self.errors: dict[int, Exception] = {}
        self._all_ended = threading.Barrier(len(runs))
        self._threads = [
            threading.Thread(target=self._run, args=(number, run, control))
            for number, (run, control) in enumerate(zip(runs, controls, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, run: RingRun, control: Control) -> None:
        try:
            with run.run(control):
                self._all_ended.wait(60.0)
        except (BrokenRingError, Cancelled) as exc:
            self.errors[number] = exc
            self._all_ended.abort()
        except threading.BrokenBarrierError:
            pass

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def reduce_in(networks: Networks, silos: Sequence[NetworkedSilo], models: Sequence[Vector]) -> list[RingMember]:
    runs = [join(silo, silos, model) for silo, model in zip(silos, models, strict=True)]
    rings = Rings(runs, [networks.control() for _ in runs])
    rings.join()
    assert not rings.errors
    return [run.member for run in runs]


@pytest.mark.parametrize("has_ports", PORTS.values(), ids=PORTS.keys())
def test_all_silos_get_the_same_weighted_mean(has_ports: list[bool], networks: Networks) -> None:
    silos, count = networks.add_all(has_ports), len(has_ports)
    models = models_of(count)
    members = reduce_in(networks, silos, models)
    expected = np.average(models, axis=0, weights=shares_of(count))
    parts = [quantize_share(model, share, BOUND, count) for model, share in zip(models, shares_of(count), strict=True)]
    for member in members:
        assert np.array_equal(member.mean(), read_integer_mean(add_parts(parts), BOUND, count))
        assert np.allclose(member.mean(), expected, atol=1e-6)
    assert len({(member.digest(), member.chunk_digests()) for member in members}) == 1


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("has_port", [True, False])
def test_each_silo_sends_what_an_optimal_ring_sends(has_port: bool, count: int, networks: Networks) -> None:
    """2 (n - 1) / n of the bytes of the model, within 1 %: neither more for a larger ring nor through one silo."""
    size = 20_000
    silos = networks.add_all([has_port] * count)
    reduce_in(networks, silos, models_of(count, size))
    for silo in silos:
        sent, received = silo.network.counter.take()
        assert sent == pytest.approx(2 * (count - 1) / count * 4 * size, rel=0.01)
        assert received == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("has_port", [True, False])
def test_neither_the_server_nor_a_neighbour_sees_a_model(has_port: bool, networks: Networks) -> None:
    """The next silo gets masked numbers, which with a model of zeros would be zeros."""
    silos = networks.add_all([has_port] * 3)
    zeros = [np.zeros(SIZE, np.float32)] * 3
    first = join(silos[0], silos, zeros[0]).member.outgoing(0)
    assert len(set(first)) > 200
    for member in reduce_in(networks, silos, zeros):
        assert not member.mean().any()
    if not has_port:
        seen = networks.relay.relayed_bytes
        assert len(seen) > 4 * SIZE
        assert first not in seen
        assert seen.count(0) < len(seen) / 50  # not even the complete chunks, which are zeros


def test_more_rings_of_the_same_silos_follow(networks: Networks) -> None:
    silos = networks.add_all([True, True, False])
    models = models_of(3)
    first = reduce_in(networks, silos, models)
    later = Rings(
        [
            begin(ring_of(silos, attempt=2), contacts_of(silos), silo, model)
            for silo, model in zip(silos, models, strict=True)
        ],
        [networks.control() for _ in silos],
    )
    later.join()
    assert not later.errors
    assert len({member.digest() for member in first}) == 1


# --- what breaks a ring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_port", [True, False])
def test_the_silo_after_a_dead_one_reports_it(has_port: bool, tmp_path: Path) -> None:
    with impatient_networks_in(tmp_path) as networks:
        silos = networks.add_all([has_port] * 3)
        if silos[0].network.port.listener is not None:
            silos[0].network.port.listener.__exit__()
        runs = [join(silo, silos, model) for silo, model in zip(silos, models_of(3), strict=True)]
        rings = Rings(runs[1:2], [networks.control()])
        rings.join()
    error = rings.errors[0]
    assert isinstance(error, BrokenRingError)
    assert (error.sender, error.step) == (silos[0].name, 0)


def test_a_silo_that_cannot_send_reports_itself(networks: Networks) -> None:
    silos = networks.add_all([False, False, False])
    unreachable = contacts_of(silos)
    unreachable[1] = msgspec.structs.replace(silos[1].contact, relay_key=b"")
    run = begin(ring_of(silos), unreachable, silos[0], models_of(3)[0])
    rings = Rings([run], [networks.control()])
    rings.join()
    error = rings.errors[0]
    assert isinstance(error, BrokenRingError)
    assert (error.sender, error.step) == (silos[0].name, 0)


@pytest.mark.parametrize("has_port", [True, False])
def test_the_end_of_the_phase_ends_a_ring(has_port: bool, networks: Networks) -> None:
    """Another silo has left, so the server repeats the ring without it."""
    silos = networks.add_all([has_port] * 3)
    runs = [join(silo, silos, model) for silo, model in zip(silos, models_of(3), strict=True)]
    controls = [networks.control() for _ in runs[:2]]
    rings = Rings(runs[:2], controls)
    if not has_port:
        until(lambda: networks.relay.calls["Upload"] >= 2, "the first chunks are sent")
    for control in controls:
        control.signal.set(STOP)
    rings.join()
    assert {type(error) for error in rings.errors.values()} == {Cancelled}
