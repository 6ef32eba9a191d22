"""Learners in simulations: the key `learner`, engines, objects in Python, and no PyTorch where none is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.errors import EngineError, FedplatError, JobFileError, UserCodeError
from fedplat.model import Parameters
from fedplat.simulation.api import simulate
from fedplat.simulation.data import Federation
from fedplat.simulation.scenario.feasible import check_file, check_sums
from fedplat.simulation.scenario.file import SimulationFile, parse
from fedplat.simulation.scenario.options import ModelOptions
from fedplat.sklearn.estimators import CountsFit, GaussianFit, LeastSquaresFit
from fedplat.sklearn.learner import ESTIMATORS
from support.learners import Centroids, read_page

RNG = np.random.default_rng(1)
LABELS = np.arange(90) % 3
INPUTS = RNG.normal(size=(90, 4)) + LABELS[:, None]
PARTS = np.split(np.arange(60), [10, 30])
HELD_OUT = [np.arange(60, 65), np.arange(65, 75), np.arange(75, 90)]
FILES = read_page()
JOB = """
name = "small"
population = "demo"
trainer = "small"
rounds = 2
[model]
initial = "start.safetensors"
[selection]
goal = 3
over_selection = 1.0
"""
SGD = """
[simulation.model]
learner = "sklearn"
estimator = "sklearn.linear_model:SGDClassifier"
features = 4
classes = 3
"""
REGRESSION = """
[simulation.model]
learner = "sklearn"
estimator = "sklearn.linear_model:SGDRegressor"
features = 4
"""


def federation(held_out: bool = False) -> Federation:
    return Federation(INPUTS, LABELS, PARTS, INPUTS[60:], LABELS[60:], held_out=HELD_OUT if held_out else ())


def read(folder: Path, more: str, *changes: str) -> SimulationFile:
    return parse(JOB + more, folder, changes)


def write_start(folder: Path, **shapes: tuple[int, ...]) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    (folder / "start.safetensors").write_bytes(Parameters.from_arrays(arrays).to_bytes())


def test_a_table_without_the_key_is_a_pytorch_module(tmp_path: Path) -> None:
    options = read(tmp_path, '[simulation.model]\nloss = "mse"').simulation.model
    assert (
        options
        == ModelOptions(loss="mse")
        == read(tmp_path, '[simulation.model]\nlearner = "torch"\nloss = "mse"').simulation.model
    )
    assert read(tmp_path, "").simulation.model == ModelOptions()
    with pytest.raises(
        JobFileError, match=r"learner = 'torsh': expected one of torch, sklearn, lightning, huggingface; d"
    ):
        read(tmp_path, '[simulation.model]\nlearner = "torsh"')
    with pytest.raises(JobFileError, match=r"model.loss = 'mae': expected cross_entropy, mse, bce_with_logits, or m"):
        read(tmp_path, '[simulation.model]\nloss = "mae"')
    with pytest.raises(JobFileError, match=r"simulation.model.losss = 'mse': there is no such key; did you mean loss"):
        read(tmp_path, '[simulation.model]\nlosss = "mse"')


@pytest.mark.parametrize("engine", ["processes", "auto"])
@pytest.mark.parametrize("table", [SGD, REGRESSION])
def test_engines_give_equal_results(tmp_path: Path, engine: str, table: str) -> None:
    """`r2` of test data is not the mean of those of its parts, so one process scores all of it."""
    shapes = {"coef_": (3, 4), "intercept_": (3,)} if table is SGD else {"coef_": (4,), "intercept_": (1,)}
    write_start(tmp_path, **shapes)
    federated = '\n[evaluation]\nevery = 1\n[evaluation.clients]\nevaluator = "small"\ngoal = 3\nmin_fraction = 1.0\n'
    runs = [
        simulate(
            read(tmp_path, table + federated, f'simulation.engine="{name}"', "simulation.workers=2"),
            data=federation(held_out=True),
        )
        for name in ("loop", engine)
    ]
    assert runs[0].model is not None
    assert runs[0].model == runs[1].model
    first, second = (run.to_dict()["attempts"] for run in runs)
    assert first == second
    metric = "accuracy" if table is SGD else "r2"
    assert len(runs[0].series(metric).values) == 2


def test_vmap_is_for_pytorch_modules(tmp_path: Path) -> None:
    write_start(tmp_path, coef_=(3, 4), intercept_=(3,))
    with pytest.raises(EngineError, match=r'engine = "vmap": the learner is not a PyTorch module; use "loop"'):
        simulate(read(tmp_path, SGD, 'simulation.engine="vmap"'), data=federation())


def test_an_object_is_a_learner(tmp_path: Path) -> None:
    run = simulate(read(tmp_path, ""), data=federation(), learner=Centroids(features=4, classes=3))
    assert run.model is not None
    means = np.stack([INPUTS[:60][LABELS[:60] == label].mean(0) for label in range(3)])
    np.testing.assert_allclose(run.model["sums"] / run.model["counts"][:, None], means, atol=1e-5)
    assert run.summary.best is not None
    assert run.summary.best.value > 0.5


SUM_FITS = (CountsFit, GaussianFit, LeastSquaresFit)
SUMS = [name for name, each in ESTIMATORS.items() if isinstance(each.fit, SUM_FITS)]
"""The estimators whose models are sums over examples."""
PRIVATE = """
[privacy]
participation = "poisson"
noise_multiplier = 1.0
delta = 1e-5
[updates]
weighting = "uniform"
clip_norm = 1.0
"""
WRONG_FOR_SUMS = {
    '[aggregation]\nrule = "fedadam"\n': r'aggregation.rule = "fedadam": .*expected the rule "fedavg"',
    '[aggregation]\nrule = "fedavgm"\n': 'aggregation.rule = "fedavgm": the model is a sum',
    '[aggregation]\nrule = "fedavg"\nlearning_rate = 0.5\n': "aggregation.learning_rate = 0.5: the model is a sum",
    '[compression]\nuplink = { codec = "quantize" }\n': 'compression.uplink: .*the codec "quantize" would round',
    '[compression]\ndownlink = { codec = "bf16" }\n': 'compression.downlink: .*the codec "bf16" would round',
    PRIVATE: "privacy: .*which noise would make useless",
    '[robust]\nbyzantine = 1\nrule = { name = "median" }\n': "robust: .*which only the mean gives",
    "[updates]\nclip_norm = 1.0\n": "updates.clip_norm: .*a clipped update has the sums of no data",
    "[updates]\nadaptive_clip = {}\n": "updates.adaptive_clip: .*a clipped update",
    '[mode]\nkind = "buffered"\nconcurrency = 3\n': 'mode.kind = "buffered": .*relative to an older version',
}


def table_of(estimator: str) -> str:
    more = "" if "Regression" in estimator or "Ridge" in estimator else "classes = 3\n"
    return f"{REGRESSION.replace('sklearn.linear_model:SGDRegressor', estimator)}{more}total_examples = 60\n"


@pytest.mark.parametrize("wrong", WRONG_FOR_SUMS)
def test_a_model_that_is_a_sum_takes_only_a_mean(tmp_path: Path, wrong: str) -> None:
    job = JOB
    if wrong == PRIVATE:
        sampling = 'close = "deadline"\nsampling = { policy = "poisson", rate = 0.5 }\nwait_for = 3\n'
        job = JOB.replace("over_selection = 1.0\n", sampling)
    for estimator in SUMS:
        file = parse(job + wrong + table_of(estimator), tmp_path)
        with pytest.raises(JobFileError, match=WRONG_FOR_SUMS[wrong]):
            check_file(file)
    with pytest.raises(JobFileError, match=WRONG_FOR_SUMS[wrong]):
        check_sums(parse(job + wrong, tmp_path).job)
    check_file(parse(job + wrong + SGD, tmp_path))


@pytest.mark.parametrize("rule", ["fedadam", "fedavg", "fednova"])
def test_least_squares_are_refused_or_right(tmp_path: Path, rule: str) -> None:
    write_start(tmp_path, products=(5, 5), moments=(5,))
    file = read(tmp_path, f'[aggregation]\nrule = "{rule}"\n{table_of("sklearn.linear_model:LinearRegression")}')
    if rule == "fedadam":
        with pytest.raises(JobFileError, match=r'aggregation.rule = "fedadam": the model is a sum'):
            simulate(file, data=federation())
        return
    found = simulate(file, data=federation()).model
    assert found is not None
    inputs = np.column_stack([INPUTS[:60], np.ones(60)])
    np.testing.assert_allclose(found["products"], inputs.T @ inputs / 60, atol=1e-5)
    np.testing.assert_allclose(found["moments"], inputs.T @ LABELS[:60] / 60, atol=1e-5)


def fail(*arguments: object) -> Any:
    return 1 / 0


def return_three(*arguments: object) -> Any:
    return 3


def return_text(*arguments: object) -> Any:
    return {"loss": "low"}


class Broken:
    """A learner whose functions are replaced."""

    def __init__(self, **replaced: Any) -> None:
        self._inner = Centroids(features=4, classes=3)
        self.initial = replaced.get("initial", self._inner.initial)
        self.train = replaced.get("train", self._inner.train)
        self.evaluate = replaced.get("evaluate", self._inner.evaluate)


@pytest.mark.parametrize(
    ("functions", "changes", "error", "sentence"),
    [
        ({"initial": return_three}, [], JobFileError, r"Broken.initial\(\) returned a int; expected Parameters"),
        ({"initial": fail}, [], UserCodeError, r"Broken.initial\(\) raised ZeroDivisionError"),
        (
            {"train": fail},
            [],
            UserCodeError,
            r"Broken.train\(\) raised ZeroDivisionError: .*line",
        ),
        ({"train": return_three}, [], UserCodeError, "the learner returned a int; expected metrics"),
        ({"train": return_text}, [], FedplatError, "the learner returned the metric 'loss', 'low'"),
        ({}, ["config.partial_work=true"], JobFileError, 'config.partial_work = true: only the learner "torch"'),
        ({}, ['config.dp="flat"'], JobFileError, "config.dp = 'flat': only the learner \"torch\""),
        ({}, ['config.algorithm="fedprox"'], JobFileError, "config.algorithm = 'fedprox': only the learner"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, functions: dict[str, Any], changes: list[str], error: type[FedplatError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        simulate(
            read(tmp_path, "[config]", 'simulation.engine="loop"', *changes),
            data=federation(),
            learner=Broken(**functions),
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('simulation.model.estimator="sklearn.tree:Tree"', "^simulation.model: estimator = 'sklearn.tree:Tree': "),
        ("simulation.model.options={los=1}", "^simulation.model: options.los: SGDClassifier has no such parameter"),
        ("simulation.model.features=5", r"^model.initial = 'start.safetensors' does not fit the learner Sklearn"),
        ("config.momentum=0.9", "^config.momentum = 0.9: there is no such key; known keys: batch_size, epochs"),
        ("simulation.model.classes=1", "^simulation.model.classes = 1: expected"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(tmp_path: Path, change: str, sentence: str) -> None:
    write_start(tmp_path, coef_=(3, 4), intercept_=(3,))
    with pytest.raises(JobFileError, match=sentence):
        simulate(read(tmp_path, SGD, change), data=federation())


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
from fedplat.errors import MissingExtraError
from fedplat.simulation import simulate

for engine in ("loop", "processes", "auto"):
    run = simulate("digits.toml", {"simulation.engine": engine, "rounds": 2})
    print(run.result.status, len(run.model))
assert "torch" not in sys.modules
for model in ("{}", '{ learner = "lightning", module = "a:b" }'):
    try:
        simulate("digits.toml", [f"simulation.model={model}"])
    except MissingExtraError as exc:
        print(exc)
"""


@pytest.mark.slow
def test_scikit_learn_needs_no_pytorch(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["COMPLETED 2"] * 3
    assert lines[3].startswith("training needs PyTorch; install it with: pip install 'safetensors>=")
    assert lines[4].startswith("PyTorch is not installed; install it with")
