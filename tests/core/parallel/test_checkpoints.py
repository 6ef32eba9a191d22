"""Checkpoints: written while the training continues, complete or absent, and without code in them."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import checkpoints
from fedplat.pytorch.server.checkpoints import Checkpoints, TrainingState
from fedplat.pytorch.training import Learner, Trainee
from support.ranks import scenarios


def state_of(seed: int) -> tuple[TrainingState, Trainee, torch.optim.Optimizer]:
    """The state of a training after one step of Adam."""
    trainee = Trainee(Learner(model=scenarios.norm_net), seed=seed)
    optimizer = torch.optim.Adam(trainee.parameters().values())
    trainee.module(torch.ones(2, 6) + torch.arange(2)[:, None]).square().sum().backward()
    optimizer.step()
    state = TrainingState(trainee, optimizer, 9)
    state.done = seed
    return state, trainee, optimizer


def saved(folder: Path, ranks: Ranks, state: TrainingState) -> Checkpoints:
    made = Checkpoints(folder, 1, ranks)
    made.save(state)
    made.close()
    return made


def test_the_state_is_restored_without_a_pickle(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, trainee, optimizer = state_of(3)
    made = saved(tmp_path, alone, before)
    after, other, others = state_of(1)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    made.restore(made.newest(), after)
    assert after.done == 3
    for name, value in trainee.shared_tensors().items():
        torch.testing.assert_close(other.shared_tensors()[name], value, rtol=0, atol=0)
    one, two = (each.state_dict()["state"] for each in (optimizer, others))
    assert one.keys() == two.keys()
    for number, entries in one.items():
        for key, value in entries.items():
            torch.testing.assert_close(two[number][key], value, rtol=0, atol=0)


def test_what_is_saved_is_the_state_at_that_moment(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, trainee, _ = state_of(3)
    expected = {name: value.clone() for name, value in trainee.shared_tensors().items()}
    write = checkpoints.write_file

    def change_and_write(path: Path, parts: Any) -> None:
        for parameter in trainee.parameters().values():
            torch.nn.init.zeros_(parameter)
        write(path, parts)

    monkeypatch.setattr(checkpoints, "write_file", change_and_write)
    made = saved(tmp_path, alone, state)
    after, other, _ = state_of(1)
    made.restore(made.newest(), after)
    for name, value in other.shared_tensors().items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = saved(tmp_path, alone, state_of(3)[0])

    def fail(path: Path, parts: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints, "write_file", fail)
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, alone, state_of(4)[0])
    assert "No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000003"]
    monkeypatch.undo()
    saved(tmp_path, alone, state_of(5)[0])
    assert made.newest() == "step-000000000005"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_is_complete_only_with_the_files_of_all_ranks(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved(tmp_path, alone, state_of(3)[0])
    both = Ranks(alone.device)
    monkeypatch.setattr(both, "size", 2)

    def gather(content: bytes) -> list[bytes]:
        return [content, content]

    monkeypatch.setattr(both, "all_gather", gather)
    saved(tmp_path, both, state_of(4)[0])
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000000003", "step-000000000004.part"}
    other = shutil.copytree(tmp_path / "step-000000000004.part", tmp_path.with_suffix(".copy"))
    assert made.newest() == "step-000000000003"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000003"], "it removes what is incomplete"
    shutil.copytree(other, tmp_path / "step-000000000004.part")
    monkeypatch.setattr(both, "rank", 1)
    saved(tmp_path, both, state_of(4)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000004"]


def test_a_checkpoint_of_another_training_is_refused(alone: Ranks, tmp_path: Path) -> None:
    made = saved(tmp_path, alone, state_of(3)[0])
    trainee = Trainee(Learner(model=scenarios.norm_net))
    other = TrainingState(trainee, torch.optim.SGD(trainee.parameters().values()), 8)
    with pytest.raises(ValueError, match="does not belong to this training"):
        made.restore(made.newest(), other)


class Cancelled(Exception):
    """The end of a training by its operator."""


def test_a_cancelled_training_waits_for_its_files(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the only checkpoint is not written before the training waits for it."""
    is_awaited = threading.Event()
    write, close = checkpoints.write_file, Checkpoints.close

    def write_late(path: Path, parts: Any) -> None:
        assert is_awaited.wait(60.0)
        write(path, parts)

    def let_write(self: Checkpoints) -> None:
        is_awaited.set()
        close(self)

    def cancel(done: int, total: int) -> None:
        if done == 3:
            monkeypatch.setattr(Checkpoints, "close", let_write)
            raise Cancelled

    monkeypatch.setattr(checkpoints, "write_file", write_late)
    try:
        with pytest.raises(Cancelled):
            scenarios.learned(alone, *scenarios.checkpointed(tmp_path, note=cancel))
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-000000000003"]
    finally:
        is_awaited.set()
