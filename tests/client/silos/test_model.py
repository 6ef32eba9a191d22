"""The model of a silo: killed at any write it continues with the same bits, and bad files of others change nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from fedplat import durable
from fedplat.codecs import TopK
from fedplat.errors import GossipError
from fedplat.gossip import mixing
from fedplat.gossip.messages import CommitRow, Delta
from fedplat.gossip.steps import Contact, GossipSetup, Offered
from fedplat.model import Parameters
from fedplat_client._protocols.gossip.model import SiloModel
from fedplat_client._state.silo_store import KEEP_S, RelaySecret, SiloFolder, SiloStore
from support.silo_fleet import initial_model, move

SIZE = 40
RELAY = RelaySecret(1, 1, bytes(32))


class Killed(BaseException):
    """The process ends here."""


@dataclasses.dataclass
class Writes:
    """Counts durable writes, and kills at one: before anything is there, or after."""

    kill_at: int = -1
    after: bool = False
    count: int = 0

    @contextlib.contextmanager
    def atomic_write(self, path: Path, mode: int = 0o600, *, overwrite: bool = True) -> Generator[BinaryIO]:
        self.count += 1
        is_last = self.count == self.kill_at
        if is_last and not self.after:
            raise Killed
        with _atomic_write(path, mode, overwrite=overwrite) as file:
            yield file
        if is_last:
            raise Killed


_atomic_write = durable.atomic_write


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    def nothing(_: int) -> None:
        pass

    made = Writes()
    monkeypatch.setattr(os, "fsync", nothing)
    monkeypatch.setattr(durable, "atomic_write", made.atomic_write)
    return made


def open_model(folder: Path, exchange: str = "neighbours", *, codec: bool = False, gamma: float = 0.5) -> SiloModel:
    folder.mkdir(exist_ok=True)
    setup = GossipSetup(trains=True, exchange=exchange, gamma=gamma if codec else None)  # type: ignore[arg-type]
    return SiloModel(SiloFolder(folder), initial_model(SIZE), setup, TopK(fraction=0.2).build() if codec else None)


def train(model: SiloModel, number: int) -> None:
    base = model.to_parameters()
    trained = base.copy()
    move(number, trained)
    update = trained.minus(base)
    model.finish_training(f"training {number}", model.add_update(update), update, 10.0, {"loss": 0.5})


def files_of_neighbours(exchange: str, *, codec: bool) -> dict[str, Parameters]:
    rng = np.random.default_rng(5)
    vectors = [rng.standard_normal(SIZE).astype(np.float32) for _ in range(2)]
    if exchange == "push-sum":
        return {f"c-{n}": mixing.make_sum_file(each.astype(np.float64), 0.5) for n, each in enumerate(vectors)}
    return {f"c-{n}": mixing.make_model_file(each) for n, each in enumerate(vectors)}


def play(folder: Path, exchange: str, *, codec: bool) -> SiloModel:
    """What a silo does in a round and with a mean, from where its state is: as after each start of its process."""
    model = open_model(folder, exchange, codec=codec)
    if not model.state.mixed_round:
        if not model.state.is_trained and not model.state.prepared:
            train(model, 3)
        model.prepare(1, RELAY, np.random.default_rng(1))
        for name, file in files_of_neighbours(exchange, codec=codec).items():
            content = file.to_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if (path := model.find(digest)) is None:
                path = folder / "received" / digest
                path.write_bytes(content)
            assert model.store(name, digest, path) > 0.0
        weights = (("c-0", 0.25), ("c-1", 0.3))
        assert model.mix(CommitRow(1, "c-9", 0.45, weights))
    if model.state.mean is None:
        model.keep_mean(model.read() + np.float32(1), 1, 1, ("a", "b"))
    if not model.state.adopted_round:
        mean = model.state.mean
        assert mean is not None
        path = model.find(mean.digest)
        assert path is not None
        model.adopt(path, mean.digest, 1)
    return model


KINDS = {"neighbours": ("neighbours", False), "push-sum": ("push-sum", False), "choco": ("neighbours", True)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_silo_that_is_killed_at_any_write_continues_with_the_same_bits(
    tmp_path: Path, writes: Writes, kind: str
) -> None:
    exchange, codec = KINDS[kind]
    whole = play(tmp_path / "whole", exchange, codec=codec)
    expected, num_writes = (whole.state, whole.read().tobytes()), writes.count
    assert num_writes >= 12
    for kill_at in range(1, num_writes + 1):
        for after in (False, True):
            folder = tmp_path / f"{kill_at} {after}"
            writes.kill_at, writes.after, writes.count = kill_at, after, 0
            with pytest.raises(Killed):
                play(folder, exchange, codec=codec)
            writes.kill_at = -1
            model = play(folder, exchange, codec=codec)
            assert (model.state, model.read().tobytes()) == expected
            assert {path.name for path in folder.iterdir() if path.is_file()} - {"state.json"} >= model.state.files


def test_mixing_conserves_the_mean_although_one_of_two_silos_is_killed(tmp_path: Path, writes: Writes) -> None:
    def begin(name: str, number: int) -> SiloModel:
        model = open_model(tmp_path / name)
        train(model, number)
        model.prepare(1, RELAY, np.random.default_rng(1))
        return model

    models = {"a": begin("a", 1), "b": begin("b", 2)}
    before = models["a"].read().astype(np.float64) + models["b"].read()
    for name, other in (("a", "b"), ("b", "a")):
        path = models[other].find(models[other].announced)
        assert path is not None
        received = tmp_path / name / "received" / "model"
        received.write_bytes(path.read_bytes())
        models[name].store(other, models[other].announced, received)
    models["a"].mix(CommitRow(1, "a", 0.5, (("b", 0.5),)))
    writes.kill_at, writes.count = 2, 0  # the mixed file is there, and no state names it
    with pytest.raises(Killed):
        models["b"].mix(CommitRow(1, "b", 0.5, (("a", 0.5),)))
    writes.kill_at = -1
    models["b"] = open_model(tmp_path / "b")
    for _ in range(2):  # the server may send the row again
        assert models["b"].mix(CommitRow(1, "b", 0.5, (("a", 0.5),)))
    np.testing.assert_allclose(models["a"].read().astype(np.float64) + models["b"].read(), before, atol=1e-6)


def test_a_silo_that_has_lost_its_disk_continues_with_its_model(tmp_path: Path) -> None:
    model = open_model(tmp_path / "silo")
    before = model.read().copy()
    assert not model.mix(CommitRow(4, "c-9", 0.5, (("c-0", 0.5),)))
    np.testing.assert_array_equal(model.read(), before)
    assert model.state.mixed_round == 4


def _nan(file: Parameters) -> bytes:
    next(iter(file.values()))[3] = np.nan
    return file.to_bytes()


def _weightless(file: Parameters) -> bytes:
    if "weight" in file:
        file["weight"] = [0.0]
        return file.to_bytes()
    return b""


BAD: dict[str, Callable[[Parameters], bytes]] = {
    "NaN": _nan,
    "short": lambda file: file.to_bytes()[:-4],
    "another header": lambda file: file.to_bytes().replace(b'"shape":[40]', b'"shape":[4,10]'),
    "spaces": lambda file: file.to_bytes().replace(b'"dtype":', b'"dtype" :', 1),
    "no weight": _weightless,
    "no model": lambda _: b"x" * 100,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("exchange", ["neighbours", "push-sum"])
def test_files_that_are_no_model_of_the_job_are_not_stored(tmp_path: Path, exchange: str, bad: str) -> None:
    model = open_model(tmp_path / "silo", exchange)
    model.prepare(1, RELAY, np.random.default_rng(1))
    content = BAD[bad](files_of_neighbours(exchange, codec=False)["c-0"])
    path = tmp_path / "silo" / "received" / "bad"
    path.write_bytes(content)
    before = model.state
    with pytest.raises(GossipError):
        model.store("c-0", hashlib.sha256(content).hexdigest(), path)
    assert (model.state, path.exists()) == (before, False)


def test_a_file_of_its_own_that_is_no_model_is_not_deleted(tmp_path: Path) -> None:
    """A neighbour may announce the digest of any file that the silo has."""
    model = open_model(tmp_path / "silo", codec=True)
    train(model, 1)
    model.prepare(1, RELAY, np.random.default_rng(1))
    assert model.state.delta is not None
    path = model.find(model.state.delta.digest)
    assert path is not None
    with pytest.raises(GossipError):
        model.store("c-0", model.state.delta.digest, path)
    assert path.exists()


def offered_by(sender: SiloModel, **changes: object) -> Offered:
    delta = sender.state.delta
    assert delta is not None
    step = Delta(**({"digest": delta.digest, "size_bytes": delta.size_bytes, "base": delta.base} | changes))  # type: ignore[arg-type]
    return Offered(Contact("c-0", bytes(32)), sender.announced, sender.file_bytes, step)


def test_a_public_copy_is_followed_step_by_step(tmp_path: Path) -> None:
    one, other = (open_model(tmp_path / name, codec=True) for name in ("one", "other"))
    for number in (1, 2):
        for each in (one, other):
            train(each, number)
            each.prepare(number, RELAY, np.random.default_rng(1))
        for receiver, sender in ((one, other), (other, one)):
            offered = offered_by(sender)
            assert receiver.can_follow(offered)
            (payload,) = sender.list_offers("c-0", all_files=False).values()
            receiver.store("c-0", offered.digest, receiver.follow(offered, payload))
        one.mix(CommitRow(number, "c-1", 0.5, (("c-0", 0.5),)))
        other.mix(CommitRow(number, "c-1", 0.5, (("c-0", 0.5),)) if number == 1 else CommitRow(number, "c-1", 1.0))
    # The last row of the other one has no neighbours, so it does not count on what they have.
    train(other, 3)
    other.prepare(3, RELAY, np.random.default_rng(1))
    assert list(other.list_offers("c-0", all_files=False)) == [other.announced]
    assert len(other.list_offers("c-0", all_files=True)) == 2
    assert not one.can_follow(offered_by(other, base="f" * 64))
    assert not one.can_follow(offered_by(other, size_bytes=10**9))


def test_a_step_that_leads_elsewhere_is_not_used(tmp_path: Path) -> None:
    sender, receiver = (open_model(tmp_path / name, codec=True) for name in ("sender", "receiver"))
    train(sender, 1)
    sender.prepare(1, RELAY, np.random.default_rng(1))
    offered, payload = offered_by(sender), tmp_path / "payload"
    for content, problem in ((b"", "cannot be decoded"), (b"\xff" * 50, "cannot be decoded|leads to a file")):
        payload.write_bytes(content)
        with pytest.raises(GossipError, match=problem):
            receiver.follow(offered, payload)


@pytest.mark.parametrize("exchange", ["neighbours", "push-sum"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_trained_model_that_is_not_finite_is_refused(tmp_path: Path, exchange: str, value: float) -> None:
    """Otherwise the silo could not read its own model any more. Two finite numbers may have an infinite sum."""
    model = open_model(tmp_path / "silo", exchange)
    update = model.to_parameters()
    update["weight"][...] = 2e38
    model.finish_training("training 1", model.add_update(update), update, 10.0, {})
    before = model.state
    update["weight"][1] = value
    with pytest.raises(GossipError, match="has the training diverged"):
        model.add_update(update)
    assert model.state == before
    assert np.isfinite(model.read()).all()


@pytest.mark.parametrize("name", ["../outside", "state.json", "received", ""])
def test_a_name_that_is_no_digest_is_no_file(tmp_path: Path, name: str) -> None:
    """A server may name any text as a digest, and what is no model is deleted."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"a file of the owner")
    model = open_model(tmp_path / "silo")
    for each in (name, str(outside)):
        assert model.find(each) is None


# --- what is on the disk ---------------------------------------------------------------------------------------------


def test_damaged_files_of_others_are_dropped_and_own_ones_begin_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = play(tmp_path / "silo", "neighbours", codec=False)
    mean, own = model.state.mean, model.state.model
    assert mean is not None
    (tmp_path / "silo" / mean.digest).write_bytes(b"damaged")
    state = SiloFolder(tmp_path / "silo").state
    assert (state.mean, state.model) == (None, own)
    (tmp_path / "silo" / own).unlink()
    assert SiloFolder(tmp_path / "silo").state.model == ""
    (tmp_path / "silo" / "state.json").write_bytes(b"{")
    assert SiloFolder(tmp_path / "silo").state.model == ""
    assert caplog.text.count("missing or damaged") == 3
    assert "the silo begins again" in caplog.text


def test_a_state_that_cannot_be_read_costs_no_model(tmp_path: Path) -> None:
    """Such as that of a newer version: after a downgrade the silo's only copy of its model must not go."""
    store = SiloStore(tmp_path / "silos", tmp_path / "exports", 10**9)
    model = play(store.open("j-1").path, "neighbours", codec=False)
    digest, path = model.state.model, tmp_path / "silos" / "j-1"
    content = (path / digest).read_bytes()
    (path / "state.json").write_bytes(b'{"a_field_of_tomorrow": 1}')
    again = SiloStore(tmp_path / "silos", tmp_path / "exports", 10**9)
    again.open("j-1").tidy()
    assert not (path / digest).exists()
    (kept,) = tmp_path.glob(f"silos-set-aside/j-1.*/{digest}")
    assert kept.read_bytes() == content
    os.utime(kept.parent, (0.0, time.time() - KEEP_S - 60.0))
    again.open("j-2")
    assert list(tmp_path.glob("silos-set-aside/*")) == []


def test_a_file_of_another_silo_is_durable_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, steps = SiloFolder(tmp_path / "silo"), list[str]()
    received, digest = folder.received / "part", "a" * 64
    received.write_bytes(b"model")
    sync, replace = durable.sync, Path.replace

    def note_sync(path: Path) -> None:
        sync(path)
        steps.append(f"sync {path.name}")

    def note_replace(path: Path, target: Path) -> Path:
        steps.append("replace")
        return replace(path, target)

    monkeypatch.setattr(durable, "sync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    assert folder.admit(received, digest).read_bytes() == b"model"
    assert steps == ["sync part", "replace", "sync silo"]


def test_states_of_other_jobs_are_evicted_oldest_first(tmp_path: Path) -> None:
    store = SiloStore(tmp_path / "silos", tmp_path / "exports", 2500)
    for number in range(3):
        store.open(f"j-{number}").put(bytes([number]) * 1000)
    store.open("j-2")
    assert sorted(path.name for path in (tmp_path / "silos").iterdir()) == ["j-1", "j-2"]
    store.open("j-1").put(bytes(9000))  # more than the limit, of the current job
    store.open("j-1")
    assert [path.name for path in (tmp_path / "silos").iterdir()] == ["j-1"]
    strange = store.open("../j")
    assert strange.path.parent == tmp_path / "silos"


def test_the_state_is_for_the_owner_only(tmp_path: Path) -> None:
    folder = SiloStore(tmp_path / "silos", tmp_path / "exports", 10**9).open("j-1")
    SiloModel(folder, initial_model(), GossipSetup(trains=True, exchange="neighbours"), None)
    for path in folder.path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["norm.running_var", "norm.running_mean"])
def test_compressed_gossip_makes_no_variance_negative(tmp_path: Path, name: str) -> None:
    initial = Parameters.from_arrays({name: np.full(SIZE, 0.25, np.float32)})
    setup = GossipSetup(trains=True, exchange="neighbours", gamma=0.5)
    model = SiloModel(SiloFolder(tmp_path), initial, setup, TopK(fraction=0.2).build())
    model.prepare(1, RELAY, np.random.default_rng(1))
    content = mixing.make_model_file(np.full(SIZE, -5.0, np.float32)).to_bytes()
    path, digest = tmp_path / "received" / hashlib.sha256(content).hexdigest(), hashlib.sha256(content).hexdigest()
    path.write_bytes(content)
    model.store("c-0", digest, path)
    assert model.mix(CommitRow(1, "c-9", 0.6, (("c-0", 0.4),)))
    expected = 0.0 if name.endswith("var") else 0.25 + 0.5 * 0.4 * (-5.0 - 0.25)
    np.testing.assert_allclose(model.read(), expected, atol=1e-6)
