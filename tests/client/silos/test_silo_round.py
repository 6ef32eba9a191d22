"""A silo's part in a round against a scripted server and neighbours that send what they want."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from fedplat.errors import GossipError
from fedplat.gossip import mixing
from fedplat.gossip.messages import CommitRow
from fedplat.gossip.steps import (
    AdoptMean,
    Announce,
    Contact,
    Exchanged,
    FetchModels,
    GossipSetup,
    Instruction,
    Leave,
    MixModels,
    Offered,
    Progress,
    Wait,
)
from fedplat.model import Parameters
from fedplat_client._protocols.gossip.calls import SiloCalls
from fedplat_client._protocols.gossip.model import SiloModel
from fedplat_client._protocols.gossip.network import PeerNetwork, RemoteFile
from fedplat_client._protocols.gossip.silo_round import RoundWork, SiloRound
from fedplat_client._state.released import ReleasedItem
from fedplat_client._state.silo_store import RelaySecret, SiloFolder
from fedplat_client._work.heartbeat import AssignmentFailedError, StepCalls
from fedplat_client.task import Control
from support import polling
from support.silo_networks import NetworkedSilo, Networks, impatient_networks_in, networks_in
from support.silo_scripts import Phase, Script, adopted, after, mixed

SIZE = 4_000
INITIAL = Parameters.from_arrays({"weight": np.ones(SIZE, np.float32), "steps": np.array([3], np.int64)})


@dataclasses.dataclass
class Place:
    """The silo of a test, with number 1, and its neighbours."""

    networks: Networks
    silo: NetworkedSilo
    neighbours: list[NetworkedSilo]
    exchange: str = "neighbours"
    codec: Any = None
    exported: list[bytes] = dataclasses.field(default_factory=list[bytes])
    recorded: list[ReleasedItem] = dataclasses.field(default_factory=list[ReleasedItem])

    def __post_init__(self) -> None:
        path = self.silo.folder / "job"
        path.mkdir(exist_ok=True)
        self.folder = SiloFolder(path)
        setup = GossipSetup(trains=True, exchange=cast(Any, self.exchange))
        self.model = SiloModel(self.folder, INITIAL, setup, self.codec)

    def play(self, *phases: Phase | Instruction) -> Script:
        script = Script(Phase(Wait()), *phases, phase_s=self.networks.patience_s)
        options, state = self.networks.options, lambda: self.model.state
        work = RoundWork(
            job_id="job",
            round=1,
            trains=False,
            train=lambda: None,
            prepare=lambda: self.model.prepare(1, RelaySecret(1, 1, bytes(32)), np.random.default_rng(0)),
            sign=self.silo.enrolled.sign,
            draw=os.urandom,
            export=self._export,
            record=self.recorded.append,
        )
        control = Control(training_timeout_s=60.0, options=options)
        calls = SiloCalls(
            StepCalls(cast(Any, script), "token", control),
            lambda: Progress(state().mixed_round, state().adopted_round),
        )
        models, means = self.silo.offers(options), self.silo.offers(options)
        try:
            SiloRound(work, self.model, self.silo.network, calls, models, means).run()
        finally:
            models.close()
            means.close()
        return script

    def _export(self, path: Path) -> Path:
        self.exported.append(path.read_bytes())
        return path

    def offer(self, neighbour: NetworkedSilo, content: bytes, digest: str = "") -> Offered:
        """Let the silo get a file of a neighbour until the end of the test."""
        path = neighbour.folder / "offered"
        path.write_bytes(content)
        digest = digest or hashlib.sha256(content).hexdigest()
        self.networks.stack.enter_context(self.networks.serve(neighbour, digest, path, self.silo))
        return Offered(neighbour.contact, digest, len(content))


def make_place(networks: Networks, has_port: bool, count: int = 2, **more: Any) -> Place:
    silo, *neighbours = networks.add_all([has_port] * (count + 1))
    return Place(networks, silo, neighbours, **more)


@pytest.fixture
def networks(tmp_path: Path) -> Generator[Networks]:
    with networks_in(tmp_path) as made:
        yield made


@pytest.fixture
def impatient(tmp_path: Path) -> Generator[Networks]:
    with impatient_networks_in(tmp_path) as made:
        yield made


def model_bytes(value: float) -> bytes:
    return mixing.make_model_file(np.full(SIZE, value, np.float32)).to_bytes()


def raw_bytes(**arrays: Any) -> bytes:
    return Parameters.from_arrays(arrays).to_bytes()


def row(*neighbours: tuple[NetworkedSilo, float]) -> CommitRow:
    own = 1.0 - sum(weight for _, weight in neighbours)
    return CommitRow(1, "", own, tuple((silo.name, weight) for silo, weight in neighbours))


def reports(script: Script) -> tuple[set[str], set[str]]:
    """The neighbours whose models the silo has received, and those whose models it has missed."""
    exchanged = [each for each in script.reports if isinstance(each, Exchanged)]
    received = {each.sender for message in exchanged for each in message.received}
    return received, {name for message in exchanged for name in message.missed}


# --- neighbours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_port", [True, False])
def test_a_silo_mixes_what_it_has_received(has_port: bool, networks: Networks) -> None:
    place = make_place(networks, has_port)
    first, second = place.neighbours
    offered = place.offer(first, model_bytes(2.0)), place.offer(second, model_bytes(4.0))
    script = place.play(
        Phase(FetchModels(offered), after(2)), Phase(MixModels.by(row((first, 0.25), (second, 0.5))), mixed(1)), Leave()
    )
    announced = script.reports[0]
    assert isinstance(announced, Announce)
    assert announced.model.squared_norm == SIZE
    assert announced.model.address == place.silo.contact.address
    assert announced.metrics == {"sent_bytes": 0.0, "received_bytes": 0.0}
    received = [each for message in script.reports[1:] for each in cast(Exchanged, message).received]
    assert {each.sender: each.squared_distance for each in received} == {first.name: SIZE, second.name: 9.0 * SIZE}
    assert place.model.read().tolist() == [0.25 * 1.0 + 0.25 * 2.0 + 0.5 * 4.0] * SIZE
    assert script.progress == (1, 0)


@pytest.mark.parametrize("has_port", [True, False])
def test_neighbours_with_equal_models_are_both_received(has_port: bool, networks: Networks) -> None:
    """Of such models the files have the same name."""
    place = make_place(networks, has_port, 3)
    offered = tuple(place.offer(neighbour, model_bytes(2.0)) for neighbour in place.neighbours)
    shares = row(*((neighbour, 0.25) for neighbour in place.neighbours))
    script = place.play(Phase(FetchModels(offered), after(3)), Phase(MixModels.by(shares), mixed(1)), Leave())
    assert reports(script) == ({each.name for each in place.neighbours}, set())
    assert place.model.read().tolist() == [1.75] * SIZE


@pytest.mark.parametrize("exchange", ["neighbours", "push-sum"])
@pytest.mark.parametrize("has_port", [True, False])
def test_a_hostile_neighbour_makes_only_its_own_edge_be_missed(
    has_port: bool, exchange: str, impatient: Networks
) -> None:
    place = make_place(impatient, has_port, 2, exchange=exchange)
    good, bad = place.neighbours
    ones, zero = np.ones(SIZE), np.zeros(1)
    if exchange == "push-sum":
        content = raw_bytes(sum=2 * ones, weight=np.ones(1))
        hostile = [
            raw_bytes(sum=1e300 * ones, weight=np.array([1e-300])),
            raw_bytes(sum=np.full(SIZE, np.nan), weight=np.ones(1)),
            raw_bytes(sum=ones, weight=zero),
            raw_bytes(sum=ones, weight=-np.ones(1)),
            raw_bytes(sum=ones, weight=np.array([np.inf])),
            raw_bytes(sum=1e308 * ones, weight=np.ones(1)),
        ]
    else:
        content = model_bytes(2.0)
        hostile = [
            raw_bytes(model=np.full(SIZE, np.nan, np.float32)),
            raw_bytes(model=np.full(SIZE, np.inf, np.float32)),
            raw_bytes(model=np.zeros((2, SIZE // 2), np.float32)),
            bytes(len(content)),
        ]
    offered = [place.offer(good, content)]
    # Each comes as from a neighbour of its own.
    number = 10
    for each in hostile:
        number += 1
        offered.append(place.offer(impatient.add(number, has_port=has_port), each))
    offered.append(place.offer(bad, content[:-1] + b"!", digest=hashlib.sha256(content).hexdigest()[::-1]))
    script = place.play(Phase(FetchModels(tuple(offered)), after(len(offered))), Leave())
    received, missed = reports(script)
    assert received == {good.name}
    assert missed == {each.contact.silo for each in offered} - {good.name}


def as_itself(place: Place, offered: Offered) -> Offered:
    return msgspec.structs.replace(offered, contact=place.silo.contact)


def with_name(name: str) -> Callable[[Place, Offered], Offered]:
    return lambda place, offered: msgspec.structs.replace(offered, digest=name)


def with_size(size_bytes: int) -> Callable[[Place, Offered], Offered]:
    return lambda place, offered: msgspec.structs.replace(offered, size_bytes=size_bytes)


def with_contact(**changes: Any) -> Callable[[Place, Offered], Offered]:
    return lambda place, offered: msgspec.structs.replace(
        offered, contact=msgspec.structs.replace(offered.contact, **changes)
    )


@pytest.mark.parametrize("has_port", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        as_itself,
        with_name("../../outside"),
        with_name("state.json"),
        with_name("fetched"),
        with_name("A" * 64),
        with_size(2**50),
        with_size(0),
        with_contact(silo="c-ffffffffffffffff"),
        with_contact(address="no address"),
    ],
)
def test_a_model_that_the_server_describes_falsely_is_missed(
    change: Callable[[Place, Offered], Offered],
    has_port: bool,
    impatient: Networks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = make_place(impatient, has_port)
    good, described = place.neighbours
    outside = place.silo.folder.parent / "outside"
    outside.write_bytes(model_bytes(3.0))
    offered = place.offer(good, model_bytes(2.0)), change(place, place.offer(described, model_bytes(4.0)))
    if has_port:  # then both are fetched at once: the waits for the false one must not use up the time of the good one
        fetch, is_there = PeerNetwork.fetch, threading.Event()

        def fetch_and_tell(network: PeerNetwork, contact: Contact, remote: RemoteFile, control: Control) -> Path:
            path = fetch(network, contact, remote, control)
            is_there.set()
            return path

        monkeypatch.setattr(PeerNetwork, "fetch", fetch_and_tell)
        assert impatient.time is not None
        impatient.time.waited = lambda: is_there.wait(polling.PATIENCE_S)
    script = place.play(Phase(FetchModels(offered), after(2)), Leave())
    assert reports(script) == ({good.name}, {offered[1].contact.silo})
    assert outside.read_bytes() == model_bytes(3.0)


@pytest.mark.parametrize("weights", [(1e308, 1e308), (-1e308, 1e308)])
@pytest.mark.parametrize("exchange", ["neighbours", "push-sum"])
def test_a_row_that_is_no_average_ends_the_assignment(
    exchange: str, weights: tuple[float, float], networks: Networks
) -> None:
    """The server's mistake must neither end the client, nor leave it a model with which it cannot begin again."""
    place = make_place(networks, True, exchange=exchange)
    first, second = place.neighbours
    content = raw_bytes(sum=2 * np.ones(SIZE), weight=np.ones(1)) if exchange == "push-sum" else model_bytes(2.0)
    other = raw_bytes(sum=3 * np.ones(SIZE), weight=np.ones(1)) if exchange == "push-sum" else model_bytes(3.0)
    offered = place.offer(first, content), place.offer(second, other)
    wrong = CommitRow(1, "", 0.5, ((first.name, weights[0]), (second.name, weights[1])))
    with pytest.raises(GossipError):
        place.play(Phase(FetchModels(offered), after(2)), Phase(MixModels.by(wrong), mixed(1)), Leave())
    assert place.model.read().tolist() == [1.0] * SIZE
    assert SiloFolder(place.folder.path).state.mixed_round == 0


def test_a_row_with_lost_models_is_passed_over(networks: Networks, caplog: pytest.LogCaptureFixture) -> None:
    place = make_place(networks, True)
    script = place.play(Phase(MixModels.by(row((place.neighbours[0], 0.5))), mixed(1)), Leave())
    assert place.model.read().tolist() == [1.0] * SIZE
    assert script.progress == (1, 0)
    assert "The models of neighbours are lost" in caplog.text


def test_a_phase_that_is_over_ends_the_fetches(networks: Networks) -> None:
    """The server has given up a neighbour that offers nothing."""
    place = make_place(networks, True)
    silent = Offered(place.neighbours[0].contact, "a" * 64, len(model_bytes(1.0)))
    offered = place.offer(place.neighbours[1], model_bytes(2.0))
    script = place.play(Phase(FetchModels((silent, offered)), after(1)), Leave())
    assert reports(script) == ({place.neighbours[1].name}, set())


# --- means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_port", [True, False])
def test_a_mean_is_fetched_from_a_silo_that_has_it(has_port: bool, impatient: Networks) -> None:
    """Of the holders one is silent, and one sends other bytes."""
    place = make_place(impatient, has_port, 3, exchange="ring")
    silent, wrong, holder = place.neighbours
    mean = mixing.make_mean_file(INITIAL, np.full(SIZE, 2.0, np.float32)).to_bytes()
    digest = place.offer(holder, mean).digest
    place.offer(wrong, mean[:-1] + b"!", digest)
    holders = tuple(each.contact for each in (silent, wrong, holder))
    script = place.play(Phase(AdoptMean(1, digest, holders, is_last=True), adopted(1)), Leave())
    assert script.progress == (1, 1)
    assert place.exported == [mean]
    assert place.model.read().tolist() == [2.0] * SIZE
    assert place.model.state.mean is not None
    assert place.model.state.mean.digest == digest


@pytest.mark.parametrize("name", ["../../outside", "state.json", "a" * 63, "A" * 64])
@pytest.mark.parametrize("has_port", [True, False])
def test_a_mean_with_a_name_that_is_no_digest_is_not_adopted(has_port: bool, name: str, impatient: Networks) -> None:
    """A hostile server must get no other file of the owner read, moved or deleted."""
    place = make_place(impatient, has_port, exchange="ring")
    outside = place.silo.folder.parent / "outside"
    for content in (INITIAL.to_bytes(), b"a file of the owner"):
        outside.write_bytes(content)
        holders = tuple(each.contact for each in place.neighbours)
        with pytest.raises(AssignmentFailedError, match="no silo sends the mean"):
            place.play(Phase(AdoptMean(1, name, holders, is_last=True), adopted(1)), Leave())
        assert outside.read_bytes() == content
        assert (place.model.state.adopted_round, place.exported) == (0, [])
    assert (place.folder.path / "state.json").exists()
    with pytest.raises(AssignmentFailedError, match="no silo sends the mean"):
        place.play(Phase(AdoptMean(1, str(outside), holders, is_last=True), adopted(1)), Leave())
    assert outside.exists()
