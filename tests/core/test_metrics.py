"""Metrics of evaluations: the numbers of scikit-learn, over any batches, clients, workers and ranks."""

from __future__ import annotations

import dataclasses
import doctest
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

import fedplat.metrics
from fedplat.errors import PluginError, UserCodeError
from fedplat.metrics import (
    F1,
    METRICS,
    R2,
    MeanAbsoluteError,
    Metric,
    Perplexity,
    TopKAccuracy,
    average_metric,
    is_smaller_better,
    perplexity_of,
)
from fedplat.privacy.options import PublishedMetrics
from fedplat.pytorch.training import Learner, Scores
from fedplat.secure_aggregation.messages import SecureAggregation
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from fedplat.testing import check_metric
from support.metrics import BROKEN
from support.simulation.tasks import task, two_layers

RNG = np.random.default_rng(4)
LOGITS = RNG.normal(size=(157, 7)).astype(np.float32)
CLASSES = RNG.integers(0, 5, 157)  # two classes are answers, but never targets
REAL, GUESSED = (RNG.normal(3.0, 1.0, (157, 3)).astype(np.float32) for _ in range(2))
ANSWERS = LOGITS.argmax(1)


def compute(metrics: tuple[Metric, ...], outputs: np.ndarray, targets: np.ndarray, size: int = 10) -> dict[str, float]:
    scores = Scores(Learner(model=nn.Identity).count_answers, metrics)
    for start in range(0, len(targets), size):
        batch = slice(start, start + size)
        scores.add(torch.tensor(0.0), torch.from_numpy(outputs[batch]), torch.from_numpy(targets[batch]))
    return scores.means()


def test_the_numbers_of_scikit_learn() -> None:
    found = compute((F1(), TopKAccuracy(3)), LOGITS, CLASSES)
    assert found["f1"] == pytest.approx(reference.f1_score(CLASSES, ANSWERS, average="macro"))
    assert found["top_3"] == pytest.approx(reference.top_k_accuracy_score(CLASSES, LOGITS, k=3, labels=range(7)))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(CLASSES, ANSWERS))
    found = compute((MeanAbsoluteError(), R2()), GUESSED, REAL)
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(REAL, GUESSED))
    assert found["r2"] == pytest.approx(reference.r2_score(REAL, GUESSED))


@pytest.mark.parametrize(("ignored", "dtype"), [(0, np.int64), (255, np.uint8), (255, np.int64), (-100, np.int64)])
def test_targets_that_the_loss_ignores_do_not_count(ignored: int, dtype: type) -> None:
    targets = np.where(np.arange(157) % 3 == 0, ignored, 1 + CLASSES % 4).astype(dtype)
    learner = Learner(model=nn.Identity, loss=nn.CrossEntropyLoss(ignore_index=ignored))
    scores = learner.make_scores((F1(), TopKAccuracy(1)))
    for start in range(0, 157, 10):
        batch = slice(start, start + 10)
        outputs, chosen = torch.from_numpy(LOGITS[batch]), torch.from_numpy(targets[batch])
        scores.add(learner.batch_loss(outputs, chosen), outputs, chosen)
    found, counts = scores.means(), targets != ignored
    assert found["f1"] == pytest.approx(reference.f1_score(targets[counts], ANSWERS[counts], average="macro"))
    assert found["top_1"] == found["accuracy"] == pytest.approx((targets == ANSWERS)[counts].mean())


def test_a_class_for_each_token() -> None:
    """Outputs [sentences, classes, tokens], as PyTorch's cross entropy expects."""
    outputs = RNG.normal(size=(20, 7, 6)).astype(np.float32)
    targets = RNG.integers(0, 7, (20, 6))
    found = compute((F1(), TopKAccuracy(1)), outputs, targets, 3)
    answers = outputs.argmax(1).ravel()
    assert found["f1"] == pytest.approx(reference.f1_score(targets.ravel(), answers, average="macro"))
    assert found["top_1"] == pytest.approx(found["accuracy"]) == pytest.approx((answers == targets.ravel()).mean())


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (REAL[:, :1] + 1e4, REAL[:, 0] + 1e4),  # one output for a target without that dimension; a large mean
        (np.full(5, 2.0), np.full(5, 2.0)),
        (np.arange(5.0), np.full(5, 0.1)),
    ],
    ids=["exact", "constant", "constant and wrong"],
)
def test_r2_of_special_targets_is_scikit_learns(outputs: np.ndarray, targets: np.ndarray) -> None:
    found = compute((R2(),), outputs, targets, 2)["r2"]
    assert found == pytest.approx(reference.r2_score(targets, outputs.reshape(targets.shape)))


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (F1(), None, None),
        (TopKAccuracy(3), None, None),
        (MeanAbsoluteError(), GUESSED, REAL),
        (R2(), GUESSED[:, :1], REAL[:, 0]),
    ],
)
def test_the_public_checks(metric: Metric, outputs: Any, targets: Any) -> None:
    check_metric(metric, *(None if each is None else torch.from_numpy(each) for each in (outputs, targets)))


def test_every_metric_has_a_row() -> None:
    assert set(METRICS.values()) == {F1, TopKAccuracy, MeanAbsoluteError, Perplexity, R2}
    results = doctest.testmod(fedplat.metrics)
    assert (results.failed, results.attempted) == (0, 4)


@pytest.mark.parametrize(
    ("metric", "outputs", "message"),
    [
        (
            F1(),
            REAL,
            r'"f1": measure\(\) raised ValueError: outputs are \[10, 3\], targets torch.float32 \[10, 3\]; exp',
        ),
        (MeanAbsoluteError(), LOGITS, r"outputs are \[10, 7\], targets \[10, 3\]; expected as many numbers"),
    ],
)
def test_outputs_of_another_kind_of_model_are_refused(metric: Metric, outputs: np.ndarray, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        compute((metric,), outputs, REAL)


def test_more_answers_than_classes_are_refused() -> None:
    with pytest.raises(UserCodeError, match="k = 8: the model has 7 classes; expected at most as many"):
        compute((TopKAccuracy(8),), LOGITS, CLASSES)


@pytest.mark.parametrize("name", ["text for a value", "loss", "no name", "not a dict"])
def test_values_that_are_not_named_numbers_are_refused(name: str) -> None:
    metric, sentence = BROKEN[name]
    with pytest.raises(PluginError) as caught:
        compute((metric,), LOGITS, CLASSES)
    assert sentence in str(caught.value)


def test_two_metrics_with_one_name_are_refused() -> None:
    with pytest.raises(PluginError, match="returned 'top_2', the name of another metric; expected a different name"):
        compute((TopKAccuracy(2), TopKAccuracy(2)), LOGITS, CLASSES)


def test_a_metric_of_python_is_a_frozen_record() -> None:
    class Own:
        measure = compute = None

    own: Any = Own()
    with pytest.raises(PluginError, match=r"is not a frozen record; expected class Own\(msgspec.Struct, frozen=True\)"):
        Learner(model=two_layers, metrics=(own,))


def test_engines_give_the_metrics_of_all_examples() -> None:
    """Also those that divide the test data among their workers."""
    given = task()
    given = given._replace(learner=dataclasses.replace(given.learner, metrics=(F1(), TopKAccuracy(2))))
    model = given.learner.initial()
    alone, shared = LoopEngine(given), ProcessEngine(given, 3)
    try:
        expected = alone.evaluate(model)
        assert expected.keys() == {"loss", "accuracy", "f1", "top_2"}
        assert shared.evaluate(model) == pytest.approx(expected)
        assert shared.evaluate(model)["f1"] == pytest.approx(f1_of_parts(given), abs=1e-9)
        for engine in (alone, shared):
            engine.publish(0, model)
            engine.begin([ClientTask(0, 0, 1), ClientTask(1, 0, 1, scores=True)])
            assert engine.result(ClientTask(1, 0, 1, scores=True)).metrics.keys() == expected.keys()
            assert engine.result(ClientTask(0, 0, 1)).metrics.keys() == {"loss", "accuracy", "local_steps"}
    finally:
        shared.close()


def f1_of_parts(given: ClientTraining) -> float:
    """By scikit-learn, on the whole test data."""
    from fedplat.pytorch import convert

    module = given.learner.model()
    convert.load_into(module, given.learner.initial())
    with torch.no_grad():
        answers = module(torch.from_numpy(given.federation.test_inputs)).argmax(1)
    return float(reference.f1_score(given.federation.test_targets, answers, average="macro"))


def test_smaller_errors_are_better() -> None:
    smaller = ("loss", "distance", "mae", "absolute_error", "perplexity")
    assert all(is_smaller_better(name) for name in smaller)
    assert not any(is_smaller_better(name) for name in ("f1", "accuracy"))


def test_a_perplexity_is_that_of_all_tokens_together() -> None:
    logits = RNG.normal(size=(12, 7, 5)).astype(np.float32)
    tokens = RNG.integers(0, 7, (12, 5))
    tokens[np.arange(12)[:, None] % 4 > np.arange(5)] = -100  # padding, of different lengths
    likelihoods = np.take_along_axis(logits, tokens.clip(0)[:, None], 1)[:, 0] - np.log(np.exp(logits).sum(1))
    counts = tokens >= 0
    assert compute((Perplexity(),), logits, tokens)["perplexity"] == pytest.approx(np.exp(-likelihoods[counts].mean()))
    parts = [slice(0, 2), slice(2, 3), slice(3, 12)]
    values = [
        (counts[part].sum(), compute((Perplexity(),), logits[part], tokens[part])["perplexity"]) for part in parts
    ]
    pooled = average_metric("perplexity", values)
    assert pooled == pytest.approx(np.exp(-likelihoods[counts].mean()), rel=1e-6)
    assert abs(np.average([value for _, value in values], weights=[count for count, _ in values]) - pooled) > 1e-3
    assert average_metric("perplexity", [(1.0, 0.0), (1.0, 1e308)]) > 0.0
    assert perplexity_of(1e6) == {}
    with pytest.raises(
        ValueError, match=r"bounds.perplexity: the mean of perplexities is not the perplexity of all tok"
    ):
        PublishedMetrics(noise_multiplier=1.0, bounds={"perplexity": (1.0, 9.0)})
    with pytest.raises(ValueError, match=r"metrics.perplexity: the mean of perplexities is not"):
        SecureAggregation(metrics={"perplexity": (1.0, 9.0)})
