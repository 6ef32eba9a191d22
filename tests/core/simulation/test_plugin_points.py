"""Staleness weights, fleet models, engines and metrics from a file of the researcher."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli.app import app
from fedplat.config.plugins import Plugins, name_of
from fedplat.errors import DataError, JobFileError, NoProgressError, PluginError, UserCodeError
from fedplat.metrics import Metric
from fedplat.simulation.api import simulate
from fedplat.simulation.engines.registry import LoopOptions
from fedplat.simulation.run_folder import RunFolderOptions
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.options import ModelOptions
from support.cli.runner import CliRunner
from support.simulation.runs import write_digits

PLUGINS = '''
import msgspec
import numpy as np

class Root(msgspec.Struct, frozen=True):
    """1/(1 + age)^power, as the built-in polynomial."""

    power: float = 0.5

    def weight(self, staleness):
        return (1.0 + staleness) ** -self.power

class Bad(msgspec.Struct, frozen=True):
    """Returns what it is told."""

    value: str

    def weight(self, staleness):
        return {"late": 1.0 - staleness, "text": "1"}[self.value]

    def draw(self, count, rng):
        return {"zeros": np.zeros(count), "short": np.ones(3)}[self.value]

    def build(self, *arguments):
        return {"none": None, "self": self}[self.value]

    def spells(self, clients, at):
        return at, at

class Doubled(msgspec.Struct, frozen=True):
    low: float

    def draw(self, count, rng):
        return 2.0 * rng.uniform(self.low, 2.0 * self.low, count)

class Late(msgspec.Struct, frozen=True):
    """Online in the last part of each hour."""

    minutes: float = 30.0

    def build(self, num_clients, rng):
        return Model(self.minutes * 60.0)

class Model:
    def __init__(self, lasts_s):
        self.lasts_s = lasts_s

    def spells(self, clients, at):
        end = np.floor(at / 3600.0) * 3600.0 + 3600.0
        return end - self.lasts_s, end

class Loop(msgspec.Struct, frozen=True):
    note: str = ""

    def build(self, task, num_workers):
        from fedplat.simulation.engines.processes import LoopEngine

        return LoopEngine(task)

class Failing(msgspec.Struct, frozen=True):
    how: str

    def build(self):
        from fedplat.aggregate import server_optimizer, weighted_mean

        def update(state, mean):
            if self.how == "raises":
                raise KeyError("momentum")
            return mean * np.float32("nan"), state

        return server_optimizer(lambda size: {}, update)(weighted_mean())

class Sure(msgspec.Struct, frozen=True):
    """The fraction of examples whose class has more than a probability."""

    above: float = 0.5

    def measure(self, outputs, targets):
        return {"sure": (outputs.softmax(1).max(1).values > self.above).sum(), "all": len(targets)}

    def compute(self, totals):
        return {"sure": totals["sure"] / totals["all"]}
'''
FAST: dict[str, object] = {"rounds": 3, "mode.kind": "buffered", "mode.concurrency": 12, "simulation.engine": "loop"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(PLUGINS)
    return tmp_path


def model_bytes(path: Path, changes: dict[str, object]) -> bytes:
    run = simulate(path, changes)
    assert run.model is not None
    return run.model.to_bytes()


def test_own_staleness_weights_and_engines_give_the_bits_of_the_same_built_in_ones(folder: Path) -> None:
    path = write_digits(folder)
    known = model_bytes(path, FAST)
    own = {
        "mode.staleness.kind": "own.py:Root",
        "mode.staleness.power": 0.5,
        "mode.max_staleness": 100,
        "simulation.engine": "own.py:Loop",
    }
    assert model_bytes(path, {**FAST, **own}) == known
    assert model_bytes(path, {**FAST, **own, "mode.staleness.power": 20.0}) != known


def test_own_fleet_models_shape_the_run(folder: Path) -> None:
    path = write_digits(folder)
    changes: dict[str, object] = {
        "rounds": 2,
        "simulation.engine": "loop",
        "simulation.fleet.speed": {"kind": "own.py:Doubled", "low": 10.0},
        "simulation.fleet.availability": {"kind": "own.py:Late", "minutes": 10.0},
    }
    run, again = simulate(path, changes), simulate(path, changes)
    assert name_of(run.file.simulation.fleet.speed) == "own.py:Doubled"
    assert run.result.status == "COMPLETED"
    assert run.result.to_dict() == again.result.to_dict()
    online = simulate(path, {**changes, "simulation.fleet.availability": {"kind": "always"}})
    assert run.result.totals.duration_s > 3000.0 > online.result.totals.duration_s


@pytest.mark.slow
def test_metrics_are_results_and_may_be_the_target(folder: Path) -> None:
    path = write_digits(folder)
    changes: dict[str, object] = {
        "rounds": 3,
        "simulation.engine": "loop",
        "simulation.model.metrics": ["f1", "own.py:Sure"],
        "simulation.target_metric": "f1",
        "simulation.target": 0.05,
    }
    run = simulate(path, changes)
    assert run.result.attempts[-1].evaluation.keys() == {"loss", "accuracy", "f1", "sure"}
    assert run.summary.best is not None
    assert run.summary.best.value == run.series("f1").values.max()
    assert run.summary.rounds_to_target is not None
    assert run.save_plots(folder / "pictures")[0].name == "accuracy.png"
    assert run.to_dict()["attempts"][-1]["evaluation"]["f1"] == run.series("f1").values[-1]


METRICS = '[simulation.model]\nmetrics = [{ name = "own.py:Sure", above = 0.9 }, { name = "top_k", k = 2 }, "f1"]\n'


def test_metrics_have_options(folder: Path) -> None:
    path = write_digits(folder)
    path.write_text(path.read_text() + METRICS)
    options = files.read(path).simulation.model
    assert isinstance(options, ModelOptions)
    found = options.metrics
    assert [name_of(each) for each in found] == ["own.py:Sure", "top_k", "f1"]
    assert getattr(found[0], "above") == 0.9  # noqa: B009 - the type is that of a file


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"mode.staleness": {"kind": "own.py:Bad", "value": "text"}, "mode.max_staleness": 9},
            PluginError,
            r'mode.staleness = "own.py:Bad": weight\(0\) returned 1; expected a finite number of at least 0',
        ),
        (
            {"mode.staleness": {"kind": "own.py:Bad", "value": "late"}, "mode.max_staleness": 9},
            PluginError,
            r'mode.staleness = "own.py:Bad": weight\(2\) returned -1.0; expected a finite number of at least 0',
        ),
        (
            {"mode.staleness": {"kind": "own.py:Bad", "value": "?"}, "mode.max_staleness": 9},
            UserCodeError,
            r"weight\(0\) raised KeyError: '\?' \(.*own.py, line \d+\)",
        ),
        (
            {"aggregation": {"rule": "own.py:Failing", "how": "raises"}},
            UserCodeError,
            r"""aggregation.rule = "own.py:Failing" raised KeyError: 'momentum' \(.*own.py, line \d+\)""",
        ),
        (
            {"aggregation": {"rule": "own.py:Failing", "how": "returns NaN"}},
            NoProgressError,
            'round 1 failed 10 times in a row .* aggregation.rule = "own.py:Failing": .* is not finite',
        ),
        (
            {"simulation.fleet.speed": {"kind": "own.py:Bad", "value": "zeros"}},
            PluginError,
            r'fleet.speed = "own.py:Bad": draw\(\) returned 0.0 for a client; expected finite numbers above 0',
        ),
        (
            {"simulation.fleet.latency_s": {"kind": "own.py:Bad", "value": "short"}},
            PluginError,
            r'simulation.fleet.latency_s = "own.py:Bad": draw\(\) returned float64\[3\]; expected float64\[\d+\]',
        ),
        (
            {"simulation.fleet.availability": {"kind": "own.py:Bad", "value": "none"}},
            PluginError,
            r'availability = "own.py:Bad": build\(\) returned a NoneType; expected an Availability',
        ),
        (
            {"simulation.fleet.availability": {"kind": "own.py:Bad", "value": "self"}},
            PluginError,
            r"spells\(\) returned a spell from .* expected that it ends after that moment, and not before it begins",
        ),
        (
            {"simulation.engine": {"name": "own.py:Bad", "value": "none"}},
            PluginError,
            r'simulation.engine = "own.py:Bad": build\(\) returned a NoneType; expected an Engine',
        ),
        (
            {"simulation.engine": {"name": "own.py:Loop", "not": 1}},
            JobFileError,
            r"simulation.engine.not = 1: there is no such key; did you mean note\?",
        ),
        (
            {"simulation.model.metrics": [{"name": "own.py:Sure", "abov": 1}]},
            JobFileError,
            r"simulation.model.metrics\[0\].abov = 1: there is no such key; did you mean above\?",
        ),
        (
            {"aggregation.rule": "own.py"},
            JobFileError,
            r"aggregation.rule = 'own.py': expected one of .*; a file needs the name of its class as well: own.py:NAME",
        ),
        (
            {"simulation.model.metrics": ["f2"]},
            JobFileError,
            r"simulation.model.metrics\[0\] = 'f2': expected one of f1, top_k, mae, r2, perplexity",
        ),
        ({"simulation.model.metrics": "f1"}, JobFileError, r"simulation.model.metrics = 'f1': expected"),
        (
            {"simulation.model.metrics": ["own.py:Loop"]},
            JobFileError,
            r"Loop has no measure\(\); a metric has measure\(\), compute\(\)",
        ),
        ({"simulation.engine": 3}, JobFileError, r"simulation.engine = 3: expected a name or a table"),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    path = write_digits(folder)
    with pytest.raises(error, match=text):
        simulate(path, {**FAST, **changes})


def test_the_command_names_an_engine_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = write_digits(folder)
    arguments = ["simulate", path.name, "--rounds", "1", "--no-plots", "--dir", "run", "--engine"]
    done = CliRunner().invoke(app, [*arguments, "own.py:Loop"])
    assert done.exit_code == 0, done.output
    assert "engine own.py:Loop" in done.output
    done = CliRunner().invoke(app, [*arguments, "own.py:Lop"])
    assert done.exit_code == 2
    assert "simulation.engine = 'own.py:Lop': the module 'own.py'" in done.output


def test_a_run_resumes_with_another_engine_and_not_with_another_weight(folder: Path) -> None:
    path, kept = write_digits(folder), folder / "run"

    def stop(record: object) -> None:
        raise KeyboardInterrupt

    changes: dict[str, object] = {
        **FAST,
        "mode.staleness": "own.py:Root",
        "mode.max_staleness": 100,
        "simulation.engine": "own.py:Loop",
    }
    with pytest.raises(KeyboardInterrupt):
        simulate(path, changes, observe=stop, run_folder=RunFolderOptions(kept))
    resumed = RunFolderOptions(kept, resume=True)
    with pytest.raises(DataError, match=r"has mode.staleness = 'own.py:Root', and this one 'constant'"):
        simulate(path, {**changes, "mode.staleness": "constant"}, run_folder=resumed)
    (folder / "own.py").write_text(PLUGINS)
    run = simulate(path, {**changes, "simulation.engine": "loop"}, run_folder=resumed)
    assert run.result.status == "COMPLETED"
    assert isinstance(run.file.simulation.engine, LoopOptions)


def test_a_metric_of_a_file_is_read_in_another_process(folder: Path) -> None:
    """A worker of a cluster does not read the simulation file."""
    metric = Plugins(folder=folder).decode(Metric, {"name": "own.py:Sure", "above": 0.75})
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).above)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(metric), capture_output=True, check=False)
    assert done.stdout == b"0.75\n", done.stderr.decode()
