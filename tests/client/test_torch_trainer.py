"""TorchTrainer on real data: scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import Struct
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedplat.aggregate import LocalAlgorithm, LossContext
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.errors import JobFileError, ModelError
from fedplat.metrics import F1
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch import convert as backend
from fedplat.pytorch.distributed import LaunchedRank
from fedplat.pytorch.training import Learner
from fedplat_client import Cancelled, ClientOptions, Task, TrainResult
from fedplat_client._work import process_group
from fedplat_client.task import Control
from fedplat_client.trainers import distributed
from fedplat_client.trainers.torch import TorchTrainer

CONFIG = {"epochs": 10, "batch_size": 32, "learning_rate": 0.1, "momentum": 0.9}


def digits(num_examples: int | None = None) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(images[:num_examples] / 16.0, dtype=torch.float32),
        torch.tensor(labels[:num_examples], dtype=torch.int64),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def initial(module: nn.Module) -> Parameters:
    return backend.from_state_dict(module.state_dict())


def make_task(parameters: Parameters, plugins: Plugins = BUILTIN, **config: Any) -> Task:
    return Task(name="digits", parameters=parameters.copy(), config=CONFIG | config, plugins=plugins)


def train(trainer: TorchTrainer, task: Task) -> Parameters:
    result = trainer(task)
    assert isinstance(result, TrainResult)
    assert isinstance(result.parameters, Parameters)
    return result.parameters


def test_it_learns_a_real_problem() -> None:
    torch.manual_seed(0)
    trainer = TorchTrainer(model=mlp, data=digits())
    task = make_task(initial(mlp()))
    before = trainer.evaluate(task)
    result = trainer(task)
    assert result.num_examples == before.num_examples == 1797
    assert result.metrics["accuracy"] > 0.9
    assert task.control.fraction == 1.0
    after = trainer.evaluate(task)  # the task's parameters are the trained ones now
    assert before.metrics["accuracy"] < 0.3
    assert after.metrics["accuracy"] > 0.95
    assert after.metrics["loss"] < before.metrics["loss"] / 5


def test_evaluation_agrees_with_numpy() -> None:
    torch.manual_seed(0)
    start = initial(nn.Linear(64, 10))
    data = digits(100)
    trainer = TorchTrainer(model=lambda: nn.Linear(64, 10), data=data, metrics=(F1(),))
    result = trainer.evaluate(make_task(start, batch_size=33))
    images, labels = (tensor.numpy() for tensor in data.tensors)
    logits = (images @ start["weight"].T + start["bias"]).astype(np.float64)
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(100), labels])
    np.testing.assert_allclose(result.metrics["loss"], expected, rtol=1e-6)
    assert result.metrics["accuracy"] == np.mean(logits.argmax(1) == labels)
    assert result.metrics["f1"] == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))


@pytest.mark.parametrize("num_examples", [97, 96])
def test_batch_norm_trains_and_its_counter_is_carried(num_examples: int) -> None:
    torch.manual_seed(0)
    start = initial(batch_norm_mlp())
    trainer = TorchTrainer(model=batch_norm_mlp, data=digits(num_examples))  # 97: a last batch of one example
    trained = train(trainer, make_task(start, epochs=2))
    assert trained["1.num_batches_tracked"] == 6
    assert trained.schema == start.schema
    assert not np.array_equal(trained["1.running_mean"], start["1.running_mean"])


def test_a_seed_gives_the_same_bits_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(0)
    start = initial(mlp())
    state = torch.get_rng_state()
    first, second, other = (
        train(TorchTrainer(model=mlp, data=digits(200), seed=seed), make_task(start, epochs=2)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first.to_bytes() == second.to_bytes()
    assert first.to_bytes() != other.to_bytes()


def test_each_round_draws_anew() -> None:
    torch.manual_seed(0)
    start = initial(mlp())
    trainer = TorchTrainer(model=mlp, data=digits(200))
    rounds = [
        train(trainer, Task(name="digits", parameters=start.copy(), config=CONFIG, round=number)) for number in (1, 2)
    ]
    assert rounds[0].to_bytes() != rounds[1].to_bytes()


def test_data_may_depend_on_the_task_and_loss_and_optimizer_are_the_users() -> None:
    def halves(task: Task) -> Dataset[Any]:
        inputs = torch.linspace(-1, 1, 50).reshape(50, 1)
        return TensorDataset(inputs, inputs * float(task.config["slope"]))

    trainer = TorchTrainer(
        model=lambda: nn.Linear(1, 1),
        data=halves,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, config: torch.optim.Adam(parameters, lr=float(config["learning_rate"])),
        device="cpu",
    )
    torch.manual_seed(0)
    task = make_task(initial(nn.Linear(1, 1)), slope=3.0, epochs=40)
    result = trainer(task)
    assert set(result.metrics) == {"loss", "local_steps"}  # no classes, no accuracy
    np.testing.assert_allclose(task.parameters["weight"], [[3.0]], atol=0.05)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epochs": 0}, "config.epochs = 0: expected a whole number"),
        ({"batch_size": 1.5}, "config.batch_size = 1.5"),
        ({"learning_rate": "fast"}, "config.learning_rate = 'fast': expected a number"),
    ],
)
def test_an_unusable_configuration_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        TorchTrainer(model=mlp, data=digits(10))(make_task(initial(mlp()), **config))


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(JobFileError, match=r"config.epochs: this key is required and missing"):
        TorchTrainer(model=mlp, data=digits(10))(Task(name="digits", parameters=initial(mlp())))


class Slow(Dataset[Any]):
    """Reading an example takes three seconds, on a clock of its own."""

    now = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.now += 3.0
        return torch.ones(64), 1

    def task(self, start: Parameters, *, partial_work: bool) -> Task:
        control = Control(training_timeout_s=15.0, options=ClientOptions(clock=lambda: self.now))
        config = CONFIG | {"batch_size": 1, "epochs": 1, "partial_work": partial_work}
        return Task(name="digits", parameters=start.copy(), config=config, control=control)


def test_partial_work_is_reported_in_time() -> None:
    """Of fifteen seconds six are left after three steps, and another one might take as long."""
    data, start = Slow(), initial(mlp())
    task = data.task(start, partial_work=True)
    assert TorchTrainer(model=mlp, data=data, device="cpu")(task).metrics["local_steps"] == 3
    assert task.parameters != start


def test_whole_work_takes_the_time_that_it_takes() -> None:
    data = Slow()
    with pytest.raises(Cancelled):
        TorchTrainer(model=mlp, data=data, device="cpu")(data.task(initial(mlp()), partial_work=False))


def test_any_dataset_gives_the_same_bits_as_its_tensors() -> None:
    class Wrapped(Dataset[Any]):
        def __init__(self, inner: TensorDataset) -> None:
            self._inner = inner

        def __len__(self) -> int:
            return len(self._inner)

        def __getitem__(self, index: int) -> Any:
            return self._inner[index]

    start = initial(mlp())
    tensors, read = (
        train(TorchTrainer(model=mlp, data=data), make_task(start, epochs=2))
        for data in (digits(50), Wrapped(digits(50)))
    )
    assert tensors.to_bytes() == read.to_bytes()


def test_empty_data_is_named() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        TorchTrainer(model=mlp, data=digits(0))(make_task(initial(mlp())))


def test_without_torchrun_parallel_training_is_that_of_one_process() -> None:
    start = initial(mlp())
    one, same = (
        train(TorchTrainer(model=mlp, data=digits(50), parallel=kind), make_task(start, epochs=1))
        for kind in ("none", "data")
    )
    assert one == same


def test_ranks_that_are_started_again_do_not_read_what_the_former_ones_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def rendezvous(url: str) -> Iterator[tuple[Any, int, int]]:
        yield store, 0, 2

    monkeypatch.setattr(distributed, "rendezvous", rendezvous)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")

    def make(rank: int) -> Any:
        place = LaunchedRank(launcher="torchrun", rank=rank, size=2, local_rank=rank, local_size=2)
        return cast(Any, distributed.LaunchedGroup(place))

    make(0)._publish(b"a training")
    assert make(1)._receive_from_leader() == b"a training"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not make(1)._open_store().check(["said/1"])


class Ascent(Struct, frozen=True):
    def build(self) -> LocalAlgorithm:
        return LocalAlgorithm(perturb=lambda gradients: {name: 0.1 * each for name, each in gradients.items()})


class Coupled(Struct, frozen=True):
    weight: float = 0.1

    def build(self) -> LocalAlgorithm:
        def make_loss(context: LossContext) -> Any:
            def compute(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
                outputs = module(inputs)
                return context.loss(outputs, targets) + self.weight * outputs.mean().square(), outputs

            return compute

        return LocalAlgorithm(make_loss=make_loss)


def test_it_uses_the_local_algorithms_that_its_owner_gave_it() -> None:
    start = initial(mlp())
    own = Plugins({("algorithms", "coupled"): Coupled})
    configs: list[dict[str, Any]] = [
        {},
        {"algorithm": "coupled", "weight": 0.0},
        {"algorithm": "coupled", "weight": 0.5},
    ]
    models = [
        train(TorchTrainer(model=mlp, data=digits(50)), make_task(start, own, epochs=1, **config)) for config in configs
    ]
    assert models[0] == models[1] != models[2]
    with pytest.raises(JobFileError, match=r"config.algorithm = 'coupled': expected one of sgd, fedprox"):
        TorchTrainer(model=mlp, data=digits(50))(make_task(start, algorithm="coupled"))


def test_several_processes_do_not_train_what_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(process_group, "_groups", [])
    trainer = TorchTrainer(model=mlp, data=digits(50), parallel="data")
    protected: dict[str, Any] = {"dp": "flat", "dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0, "dp_delta": 1e-5}
    with pytest.raises(ValueError, match=r'config\.dp = "flat": training in several processes cannot protect'):
        trainer(make_task(initial(mlp()), **protected))
    own = Plugins({("algorithms", "ascent"): Ascent, ("algorithms", "coupled"): Coupled})
    with pytest.raises(
        ValueError, match=r'config\.algorithm = "ascent": it computes gradients at other weights, which'
    ):
        trainer(make_task(initial(mlp()), own, algorithm="ascent"))
    with pytest.raises(ValueError, match=r'config\.algorithm = "coupled": .* its loss is not declared as a mean'):
        trainer(make_task(initial(mlp()), own, algorithm="coupled"))
    with pytest.raises(ValueError, match='device = "cuda:1": expected "auto" or "cpu" with parallel = "data"'):
        TorchTrainer(model=mlp, data=digits(50), parallel="data", device="cuda:1")


def test_a_layout_is_refused_at_the_start_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_groups", [])

    def trainer(**options: Any) -> TorchTrainer:
        return TorchTrainer(model=mlp, data=digits(50), **options)

    with pytest.raises(
        ValueError, match=r"= 2 ranks; there are 1\. Start one process for each rank, such as: torchrun"
    ):
        trainer(parallel=Parallel(shard=2))
    with pytest.raises(ValueError, match='a layout is for two ranks or more; expected "none"'):
        trainer(parallel=Parallel())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 data × 2 shard × 1 tensor × 1 pipeline = 4 ranks; there are 2"):
        trainer(parallel=Parallel(data=2, shard=2))
    with pytest.raises(ValueError, match='"pipedream" is for the server\'s pool'):
        trainer(parallel=Parallel(pipeline=2, schedule="pipedream"))
    with pytest.raises(ValueError, match="a layout cannot train personal tensors"):
        trainer(parallel=Parallel(shard=2), personal=("2.*",))
    with pytest.raises(ValueError, match='device = "cuda:1": expected "auto" or "cpu" with parallel = Parallel'):
        trainer(parallel=Parallel(shard=2), device="cuda:1")
    with pytest.raises(ValueError, match='backend = "mpi": this PyTorch was built without MPI; use "auto"'):
        trainer(parallel=Parallel(shard=2), backend="mpi")
    sharded = trainer(parallel=Parallel(shard=2))
    protected: dict[str, Any] = {"dp": "flat", "dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0, "dp_delta": 1e-5}
    with pytest.raises(ValueError, match=r'config\.dp = "flat": training in several processes cannot protect'):
        sharded(make_task(initial(mlp()), **protected))
    with pytest.raises(ValueError, match='precision = "fp16": a model that several ranks divide has no scaled'):
        sharded(make_task(initial(mlp()), precision="fp16"))
    own = Plugins({("algorithms", "ascent"): Ascent, ("algorithms", "coupled"): Coupled})
    for name, options, reason in (
        ("scaffold", {}, "has control variates"),
        ("feddyn", {"alpha": 0.1}, "has client state, or adds to the update"),
        ("coupled", {}, "has its own loss"),
        ("ascent", {}, "uses gradients at other weights"),
    ):
        with pytest.raises(ValueError, match=f'algorithm = "{name}": it {reason}, which is not possible with a model'):
            sharded(make_task(initial(mlp()), own, algorithm=name, **options))


def test_a_module_with_a_base_is_made_once_and_only_for_jobs_of_that_base() -> None:
    made: list[nn.Module] = []

    def on_a_base() -> nn.Module:
        module = mlp()
        module[0].requires_grad_(False)  # type: ignore[index]
        made.append(module)
        return module

    trainer = TorchTrainer(model=on_a_base, data=digits(200), share="trained")
    learner = Learner(model=on_a_base, share="trained")
    start, base = learner.initial(), learner.base_sha256()
    made.clear()
    with pytest.raises(ModelError, match=f"does not state the base .* expected base_sha256 .* SHA-256 {base}"):
        trainer(make_task(start))
    with pytest.raises(ModelError, match=f"has the SHA-256 {base}; expected the same base on all participants"):
        trainer(make_task(start, base_sha256="0" * 64))
    task = make_task(start, base_sha256=base)
    first = train(trainer, task)
    assert set(first) == {"3.weight", "3.bias"}
    trainer.evaluate(task)
    np.testing.assert_array_equal(train(trainer, make_task(start, base_sha256=base)).buffer, first.buffer)
    assert len(made) == 1
    stopped = make_task(start, base_sha256=base)
    stopped.control.expire()
    with pytest.raises(Cancelled):
        trainer(stopped)
    module = made[0]

    def stop(task: Task) -> TensorDataset:
        module[3].weight.grad = torch.ones(10, 32)  # type: ignore[index] -- as between the batches of a step
        raise Cancelled("SURPLUS")

    object.__setattr__(trainer, "data", stop)
    with pytest.raises(Cancelled):
        trainer(task)
    object.__setattr__(trainer, "data", digits(200))
    np.testing.assert_array_equal(train(trainer, make_task(start, base_sha256=base)).buffer, first.buffer)
    assert len(made) == 1
    with torch.no_grad():
        module[0].weight.mul_(2.0)  # type: ignore[index]
    with pytest.raises(ModelError, match="changed in the training, although it is not trained"):
        trainer(task)
    np.testing.assert_array_equal(train(trainer, make_task(start, base_sha256=base)).buffer, first.buffer)
    assert len(made) == 2  # the base of the first one had changed
