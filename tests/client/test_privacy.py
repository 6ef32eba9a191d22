"""Example-level privacy at a client: its owner's limit, and the ledger, whose charges are final."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedplat.errors import PrivacyLimitError
from fedplat.model import Parameters
from fedplat.privacy.steps import StepCharge, merge_charges
from fedplat.pytorch.training import Learner
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Cancelled, Client, ClientOptions, DataDirectoryError, PrivacyLimit, Task
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client.task import Control
from fedplat_client.trainers.torch import TorchTrainer
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
ABANDONED = fleet_pb2.ReportResponse(refusal=fleet_pb2.Refusal(reason=model_pb2.REASON_ATTEMPT_ABANDONED))
CONFIG: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 5,
    "learning_rate": 0.1,
    "dp": "flat",
    "dp_noise_multiplier": 1.0,
    "dp_max_grad_norm": 1.0,
    "dp_delta": 1e-5,
}
LIMIT = PrivacyLimit(max_epsilon=100.0, delta=1e-5)
PER_TASK = StepCharge(1.0, 0.25, 8)
"""The cost of a training with this configuration on twenty examples."""


def module() -> nn.Module:
    return nn.Linear(40, 50)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(20, 40, generator=generator), torch.arange(20) % 50)


def trainer(limit: PrivacyLimit | None = LIMIT, dataset: Dataset[Any] | None = None) -> TorchTrainer:
    return TorchTrainer(model=module, data=dataset or data(), device="cpu", private=limit)


def start() -> Parameters:
    return Parameters.from_arrays({"weight": np.zeros((50, 40), "f4"), "bias": np.zeros(50, "f4")})


def make_task(config: dict[str, Any] = CONFIG, **fields: Any) -> Task:
    return Task(name="digits", parameters=start(), config=config, job_id="job-1", **fields)


def load_charges(ledger: PrivacyLedger) -> list[StepCharge]:
    """What all jobs together have cost the dataset."""
    entries = ledger._read().entries  # pyright: ignore[reportPrivateUsage]
    return merge_charges(charge for each in entries for charge in each.charges)


def opacus_epsilon(num_steps: int) -> float:
    accountant = RDPAccountant()
    for _ in range(num_steps):
        accountant.step(noise_multiplier=1.0, sample_rate=0.25)
    return accountant.get_epsilon(1e-5)


class Fleet:
    """Assignments over a socket, each for a new client."""

    def __init__(self, fleet: FakeFleet, make_client: MakeClient) -> None:
        self.fake, self._make = fleet, make_client
        self.model = fleet.add_model(start())

    def work(self, torch_trainer: TorchTrainer, config: dict[str, Any] = CONFIG, **fields: Any) -> None:
        values = {name: _value(value) for name, value in config.items()}
        self.fake.assign(self.model, config=values, **fields)
        client = self._make()
        client.add_trainer("digits", torch_trainer)
        client.add_evaluator("digits", torch_trainer.evaluate)
        client.run(max_tasks=1)

    @property
    def epsilons(self) -> list[float]:
        """The epsilons that were reported, once for each report."""
        reports = {report.token: report.metrics["epsilon"] for report in self.fake.requests["Report"] if report.metrics}
        return list(reports.values())

    @property
    def failures(self) -> list[str]:
        return [failure.text for failure in self.fake.requests["Fail"]]


def _value(value: str | float) -> model_pb2.Value:
    match value:
        case str():
            return model_pb2.Value(string_value=value)
        case float():
            return model_pb2.Value(double_value=value)
        case _:
            return model_pb2.Value(int_value=value)


@pytest.fixture
def fleet_of(fleet: FakeFleet, make_client: MakeClient) -> Fleet:
    return Fleet(fleet, make_client)


def test_epsilon_grows_from_round_to_round_over_restarts_whatever_becomes_of_the_updates(fleet_of: Fleet) -> None:
    fleet_of.work(trainer())
    fleet_of.fake.receipts = [ABANDONED]
    for _ in range(2):
        fleet_of.work(trainer())
    assert fleet_of.failures == []
    assert fleet_of.epsilons == pytest.approx([opacus_epsilon(8 * number) for number in (1, 2, 3)], rel=1e-9)
    last = fleet_of.fake.requests["Report"][-1].metrics
    assert (last["noise_multiplier"], last["private_steps"], last["local_steps"]) == (1.0, 24, 8)
    assert last.keys() == {"epsilon", "noise_multiplier", "private_steps", "local_steps"}


def test_a_client_refuses_past_its_own_limit_and_gives_a_reason(fleet_of: Fleet, tmp_path: Path) -> None:
    limit = PrivacyLimit(max_epsilon=(opacus_epsilon(16) + opacus_epsilon(24)) / 2, delta=1e-5)
    for _ in range(4):
        fleet_of.work(trainer(limit))
    assert len(fleet_of.epsilons) == 2
    assert [each.reason for each in fleet_of.fake.requests["Fail"]] == [model_pb2.REASON_PRIVACY_LIMIT] * 2
    assert fleet_of.failures[0].startswith("the training would exceed epsilon ")
    assert "the limit of the data's owner; nothing was computed" in fleet_of.failures[0]
    assert load_charges(PrivacyLedger(tmp_path / "data" / "privacy.json")) == [StepCharge(1.0, 0.25, 16)]


def test_all_jobs_share_one_limit_and_each_job_gets_its_own_epsilon(fleet_of: Fleet) -> None:
    limit = PrivacyLimit(max_epsilon=(opacus_epsilon(16) + opacus_epsilon(24)) / 2, delta=1e-5)
    for job in ("job-1", "job-2", "job-3"):
        fleet_of.work(trainer(limit), job_id=job)
    assert fleet_of.epsilons == pytest.approx([opacus_epsilon(8)] * 2)
    assert len(fleet_of.failures) == 1
    fleet_of.work(trainer(dataclasses.replace(limit, dataset="another")), job_id="job-3")
    assert len(fleet_of.epsilons) == 3


def test_a_late_joiner_is_private_from_its_first_step(tmp_path: Path) -> None:
    """All examples are zeros: without noise the weights of the inputs would not change."""
    ledger = PrivacyLedger(tmp_path / "privacy.json")
    charged = list[list[StepCharge]]()

    class Watched(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            charged.append(load_charges(ledger))
            return torch.zeros(40), 0

    task = make_task(CONFIG | {"epochs": 1, "batch_size": 20}, round=70, ledger=ledger)
    metrics = trainer(dataset=Watched())(task).metrics
    assert charged[0] == [StepCharge(1.0, 1.0, 1)]  # before the first example was read
    assert metrics["private_steps"] == 1
    assert np.std(task.parameters["weight"]) == pytest.approx(0.1 / 20, rel=0.1)


def test_a_crash_counts_the_whole_training(tmp_path: Path) -> None:
    """The test reads the ledger's file during the second step."""
    path, reads = tmp_path / "privacy.json", [0]

    class Dying(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            reads[0] += 1
            if reads[0] == 6:
                (tmp_path / "left.json").write_bytes(path.read_bytes())
            return torch.ones(40), 1

    task = make_task(CONFIG | {"batch_size": 4, "epochs": 10}, ledger=PrivacyLedger(path))
    trainer(dataset=Dying())(task)
    assert load_charges(PrivacyLedger(tmp_path / "left.json")) == [StepCharge(1.0, 1.0, 10)]


def test_a_training_that_is_stopped_has_cost_the_steps_that_were_made() -> None:
    ledger, now = PrivacyLedger(), [0.0]

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            now[0] += 1.0
            return torch.ones(40), 1

    config = CONFIG | {"batch_size": 4, "epochs": 10}
    for partial_work, made in ((False, 4), (True, 2)):
        control = Control(training_timeout_s=15.0, options=ClientOptions(clock=lambda: now[0]))
        task = make_task(config | {"partial_work": partial_work}, ledger=ledger, control=control)
        spent = sum(each.num_steps for each in load_charges(ledger))
        if partial_work:
            assert trainer(dataset=Slow())(task).metrics["private_steps"] == spent + made
        else:
            with pytest.raises(Cancelled):
                trainer(dataset=Slow())(task)
        assert load_charges(ledger) == [StepCharge(1.0, 1.0, spent + made)]


@pytest.mark.parametrize(
    ("config", "limit", "message"),
    [
        ({"dp": "none"}, LIMIT, "the owner of the data allows private trainings only; expected config.dp"),
        ({}, dataclasses.replace(LIMIT, min_noise_multiplier=1.1), "dp_noise_multiplier = 1: expected at least 1.1"),
        ({}, dataclasses.replace(LIMIT, max_epsilon=0.1), "exceed epsilon 0.1 at delta 1e-05"),
        ({"epochs": 10**6}, LIMIT, "Expected fewer steps, or more noise"),
    ],
)
def test_what_the_owner_does_not_allow_is_declined(config: dict[str, Any], limit: PrivacyLimit, message: str) -> None:
    plain = {name: value for name, value in CONFIG.items() if not name.startswith("dp")}
    task = make_task(plain if config == {"dp": "none"} else CONFIG | config)
    with pytest.raises(PrivacyLimitError, match=message):
        trainer(limit)(task)
    assert task.parameters == start()
    assert load_charges(task.ledger) == []


def test_evaluations_are_declined_unless_the_owner_allows_them() -> None:
    with pytest.raises(PrivacyLimitError, match="the metrics of an evaluation have no noise"):
        trainer().evaluate(make_task())
    for limit in (None, dataclasses.replace(LIMIT, evaluates=True), dataclasses.replace(LIMIT, required=False)):
        assert trainer(limit).evaluate(make_task()).metrics.keys() == {"loss", "accuracy"}


def test_without_a_limit_private_jobs_are_counted_and_others_are_trained_for() -> None:
    task = make_task()
    assert trainer(None)(task).metrics["epsilon"] == pytest.approx(opacus_epsilon(8))
    assert load_charges(task.ledger) == [PER_TASK]
    plain = {name: value for name, value in CONFIG.items() if not name.startswith("dp")}
    assert "loss" in trainer(dataclasses.replace(LIMIT, required=False))(make_task(plain)).metrics


def test_the_ledger_is_one_for_all_servers_of_a_data_directory(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    first, second = PrivacyLedger(path, "server-a demo"), PrivacyLedger(path, "server-b demo")
    seen = list[int]()
    for ledger in (first, second, first):
        ledger.charge("default", "job", PER_TASK, lambda charges: seen.append(sum(each.num_steps for each in charges)))
    assert seen == [8, 16, 24]
    nothing = StepCharge(1.0, 0.25, 0)
    assert (first.settle("default", "job", nothing), second.settle("default", "job", nothing)) == (
        [StepCharge(1.0, 0.25, 16)],
        [PER_TASK],
    )
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b'{"entries": [{"dataset": "a", "job": "b", "charges": [{}]}]}', b"\xff"]
)
def test_a_damaged_ledger_stops_private_trainings(fleet_of: Fleet, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "privacy.json").write_bytes(damage)
    fleet_of.work(trainer())
    (failure,) = fleet_of.failures
    assert "the privacy cost so far is unknown, so no private training may start" in failure


def test_a_ledger_that_cannot_be_written_stops_private_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    task = make_task(ledger=PrivacyLedger(tmp_path / "privacy.json"))
    with pytest.raises(DataDirectoryError, match="private training needs a readable and writable ledger"):
        trainer()(task)
    assert task.parameters == start()
    assert [path.name for path in tmp_path.iterdir()] == ["privacy.lock"]


def test_a_model_that_opacus_cannot_handle_fails_without_a_traceback(
    fleet_of: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50))

    fleet_of.model = fleet_of.fake.add_model(Learner(model=normed).initial())
    fleet_of.work(TorchTrainer(model=normed, data=data(), device="cpu", private=LIMIT))
    (failure,) = fleet_of.failures
    assert "its layer '1' is BatchNorm1d; use GroupNorm(" in failure
    assert "depending on who else is on its batch." in failure
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize(
    "fields",
    [{"max_epsilon": 0.0}, {"max_epsilon": math.nan}, {"delta": 0.0}, {"delta": 1.0}, {"min_noise_multiplier": -1.0}],
)
def test_an_invalid_limit_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} is"):
        PrivacyLimit(**{"max_epsilon": 1.0, "delta": 1e-5} | fields)  # type: ignore[arg-type]
