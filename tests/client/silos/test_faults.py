"""Silos that are killed, late, gone, new or hostile: the others continue, and no model is mixed twice."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedplat.config import user_code
from fedplat.model import Parameters
from fedplat_client import Task
from fedplat_client._protocols.gossip.model import SiloModel
from fedplat_client._state.silo_store import SiloFolder, SiloState
from support import silo_fleet
from support.silo_fleet import Silo, gossip_job, initial_model, pull, simulate

RING = 'exchange = "ring"'


class Killed(BaseException):
    """The process ends here."""


def _is_end(exc: BaseException) -> bool:
    """Lets the end of the process pass what guards the client from the owner's code."""
    return isinstance(exc, Killed)


@dataclasses.dataclass
class Killer:
    """Ends a silo's process when it is about to store a state, of which all files are there."""

    folder: Path
    condition: Callable[[SiloState], bool]
    save: Callable[[SiloFolder, SiloState], None] = SiloFolder.save
    is_done: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def save(folder: SiloFolder, state: SiloState) -> None:
            self(folder, state)

        monkeypatch.setattr(SiloFolder, "save", save)
        monkeypatch.setattr(user_code, "is_interrupt", _is_end)

    def __call__(self, folder: SiloFolder, state: SiloState) -> None:
        if self.folder in folder.path.parents and not self.is_done and self.condition(state):
            self.is_done = True
            raise Killed
        self.save(folder, state)


POINTS: dict[str, Callable[[SiloState], bool]] = {
    "trained": lambda state: state.is_trained and state.mixed_round == 1,
    "prepared": lambda state: state.prepared == 2,
    "stored": lambda state: state.prepared == 2 and len(state.stored) == 1,
    "mixed": lambda state: state.mixed_round == 2,
    "adopted": lambda state: state.adopted_round == 2,
}


@pytest.mark.parametrize(
    "point", ["mixed", *(pytest.param(each, marks=pytest.mark.slow) for each in POINTS if each != "mixed")]
)
@pytest.mark.parametrize("relayed", [(), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
async def test_a_silo_that_is_killed_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, relayed: tuple[int, ...]
) -> None:
    text = gossip_job(3, rounds=2)
    async with silo_fleet.running(tmp_path, 3, relayed) as fleet:
        first, *others = fleet.silos
        Killer(first.folder, POINTS[point]).install(monkeypatch)
        async with fleet.at_work(*others):
            task = first.start()
            job = await fleet.operator.start(text, initial_model())
            await first.crash(task, Killed)
            async with fleet.at_work(first):
                await fleet.operator.until(job, "job", "COMPLETED")
                mean = Parameters.from_bytes(await fleet.exported(job))
        *_, last = simulate(text, [silo.name for silo in fleet.silos], initial_model())
        np.testing.assert_allclose(mean["weight"], last.mean(axis=0), atol=1e-6)


@pytest.mark.slow
async def test_a_ring_is_repeated_if_a_silo_loses_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the silo had the mean already, and could not store it."""
    async with silo_fleet.running(tmp_path, 3) as fleet:
        first, *others = fleet.silos
        Killer(first.folder, lambda state: state.mean is not None).install(monkeypatch)
        async with fleet.at_work(*others):
            task = first.start()
            job = await fleet.operator.start(
                gossip_job(3, rounds=1, mode=RING, min_fraction=1.0, upload_s=3.0), initial_model()
            )
            await first.crash(task, Killed)
            async with fleet.at_work(first):
                await fleet.operator.until(job, "job", "COMPLETED")
                await fleet.exported(job)


@pytest.mark.slow  # it asks the one that is still training for the mean, and waits for ten seconds
@pytest.mark.parametrize("listens", [True, False])
async def test_a_new_silo_gets_the_last_mean_of_the_others(tmp_path: Path, listens: bool) -> None:
    announced = threading.Event()

    def wait(silo: Silo, task: Task) -> None:
        if task.round == 2:  # the round does not end before the new silo is part of it
            assert announced.wait(silo_fleet.PATIENCE_S)
        pull(silo, task)

    def leave(silo: Silo, task: Task) -> None:
        silo.client.stop()
        task.progress(1.0)

    async with silo_fleet.running(tmp_path) as fleet:
        for change in (pull, pull, wait, leave):
            await fleet.add(change=change, listens=listens)
        async with fleet.at_work():
            job = await fleet.operator.start(gossip_job(4, rounds=2, mode=RING, min_fraction=0.75), initial_model())
            await fleet.operator.until(job, "attempt", "COMMITTED", round_=1)
            new = await fleet.add(listens=listens)
            del fleet.silos[3]  # the one that has left
            async with fleet.at_work(new):
                async for event in fleet.operator.follow(job):
                    if event.client_id == new.name and event.to_state == "ADVERTISED":
                        break
                announced.set()
                await fleet.operator.until(job, "job", "COMPLETED")
                await fleet.exported(job)
        (trained_on,) = new.models.values()
        np.testing.assert_array_equal(trained_on, fleet.silos[0].models[2])


@pytest.mark.slow
async def test_a_neighbour_that_cannot_be_reached_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with silo_fleet.running(tmp_path, 2) as fleet:
        await fleet.add(
            peer_listen=f"127.0.0.1:{silo_fleet.free_port()}", peer_address=f"127.0.0.1:{silo_fleet.free_port()}"
        )
        async with fleet.at_work():
            # The silos try until this time is over; on a busy machine two of them need seconds to meet.
            job = await fleet.operator.start(gossip_job(3, rounds=1, upload_s=8.0), initial_model())
            await fleet.operator.until(job, "attempt", "REDUCING")
            shown = (await fleet.operator.show(job)).exchange
            assert (shown.num_edges, shown.num_confirmed) == (3, 1)
        assert "The model of a neighbour is missed" in caplog.text


@pytest.mark.slow
async def test_late_training_counts_in_the_next_round(tmp_path: Path) -> None:
    released = threading.Event()

    def train(silo: Silo, task: Task) -> None:
        if silo.number == 3:
            released.wait(silo_fleet.PATIENCE_S)
            task.progress(1.0)
            assert task.remaining_s == 0.0
        pull(silo, task)

    async with silo_fleet.running(tmp_path) as fleet:
        await fleet.add_all(3, change=train)
        async with fleet.at_work():
            # The time after which silo 3 is late; the others need less, also on a busy machine.
            text = gossip_job(3, rounds=2, training_s=8.0, heartbeat_s=0.3)
            job = await fleet.operator.start(text, initial_model())
            await fleet.operator.until(job, "attempt", "SELECTING", round_=2)
            released.set()
            await fleet.operator.until(job, "job", "COMPLETED")
            await fleet.exported(job)
        assert [sorted(silo.models) for silo in fleet.silos] == [[1, 2], [1, 2], [1]]
        merged = [each.merged for each in await fleet.operator.rounds(job)]
        assert merged == [2, 3]


def spoil(monkeypatch: pytest.MonkeyPatch, silo: Silo, content: bytes, *, announces: bool) -> None:
    """The silo's neighbours get other bytes than its model, which it has announced or not."""
    offers, announced = SiloModel.list_offers, SiloModel.announced.fget
    assert announced is not None
    digest, path = hashlib.sha256(content).hexdigest(), silo.folder / "spoiled"

    def is_own(model: SiloModel) -> bool:
        found = model.find(model.state.model)
        return found is not None and silo.folder in found.parents

    def list_offers(model: SiloModel, receiver: str, *, all_files: bool) -> dict[str, Path]:
        if not is_own(model):
            return offers(model, receiver, all_files=all_files)
        path.write_bytes(content)
        return {model.announced: path}

    def replace_digest(model: SiloModel) -> str:
        return digest if is_own(model) and announces else str(announced(model))

    monkeypatch.setattr(SiloModel, "list_offers", list_offers)
    monkeypatch.setattr(SiloModel, "announced", property(replace_digest))


SPOILED = {
    "NaN": (np.full(40, np.nan, np.float32), True, "NaN or infinite"),
    "other bytes": (np.ones(40, np.float32), False, "has the digest"),
}


@pytest.mark.parametrize("what", SPOILED)
async def test_a_hostile_neighbour_makes_its_own_edges_be_missed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    vector, announces, problem = SPOILED[what]
    async with silo_fleet.running(tmp_path, 4) as fleet:
        hostile = fleet.silos[3]
        spoil(monkeypatch, hostile, Parameters.from_arrays({"model": vector}).to_bytes(), announces=announces)
        async with fleet.at_work():
            job = await fleet.operator.start(gossip_job(4, rounds=1, mode='topology = "complete"'), initial_model())
            await fleet.operator.until(job, "attempt", "COMMITTED", round_=1)
            shown = dict((await fleet.operator.rounds(job))[0].client_metrics)
            assert (shown["edges"], shown["confirmed_edges"]) == (6.0, 3.0)
        assert caplog.text.count(problem) >= 3
        assert hostile.name in {getattr(record, "peer", "") for record in caplog.records}
