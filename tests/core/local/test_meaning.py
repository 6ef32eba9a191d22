"""Accuracies and losses: only from what is known about a module's outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.job import Selection
from fedplat.metrics import F1
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from fedplat.pytorch.training.meaning import CountClasses
from fedplat.pytorch.vectorized.batched import CohortTrainer, PartExamples
from fedplat.pytorch.vectorized.trainer import FlatTrainer
from fedplat.simulation import SimulationOptions, make_job, simulate
from fedplat.simulation.data import Federation
from fedplat.simulation.scenario.file import of_records
from fedplat.simulation.scenario.options import ModelOptions
from fedplat.simulation.setup import prepare
from fedplat_client import Task
from fedplat_client.trainers.torch import TorchTrainer

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(60, 4)).astype(np.float32)
LABELS = (INPUTS @ [1.0, -2.0, 0.5, 1.0] > 0.8).astype(np.int64)
TOKENS = RNG.integers(0, 5, (60, 5))  # as many tokens as words: nothing shows which dimension the words are in
CONFIG = {"epochs": 1, "batch_size": 7, "learning_rate": 0.1}


def one_logit() -> nn.Module:
    return nn.Linear(4, 1)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 5))


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(inputs["x"] if isinstance(inputs, dict) else inputs)}


def binary(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())


def over_words(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), targets)


def of_distances(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(-outputs, targets)


def of_logits(outputs: Mapping[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"], targets)


def run(learner: Learner, inputs: Any, targets: Any, engine: str) -> tuple[dict[str, float], Any]:
    parts, tests = np.array_split(np.arange(40), 2), slice(40, 60)
    job = make_job(None, rounds=1, selection=Selection(goal=2, over_selection=1.0), config=CONFIG)
    found = simulate(
        job,
        SimulationOptions(engine=engine),  # pyright: ignore[reportArgumentType]
        data=Federation(inputs, targets, parts, inputs[tests], targets[tests]),
        learner=learner,
        progress=False,
    )
    return dict(found.result.rounds[-1].evaluation), found.model


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_loss_of_the_owner_has_the_accuracy_that_the_owner_defines(engine: str) -> None:
    silent, _ = run(Learner(model=one_logit, loss=binary), INPUTS, LABELS, engine)
    assert "accuracy" not in silent
    learner = Learner(
        model=one_logit, loss=binary, accuracy=lambda outputs, targets: (outputs.squeeze(1) > 0) == (targets > 0)
    )
    told, model = run(learner, INPUTS, LABELS, engine)
    answers = (INPUTS[40:] @ model["weight"].T + model["bias"])[:, 0] > 0
    assert told["accuracy"] == pytest.approx((answers == LABELS[40:]).mean())
    assert told["loss"] == silent["loss"]


def test_words_in_the_last_dimension() -> None:
    silent, _ = run(Learner(model=words, loss=over_words), TOKENS, TOKENS, "loop")
    assert set(silent) == {"loss"}
    learner = Learner(
        model=words,
        loss=over_words,
        accuracy=lambda outputs, targets: (outputs.argmax(2) == targets)[targets != 0],  # 0 is padding
    )
    told, model = run(learner, TOKENS, TOKENS, "loop")
    right = model["0.weight"][TOKENS[40:]].argmax(2) == TOKENS[40:]
    assert told["accuracy"] == pytest.approx(right[TOKENS[40:] != 0].mean())


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_ignored_targets_do_not_count(engine: str) -> None:
    labels = np.where(np.arange(60) % 3 == 0, -100, LABELS)
    told, model = run(Learner(model=lambda: nn.Linear(4, 2)), INPUTS, labels, engine)
    right = (INPUTS[40:] @ model["weight"].T + model["bias"]).argmax(1) == labels[40:]
    assert told["accuracy"] == pytest.approx(right[labels[40:] >= 0].mean())


@pytest.mark.parametrize(
    ("loss", "has_accuracy"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), True),
        (functools.partial(functional.cross_entropy, label_smoothing=0.1), True),
        (of_distances, False),
        (nn.MSELoss(), False),
    ],
)
def test_only_losses_of_classes_say_what_the_answers_are(loss: Callable[..., torch.Tensor], has_accuracy: bool) -> None:
    assert (Learner(model=one_logit, loss=loss).count_answers is not None) == has_accuracy


@pytest.mark.parametrize("loss", [functional.mse_loss, nn.L1Loss(), functional.huber_loss])
def test_one_output_and_one_target_are_compared_with_each_other(loss: Callable[..., torch.Tensor]) -> None:
    learner, outputs, targets = Learner(model=one_logit, loss=loss), torch.arange(4.0)[:, None], torch.arange(4)
    assert learner.batch_loss(outputs, targets).item() == 0.0
    with pytest.raises(ModelError, match=r"outputs \[4, 1\] for targets \[3\]"):
        learner.batch_loss(outputs, targets[:3])


@pytest.mark.parametrize(
    "loss", [nn.PoissonNLLLoss(), nn.SoftMarginLoss(), functional.hinge_embedding_loss, nn.HingeEmbeddingLoss()]
)
def test_each_output_of_one_column_has_its_own_target(loss: Callable[..., torch.Tensor]) -> None:
    outputs, targets = torch.linspace(-1.0, 2.0, 4)[:, None], torch.tensor([1.0, -1.0, 1.0, -1.0])
    expected = loss(outputs, targets[:, None])
    assert torch.equal(Learner(model=one_logit, loss=loss).batch_loss(outputs, targets), expected)


def test_whole_numbers_are_targets_of_losses_of_numbers() -> None:
    outputs, targets = torch.zeros(4, 1), torch.tensor([0, 1, 1, 0])
    found = Learner(model=one_logit, loss=nn.BCEWithLogitsLoss()).batch_loss(outputs, targets)
    assert found.item() == pytest.approx(np.log(2.0))


def by_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs, targets)


def by_difference(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def by_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (targets.float() - outputs).abs().mean()


@pytest.mark.parametrize("loss", [by_function, by_difference, by_error])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_the_owner_does_not_compare_each_with_each(loss: Callable[..., torch.Tensor]) -> None:
    outputs, targets = torch.arange(4.0)[:, None].requires_grad_(), torch.arange(4.0)
    with pytest.raises(ModelError, match=r"\[4.*\] with targets \[4.*\], each with each"):
        Learner(model=one_logit, loss=loss).batch_loss(outputs, targets)
    learner = Learner(model=one_logit, loss=loss)
    assert learner.batch_loss(outputs, targets[:, None]).item() == 0.0
    assert learner.batch_loss(outputs[:, 0], targets).item() == 0.0


COMPARED: list[Callable[[Any, Any], Any]] = [
    lambda o, t: ((o["y"] - t) ** 2).mean(),
    lambda o, t: (o["y"].sigmoid() - t).abs().mean(),
    lambda o, t: (2 * o["y"] + -t.float()).abs().mean(),
    lambda o, t: ((1 - t) * functional.logsigmoid(-o["y"])).mean(),
    lambda o, t: functional.pairwise_distance(o["y"], t).mean(),
    lambda o, t: functional.gaussian_nll_loss(o["y"], t, torch.ones(4, 1)),
]


@pytest.mark.parametrize("loss", COMPARED)
def test_what_is_computed_from_outputs_is_not_compared_each_with_each(loss: Callable[..., Any]) -> None:
    outputs, targets = {"y": torch.ones(4, 1).requires_grad_()}, torch.arange(4.0)
    with pytest.raises(ModelError, match=r"\[4.*\] with targets \[4.*\], each with each"):
        Learner(model=one_logit, loss=loss).batch_loss(outputs, targets)
    Learner(model=one_logit, loss=loss).batch_loss(outputs, targets[:, None])
    wide = {"y": torch.ones(4, 4).requires_grad_()}  # as many columns as examples
    Learner(model=one_logit, loss=loss).batch_loss(wide, targets)


def test_distances_of_pairs_may_compare_each_with_each() -> None:
    def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        apart = targets[:, None] != targets[None]
        return (apart * (outputs - outputs.T)).mean() + functional.mse_loss(outputs, outputs.detach())

    assert Learner(model=one_logit, loss=pairs).batch_loss(torch.ones(4, 1), torch.arange(4)).item() == 0.0

    def all_pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        centers = torch.zeros(4)
        scores = outputs.sigmoid() * centers + outputs[:, 0].exp().unsqueeze(1) * targets  # each with each is meant
        return scores.mean() + (targets.float() @ outputs.exp()).mean()

    assert Learner(model=one_logit, loss=all_pairs).batch_loss(torch.zeros(4, 1), torch.zeros(4)).item() == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(reduction="none"),
        functools.partial(functional.cross_entropy, reduction="sum"),
    ],
)
def test_a_sum_is_not_reported_as_a_mean(loss: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"has reduction = '(sum|none)'; expected \"mean\""):
        Learner(model=one_logit, loss=loss)


WEIGHTS = torch.tensor([1.0, 5.0, 0.5])
PADDED = torch.from_numpy(np.where(np.arange(60) < 24, -100, RNG.integers(0, 3, 60)))  # batches of padding alone, too
ZEROS = torch.from_numpy(np.where(np.arange(60) < 24, 0, RNG.integers(1, 3, 60)))


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (functional.cross_entropy, PADDED),
        (nn.CrossEntropyLoss(ignore_index=0), ZEROS),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), PADDED),
        (functools.partial(functional.cross_entropy, weight=WEIGHTS, ignore_index=0), ZEROS),
    ],
)
@pytest.mark.parametrize("accuracy", ["auto", "none"])
def test_a_loss_over_targets_that_count_is_that_of_all_examples_at_once(
    loss: Callable[..., torch.Tensor], targets: torch.Tensor, accuracy: Any
) -> None:
    learner = Learner(model=lambda: nn.Linear(4, 3), loss=loss, accuracy=accuracy)
    inputs, trainee, model = torch.from_numpy(INPUTS), Trainee(learner), learner.initial()
    trainee.load(model, ClientState())
    expected = pytest.approx(loss(trainee.module(inputs), targets).item())
    examples = TensorExamples(inputs, targets)
    assert [trainee.evaluate(examples, size).means()["loss"] for size in (1, 6, 7, 60)] == [expected] * 4
    options = LocalOptions.from_config({"epochs": 1, "batch_size": 6, "learning_rate": 1e-12})
    parts = PartExamples(inputs, targets, np.arange(60))
    work = LocalTraining(examples=parts, options=options, seed=1)
    flat, stacked = FlatTrainer(Trainee(learner), options), CohortTrainer(Trainee(learner), options)
    assert train(trainee, model.copy(), work)["loss"] == expected
    assert flat.train(flat.base(model), work)[1]["loss"] == expected
    assert [each["loss"] for _, each in stacked.train(stacked.base(model), [work, work])] == [expected] * 2


def test_padding_alone_has_no_loss() -> None:
    learner = Learner(model=lambda: nn.Linear(4, 3))
    examples = TensorExamples(torch.from_numpy(INPUTS), PADDED[:1].expand(60))
    model = learner.initial()
    work = LocalTraining(examples=examples, options=LocalOptions.from_config(CONFIG), seed=1)
    assert "loss" not in train(Trainee(learner), model, work)
    assert model == learner.initial()
    before = LocalTraining(
        examples=examples, options=LocalOptions.from_config({**CONFIG, "measure_before": True}), seed=1
    )
    with pytest.raises(ModelError, match="the loss ignores the targets of all examples"):
        train(Trainee(learner), model, before)


def test_small_types_of_classes_are_not_padding() -> None:
    outputs, targets = torch.eye(200)[[156, 3]], torch.tensor([156, 3], dtype=torch.uint8)
    counted = CountClasses()(outputs, targets)
    assert counted is not None
    assert [int(each) for each in counted] == [2, 2]


def test_a_loss_is_one_number_that_depends_on_the_outputs() -> None:
    outputs, targets = torch.ones(4, 1, requires_grad=True), torch.zeros(4)
    results: list[tuple[Any, str]] = [
        (outputs[:, 0], r"a tensor \[4\]"),
        (1.0, "a float"),
        ((outputs.mean(), 1), "a tuple"),
        (outputs.detach().mean(), "no gradient"),
    ]
    for result, words in results:

        def loss(outputs: torch.Tensor, targets: torch.Tensor, result: Any = result) -> Any:
            return result

        with pytest.raises(ModelError, match=words):
            Learner(model=one_logit, loss=loss).batch_loss(outputs, targets)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.tensor([1, 2]), "targets are 1 to 2; expected the classes 0 to 1"),
        (torch.tensor([0, -1]), "targets are -1 to 0"),
        (torch.tensor([[0], [1]]), r"targets torch.int64 \[2, 1\]; expected whole numbers \[2\]"),
        (torch.tensor([0.0, 1.0]), r"targets torch.float32 \[2\]; expected whole numbers \[2\]"),
    ],
)
def test_targets_that_are_no_classes_are_named(targets: torch.Tensor, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Learner(model=one_logit).batch_loss(torch.zeros(2, 2), targets)


def test_dicts_as_inputs_and_outputs() -> None:
    rows = [({"x": row}, label) for row, label in zip(torch.from_numpy(INPUTS), LABELS.tolist(), strict=True)]

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> Any:
            return rows[index]

    def correct(outputs: Mapping[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return outputs["logits"].argmax(1) == targets

    trainer = TorchTrainer(model=ByName, data=Rows(), loss=of_logits, accuracy=correct, device="cpu")
    task = Task(name="t", parameters=Learner(model=ByName).initial(), config=CONFIG)
    assert trainer(task).metrics["accuracy"] >= 0.0
    model = task.parameters
    right = (INPUTS @ model["layer.weight"].T + model["layer.bias"]).argmax(1) == LABELS
    assert trainer.evaluate(task).metrics["accuracy"] == pytest.approx(right.mean())
    assert set(run(Learner(model=ByName, loss=of_logits), INPUTS, LABELS, "loop")[0]) == {"loss"}


def test_what_cannot_be_understood_is_an_error_in_words() -> None:
    task = Task(name="t", parameters=Learner(model=ByName).initial(), config=CONFIG)
    data = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    with pytest.raises(ModelError, match=r"returned a dict, and cross_entropy takes a tensor"):
        TorchTrainer(model=ByName, data=data, device="cpu")(task)
    with pytest.raises(ModelError, match=r'accuracy = "classes": the module returned a dict'):
        TorchTrainer(model=ByName, data=data, loss=of_logits, accuracy="classes", device="cpu")(task)
    numbers = Learner(model=ByName, loss=of_logits, accuracy=lambda outputs, targets: targets)
    assert numbers.count_answers is not None
    with pytest.raises(ModelError, match=r"returned torch.int64; expected a tensor of booleans"):
        numbers.count_answers({}, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="accuracy = 'best': expected \"auto\""):
        Learner(model=ByName, accuracy="best")  # pyright: ignore[reportArgumentType]


def test_metrics_of_classes_refuse_one_logit() -> None:
    with pytest.raises(ValueError, match="at least 2 classes"):
        F1().measure(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    measured = F1().measure(torch.eye(3), torch.tensor([0, 1, -100]))
    assert torch.as_tensor(measured["real"]).tolist() == [1, 1, 0]
    padding = {name: np.zeros(3) for name in ("hits", "found", "real")}
    assert F1().compute(padding) == {}


def test_a_simulation_says_that_there_is_no_accuracy() -> None:
    data = Federation(INPUTS, LABELS, [np.arange(40)], INPUTS[40:], LABELS[40:])
    job = make_job(None, rounds=1, selection=Selection(goal=1, over_selection=1.0), config=CONFIG)
    for learner, words in (
        (Learner(model=one_logit, loss=binary), ["there is no accuracy"]),
        (Learner(model=one_logit, loss=binary, accuracy="none"), []),
        (Learner(model=one_logit, loss=nn.MSELoss()), []),
    ):
        told: list[str] = []
        with prepare(of_records(job, SimulationOptions()), data, learner, told.append):
            pass
        assert [each.partition(",")[0] for each in told] == words


def test_the_accuracy_of_a_simulation_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Linear(4, 1)\n"
        "def correct(outputs, targets): return (outputs[:, 0] > 0) == (targets > 0)\n"
    )
    options = ModelOptions(module="own:net", loss="mse", accuracy="own:correct")
    learner = options.build(tmp_path)
    assert learner.count_answers is not None
    hits, answers = learner.count_answers(torch.tensor([[1.0], [-1.0], [2.0]]), torch.tensor([1, 1, 0]))
    assert (int(hits), int(answers)) == (1, 3)
    assert ModelOptions(module="own:net", loss="mse").build(tmp_path).count_answers is None
    with pytest.raises(ValueError, match="accuracy = 'best': expected auto, classes, none, or module"):
        ModelOptions(accuracy="best")
