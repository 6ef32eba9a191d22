"""scikit-learn's estimators as learners: against those that scikit-learn fits itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sklearn import linear_model, naive_bayes

from fedplat.errors import DataError, JobFileError, ModelError
from fedplat.model import Parameters
from fedplat.sklearn import SklearnLearner
from fedplat.testing import check_learner

RNG = np.random.default_rng(8)
FEATURES, CLASSES = 5, 3
LABELS = RNG.permutation(np.arange(128) % CLASSES)
# Eighths: their sums and squares are exact in float32.
INPUTS = np.round(8 * (RNG.normal(size=(128, FEATURES)) + LABELS[:, None])) / 8
NUMBERS = INPUTS @ np.array([1.0, -2.0, 0.5, 0.0, 3.0]) + 4.0
SIZES = (16, 64, 32, 16)
"""Examples of the clients: powers of two, whose quotients are exact."""
PARTS = np.split(np.argsort(LABELS, kind="stable"), np.cumsum(SIZES)[:-1])
"""Sorted by label: no client has examples of all classes."""


def make(estimator: str, **options: Any) -> SklearnLearner:
    regression = estimator.endswith(("Regressor", "Regression", "Ridge")) and "Logistic" not in estimator
    return SklearnLearner(
        estimator=f"sklearn.{estimator}",
        features=FEATURES,
        classes=[] if regression else CLASSES,
        options=options,
        total_examples=len(LABELS),
    )


def average(learner: SklearnLearner, inputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> Parameters:
    """One round of federated averaging, as the server computes it: in float32."""
    start = learner.initial(0)
    total = np.zeros(start.schema.num_floating, np.float32)
    for part in PARTS:
        model = start.copy()
        learner.train(model, (inputs[part], targets[part]), {}, seed=1)
        total += np.float32(len(part)) * model.minus(start).to_vector()
    return start.plus(total / np.float32(len(targets)))


ALL = [
    ("linear_model:SGDClassifier", {"loss": "log_loss"}, {"epochs": 2, "learning_rate": 0.1}),
    ("linear_model:SGDClassifier", {}, {}),
    ("linear_model:SGDRegressor", {}, {"epochs": 3, "learning_rate": 0.01, "batch_size": 7}),
    ("linear_model:Perceptron", {}, {"learning_rate": 0.5}),
    ("linear_model:LogisticRegression", {}, {"epochs": 3}),
    ("linear_model:LinearRegression", {}, {}),
    ("linear_model:Ridge", {"alpha": 2.0}, {}),
    ("neural_network:MLPClassifier", {"hidden_layer_sizes": [8]}, {"epochs": 2, "batch_size": 16}),
    ("neural_network:MLPRegressor", {"solver": "sgd"}, {"epochs": 2, "batch_size": 16, "learning_rate": 0.01}),
    ("naive_bayes:GaussianNB", {}, {}),
    ("naive_bayes:MultinomialNB", {}, {}),
    ("naive_bayes:BernoulliNB", {}, {}),
]


@pytest.mark.parametrize(("estimator", "options", "config"), ALL)
def test_every_estimator_keeps_the_contract(estimator: str, options: dict[str, Any], config: dict[str, Any]) -> None:
    learner = make(estimator, **options).build()
    inputs = np.abs(INPUTS) if "Multinomial" in estimator else INPUTS
    check_learner(learner, (inputs, LABELS if learner.classes else NUMBERS), config)
    part = PARTS[0]  # of one or two classes only
    check_learner(learner, (inputs[part], LABELS[part] if learner.classes else NUMBERS[part]), config)


def test_gaussian_naive_bayes_is_exactly_that_of_the_pooled_data() -> None:
    learner = make("naive_bayes:GaussianNB")
    model = average(learner, INPUTS, LABELS)
    expected = naive_bayes.GaussianNB().fit(INPUTS, LABELS)
    found = learner.restore(model)
    assert np.array_equal(model["counts"], np.bincount(LABELS) / 128)  # bit for bit
    assert np.array_equal(model["sums"], np.stack([INPUTS[c == LABELS].sum(0) for c in range(3)]) / 128)
    np.testing.assert_allclose(found.theta_, expected.theta_, rtol=1e-12)
    np.testing.assert_allclose(found.var_, expected.var_, rtol=1e-12)
    np.testing.assert_allclose(found.predict_proba(INPUTS), expected.predict_proba(INPUTS), rtol=1e-9)
    assert np.array_equal(found.predict(INPUTS), expected.predict(INPUTS))


@pytest.mark.parametrize("kind", [naive_bayes.MultinomialNB, naive_bayes.BernoulliNB])
def test_other_naive_bayes_are_exactly_those_of_the_pooled_data(kind: type[Any]) -> None:
    inputs = np.abs(INPUTS)
    options: dict[str, Any] = {"alpha": 0.7, **({"binarize": 0.5} if kind is naive_bayes.BernoulliNB else {})}
    learner = make(f"naive_bayes:{kind.__name__}", **options)
    found, expected = learner.restore(average(learner, inputs, LABELS)), kind(**options).fit(inputs, LABELS)
    np.testing.assert_allclose(found.feature_count_, expected.feature_count_, rtol=1e-12)
    np.testing.assert_allclose(found.feature_log_prob_, expected.feature_log_prob_, rtol=1e-12)
    np.testing.assert_allclose(found.class_log_prior_, expected.class_log_prior_, rtol=1e-12)
    np.testing.assert_allclose(found.predict_proba(inputs), expected.predict_proba(inputs), rtol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ("LinearRegression", {}),
        ("LinearRegression", {"fit_intercept": False}),
        ("Ridge", {"alpha": 5.0}),
        ("Ridge", {"alpha": 5.0, "fit_intercept": False}),
    ],
)
def test_least_squares_are_those_of_the_pooled_data(estimator: str, options: dict[str, Any]) -> None:
    learner = make(f"linear_model:{estimator}", **options)
    expected = getattr(linear_model, estimator)(**options).fit(INPUTS, NUMBERS)
    found = learner.restore(average(learner, INPUTS, NUMBERS))
    np.testing.assert_allclose(found.coef_, expected.coef_, atol=1e-5)
    np.testing.assert_allclose(found.intercept_, expected.intercept_, atol=1e-5)
    np.testing.assert_allclose(found.predict(INPUTS), expected.predict(INPUTS), atol=1e-4)


def test_steps_of_sgd_are_those_of_logistic_regression() -> None:
    """A reference in NumPy: w -= η (σ(w x + b) - y) x for each example in turn, of two classes, without a penalty."""
    targets = (LABELS > 0).astype(np.int64)
    learner = SklearnLearner(
        estimator="sklearn.linear_model:SGDClassifier",
        features=FEATURES,
        classes=2,
        options={"loss": "log_loss", "alpha": 0.0},
    )
    model = learner.initial(0)
    assert {name: values.shape for name, values in model.items()} == {"coef_": (1, FEATURES), "intercept_": (1,)}
    learner.train(model, (INPUTS, targets), {"learning_rate": 0.1}, seed=4)
    weights, bias = np.zeros(FEATURES), 0.0
    for index in np.random.default_rng([4, 0]).permutation(len(targets)):
        error = 1 / (1 + np.exp(-(weights @ INPUTS[index] + bias))) - targets[index]
        weights, bias = weights - 0.1 * error * INPUTS[index], bias - 0.1 * error
    np.testing.assert_allclose(model["coef_"][0], weights, rtol=1e-4)
    np.testing.assert_allclose(model["intercept_"][0], bias, rtol=1e-4)


def test_logistic_regression_continues_from_the_received_weights() -> None:
    learner = make("linear_model:LogisticRegression", tol=1e-9)
    model = learner.initial(0)
    losses = [learner.train(model, (INPUTS, LABELS), {"epochs": epochs}, seed=0)["loss"] for epochs in (2, 2, 100)]
    expected = linear_model.LogisticRegression(tol=1e-9, max_iter=1000).fit(INPUTS, LABELS)
    np.testing.assert_allclose(model["coef_"], expected.coef_, atol=1e-3)
    assert losses == sorted(losses, reverse=True)


def test_metrics_are_those_of_their_definitions() -> None:
    from sklearn.metrics import accuracy_score, hinge_loss, log_loss, r2_score

    data = (INPUTS, LABELS)
    bayes, margins, line = make("naive_bayes:GaussianNB"), make("linear_model:Perceptron"), make("linear_model:Ridge")
    models = [average(bayes, *data), average(margins, *data), average(line, INPUTS, NUMBERS)]
    found = bayes.evaluate(models[0], data)
    fitted = bayes.restore(models[0])
    np.testing.assert_allclose(found["loss"], log_loss(LABELS, fitted.predict_proba(INPUTS)), rtol=1e-9)
    assert found["accuracy"] == accuracy_score(LABELS, fitted.predict(INPUTS))
    decisions = margins.restore(models[1]).decision_function(INPUTS)
    np.testing.assert_allclose(margins.evaluate(models[1], data)["loss"], hinge_loss(LABELS, decisions), rtol=1e-9)
    predicted = line.restore(models[2]).predict(INPUTS)
    np.testing.assert_allclose(line.evaluate(models[2], (INPUTS, NUMBERS))["r2"], r2_score(NUMBERS, predicted))


def test_labels_may_be_any_integers_or_texts() -> None:
    names = np.array(["cat", "dog", "owl"])
    first, second = (
        SklearnLearner(estimator="sklearn.naive_bayes:GaussianNB", features=FEATURES, classes=classes)
        for classes in ([7, 3, 9], names.tolist())
    )
    for learner, targets in ((first, np.array([3, 7, 9])[LABELS]), (second, names[LABELS])):
        model = average(learner, INPUTS, targets)
        assert np.array_equal(learner.restore(model).predict(INPUTS[:5]), targets[:5])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"estimator": "sklearn.tree:DecisionTreeClassifier"},
            r"arrays that can be averaged, so expected one of sklearn",
        ),
        ({"estimator": "sklearn.linear_model:SGDClasifier"}, r"did you mean sklearn.linear_model:SGDClassifier\?"),
        ({"classes": []}, "is a classifier; expected its labels"),
        ({"classes": [1]}, "at least two"),
        ({"options": {"los": "hinge"}}, "options.los: SGDClassifier has no such parameter"),
        ({"options": {"loss": "none"}}, "The 'loss' parameter of SGDClassifier must be"),
        ({"options": {"average": True}}, "options.average = true: the mean over clients takes its place"),
        ({"options": {"random_state": 1}}, "options.random_state = 1: the seed of the simulation"),
        ({"estimator": "sklearn.linear_model:Ridge", "classes": []}, "total_examples = 0: .* the number of examples"),
        ({"estimator": "sklearn.linear_model:LinearRegression"}, "predicts numbers; leave the key out"),
        (
            {"estimator": "sklearn.neural_network:MLPClassifier", "options": {"solver": "lbfgs"}},
            'solver = "lbfgs" makes no steps',
        ),
        (
            {"estimator": "sklearn.linear_model:LogisticRegression", "options": {"solver": "liblinear"}, "classes": 2},
            'solver = "liblinear" cannot continue',
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"estimator": "sklearn.linear_model:SGDClassifier", "features": 4, "classes": 3}
    with pytest.raises(JobFileError, match=sentence):
        SklearnLearner(**{**given, **changes}).build()


def test_data_configuration_and_models_that_do_not_fit_are_refused() -> None:
    learner = make("linear_model:SGDClassifier")
    model = learner.initial(0)
    with pytest.raises(DataError, match="an example has 2 inputs; expected features, 5"):
        learner.train(model, (INPUTS[:, :2], LABELS), {}, 0)
    with pytest.raises(DataError, match="the label 5; expected one of the classes 0, 1, 2"):
        learner.train(model, (INPUTS, LABELS + 5), {}, 0)
    with pytest.raises(DataError, match="hold NaN"):
        learner.train(model, (INPUTS * np.nan, LABELS), {}, 0)
    with pytest.raises(
        JobFileError, match=r"config.momentum = 0.9: there is no such key; known keys: batch_size, epochs"
    ):
        learner.train(model, (INPUTS, LABELS), {"momentum": 0.9}, 0)
    with pytest.raises(DataError, match="has diverged"):
        learner.train(model, (INPUTS * 1e30, LABELS), {"learning_rate": 1e20}, 0)
    foreign = Parameters.from_arrays({"coef_": np.zeros((3, 9), "f4"), "intercept_": np.zeros(3, "f4")})
    for use in (lambda: learner.train(foreign, (INPUTS, LABELS), {}, 0), lambda: learner.restore(foreign)):
        with pytest.raises(ModelError, match=r"does not fit sklearn\.linear_model:SGDClassifier"):
            use()


@pytest.mark.parametrize("missing", [[], [1], [0, 1]])
def test_balanced_class_weights_of_a_client_without_all_classes(missing: list[int]) -> None:
    part = np.flatnonzero(~np.isin(LABELS, missing))[10:70]
    data = INPUTS[part], LABELS[part]
    present, counts = np.unique(LABELS[part], return_counts=True)
    weights = {int(label): 60 / len(present) / int(count) for label, count in zip(present, counts, strict=True)}
    weights |= dict.fromkeys(missing, 1.0)  # of no example
    models: list[Parameters] = []
    learner = make("linear_model:LogisticRegression")
    for class_weight in ("balanced", weights):
        learner = make("linear_model:LogisticRegression", class_weight=class_weight)
        models.append(learner.initial(0))
        learner.train(models[-1], data, {"epochs": 200}, seed=1)
    if len(present) == 1:  # its probability grows as long as the solver runs
        assert learner.evaluate(models[0], data)["accuracy"] == 1.0
        return
    np.testing.assert_allclose(models[0]["coef_"], models[1]["coef_"], atol=1e-4)
    assert np.abs(models[0]["coef_"]).max() > 0.1
    if not missing:
        expected = linear_model.LogisticRegression(class_weight="balanced", max_iter=200).fit(*data)
        np.testing.assert_allclose(models[0]["coef_"], expected.coef_, atol=1e-3)
