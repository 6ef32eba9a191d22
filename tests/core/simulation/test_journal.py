"""A stopped simulation resumes, and ends with the same bits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedplat import durable
from fedplat.errors import ReplayError
from fedplat.simulation.federated.interface import Snapshot
from fedplat.simulation.recording import resuming
from fedplat.simulation.recording.result import AttemptResult, Result
from fedplat.simulation.run import Hooks, Simulation, run
from support.simulation.cases import BAD, job, make_fleet
from support.simulation.least_squares import LeastSquares, initial
from support.simulation.secure import UPDATES

JOBS: list[dict[str, Any]] = [
    {},
    {"mode": {"kind": "buffered", "concurrency": 15}},
    {
        "mode": {"kind": "buffered", "concurrency": 15},
        "evaluation": {"clients": {"evaluator": "digits-eval", "goal": 3, "timeout_s": 10.0}},
    },
    {
        "compression": {"uplink": {"codec": "topk"}, "downlink": {"codec": "quantize"}},
        "aggregation": {"rule": "fedadam"},
        "updates": {"clip_norm": 0.5},
    },
    {"secure_aggregation": {"confirm": True}, "updates": UPDATES},
]


class StoppedError(Exception):
    pass


class Fragile(LeastSquares):
    """An engine that stops after `num_results_left` more results."""

    num_results_left = -1

    def result(self, task: Any) -> Any:
        self.num_results_left -= 1
        if self.num_results_left == 0:
            raise StoppedError
        return super().result(task)


def play(folder: Path | None, engine: Fragile, sections: dict[str, Any], stop_at: int = 0) -> Result:
    """Runs a small simulation, or stops it in the middle of the round after version `stop_at`."""

    def observe(record: AttemptResult) -> None:
        if record.version == stop_at:
            engine.num_results_left = 3

    fleet = make_fleet(30, **BAD)
    simulation = Simulation(spec=job(**sections), fleet=fleet, engine=engine, initial=initial(), seed=4)
    return run(simulation, Hooks(observe=observe if stop_at else None, journal=folder, checkpoint_every=2))


@pytest.mark.parametrize("sections", JOBS)
@pytest.mark.parametrize("stop_at", [1, 2, 5])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, sections: dict[str, Any], stop_at: int
) -> None:
    whole = play(None, Fragile(30), sections)
    with pytest.raises(StoppedError):
        play(tmp_path, Fragile(30), sections, stop_at)
    engine = Fragile(30)
    resumed = play(tmp_path, engine, sections)
    assert resumed.to_dict(clients=True) == whole.to_dict(clients=True)
    assert resumed.model is not None
    assert whole.model is not None
    assert resumed.model.buffer.tobytes() == whole.model.buffer.tobytes()
    trained_before = sum(record.num_updates for record in whole.rounds if record.version <= stop_at // 2 * 2)
    total = sum(record.num_updates for record in whole.rounds)
    assert total - trained_before <= engine.calls["results"] < total - trained_before + 4
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_a_run_that_is_killed_while_it_writes_a_checkpoint_has_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rename, num_left = play(None, Fragile(30), {}), durable.rename_folder, 2

    def die_at_the_second(source: Path, target: Path) -> None:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            raise StoppedError
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "rename_folder", die_at_the_second)
        with pytest.raises(StoppedError):
            play(tmp_path, Fragile(30), {})
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]
    resumed = play(tmp_path, engine := Fragile(30), {})
    assert resumed.to_dict(clients=True) == whole.to_dict(clients=True)
    assert engine.calls["results"] < sum(record.num_updates for record in whole.rounds)


def test_the_lines_that_a_checkpoint_needs_are_synced_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fsync = resuming.write_checkpoint, os.fsync
    synced, missing = dict[int, int](), list[int]()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def compare(folder: Path, snapshot: Snapshot, num_bytes: int) -> None:
        missing.append(num_bytes - synced.get((folder / "answers.jsonl").stat().st_ino, 0))
        write(folder, snapshot, num_bytes)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(resuming, "write_checkpoint", compare)
    play(tmp_path, Fragile(30), {})
    assert missing
    assert not any(missing)


@pytest.mark.parametrize("stop_at", [8, 45])
def test_a_resumed_run_keeps_the_base_versions_of_clients_that_are_offline(tmp_path: Path, stop_at: int) -> None:
    spec = job(
        goal=1,
        rounds=60,
        mode={"kind": "buffered", "concurrency": 12},
        selection={"over_selection": 1.0, "min_fraction": 1.0},
    )
    fleet = make_fleet(20, vanishes=0.5, away_s=20.0, noise=0.3, speed={"kind": "constant", "value": 1.0})

    def simulate(folder: Path | None, engine: Fragile) -> Result:
        engine.num_results_left = stop_at if folder is not None and not any(folder.iterdir()) else -1
        return run(
            Simulation(spec=spec, fleet=fleet, engine=engine, initial=initial(), seed=1),
            Hooks(journal=folder, checkpoint_every=2),
        )

    with pytest.raises(StoppedError):
        simulate(tmp_path, Fragile(20))
    whole, resumed = simulate(None, Fragile(20)), simulate(tmp_path, engine := Fragile(20))
    assert 0 < engine.calls["results"] < 60
    assert resumed.to_dict(clients=True) == whole.to_dict(clients=True)
    assert resumed.model == whole.model
    assert engine.published == [60]


def test_a_run_that_has_ended_is_replayed_without_training(tmp_path: Path) -> None:
    first = play(tmp_path, Fragile(30), {})
    engine = Fragile(30)
    again = play(tmp_path, engine, {})
    assert again.to_dict(clients=True) == first.to_dict(clients=True)
    assert again.model == first.model
    assert engine.calls["results"] == 0


def test_the_journal_of_another_simulation_is_refused(tmp_path: Path) -> None:
    play(tmp_path, Fragile(30), {})
    with pytest.raises(ReplayError, match="belongs to another simulation; resume with the same file, seed and data"):
        play(tmp_path, Fragile(30), {"aggregation": {"rule": "fedavgm"}})


def test_damaged_files_are_named(tmp_path: Path) -> None:
    play(tmp_path, Fragile(30), {})
    (folder,) = tmp_path.glob("checkpoint-*")
    answers = tmp_path / "answers.jsonl"
    content = answers.read_bytes()
    lines = content.splitlines(keepends=True)
    other = json.loads(lines[1]) | {"client": 29}
    answers.write_bytes(lines[0] + json.dumps(other, separators=(",", ":")).encode() + b"\n" + b"".join(lines[2:]))
    with pytest.raises(ReplayError, match=r"line 2: expected an answer for client|has \d+ bytes"):
        play(tmp_path, Fragile(30), {})
    answers.write_bytes(content[:-5])
    with pytest.raises(ReplayError, match="remove the folder to start again"):
        play(tmp_path, Fragile(30), {})
    answers.write_bytes(content)
    (folder / "state.bin").write_bytes(b"nonsense")
    with pytest.raises(ReplayError, match="remove it to start again"):
        play(tmp_path, Fragile(30), {})
