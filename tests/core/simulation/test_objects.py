"""Simulations and job files that are made from Python objects."""

from __future__ import annotations

import dataclasses
import doctest
import json
import math
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedplat import codecs
from fedplat.aggregate import FedAdam, Robust, server_optimizer, weighted_mean
from fedplat.aggregate.robust import Median
from fedplat.config import plugins
from fedplat.config.toml import read_toml
from fedplat.config.toml_text import write_toml
from fedplat.errors import DataError, FedplatError, JobFileError, PluginError, ReplayError
from fedplat.job import Compression, JobSpec, Model, Scalar, Selection, job_file, parse_job
from fedplat.pytorch.training import Learner
from fedplat.simulation import Dataset, FleetOptions, Run, SimulationOptions, make_job, simulate
from fedplat.simulation.clients.distributions import Lognormal
from fedplat.simulation.data import partitioners, sources
from fedplat.simulation.engines.registry import LoopOptions
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.run_folder import RunFolderOptions
from fedplat.simulation.scenario import building
from fedplat.simulation.scenario import file as files
from support.simulation.runs import DIGITS

CONFIG: dict[str, Scalar] = {"epochs": 1, "batch_size": 32, "learning_rate": 0.3}
TWO_LAYERS = "fedplat.pytorch.models:digits_2nn"


class Momentum(msgspec.Struct, frozen=True):
    """Momentum on the server."""

    momentum: float = 0.9
    works_on_mean = True

    def build(self):
        def init(size: int) -> dict[str, Any]:
            return {"velocity": np.zeros(size, np.float32)}

        def update(state: Any, mean: Any) -> Any:
            velocity = np.float32(self.momentum) * state["velocity"] + mean
            return velocity, {"velocity": velocity}

        return server_optimizer(init, update)(weighted_mean())


class First(msgspec.Struct, frozen=True):
    """The clients that come first."""

    def draw(self, candidates: Any, count: int, rng: Any) -> list[int]:
        return list(range(min(count, len(candidates))))


class Halves(msgspec.Struct, frozen=True):
    """16-bit floats."""

    def build(self) -> codecs.Codec:
        def write(vector: Any, rng: Any) -> Any:
            return (block.astype("<f2").tobytes() for block in vector)

        def read(source: Any, size: int) -> Any:
            yield np.frombuffer(source.take(2 * size), "<f2").astype(np.float32)

        return codecs.Codec(write=write, read=read, max_bytes=lambda size: 2 * size)


class Stripes(msgspec.Struct, frozen=True):
    """Every n-th example."""

    clients: int

    def split(self, dataset: Dataset, rng: Any) -> Any:
        return [np.arange(number, len(dataset.inputs), self.clients) for number in range(self.clients)]


class InMemory(msgspec.Struct, frozen=True):
    """Examples in memory, and a function of the user's own."""

    inputs: np.ndarray[Any, Any]
    label: Any

    def load(self, place: Any) -> Dataset:
        targets = np.array([self.label(row) for row in self.inputs])
        return Dataset.from_arrays(self.inputs, targets, (self.inputs[:50], targets[:50]))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def digits() -> tuple[JobSpec, SimulationOptions]:
    """The records of the file `DIGITS`."""
    job = JobSpec(
        name="digits",
        population="demo",
        trainer="digits",
        rounds=4,
        model=Model(TWO_LAYERS),
        config=CONFIG,
        selection=Selection(goal=3, over_selection=1.5, min_fraction=0.5),
    )
    options = SimulationOptions(
        target=0.05,
        engine=LoopOptions(),
        data=sources.Digits(),
        partition=partitioners.Dirichlet(clients=20, alpha=0.5, min_examples=5),
        fleet=FleetOptions(speed=Lognormal(50.0), fails=0.05, labels={"region": {"eu": 0.5, "us": 0.5}}),
    )
    return job, options


def numbers(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.to_dict().items() if key not in ("computed", "simulation")}


def test_objects_give_the_same_bits_as_the_file(tmp_path: Path) -> None:
    job, options = digits()
    read = files.parse(DIGITS, tmp_path)
    made = files.of_records(job, options, tmp_path)
    assert (made.job, made.simulation) == (read.job, read.simulation)
    run, expected = simulate(job, options), simulate(read)
    assert run.model == expected.model
    assert numbers(run) == numbers(expected)


def test_plugins_as_objects_give_the_same_bits_as_in_a_file(tmp_path: Path) -> None:
    """The classes of this module are in a file of their own, too."""
    source = Path(__file__).read_text().partition("def linear()")[0]
    (tmp_path / "own.py").write_text(source.replace("from support.simulation.runs import DIGITS\n", ""))
    text = (
        DIGITS.replace("goal = 3", 'goal = 3\nsampling = { policy = "own.py:First" }')
        .replace('scheme = "dirichlet"', 'scheme = "own.py:Stripes"')
        .replace("alpha = 0.5\nmin_examples = 5\n", "")
        + '[aggregation]\nrule = "own.py:Momentum"\nmomentum = 0.5\n'
        + '[compression]\nuplink = { codec = "own.py:Halves" }\n'
    )
    expected = simulate(files.parse(text, tmp_path))
    job, options = digits()
    job = msgspec.structs.replace(
        job,
        aggregation=Momentum(0.5),
        selection=msgspec.structs.replace(job.selection, sampling=First()),
        compression=Compression(uplink=Halves()),
    )
    run = simulate(job, msgspec.structs.replace(options, partition=Stripes(20)))
    assert run.model == expected.model
    tables = run.to_dict()["simulation"]
    assert tables["aggregation"] == {"rule": f"{__name__}:Momentum", "momentum": 0.5}
    assert tables["selection"]["sampling"] == {"policy": f"{__name__}:First"}
    assert tables["simulation"]["partition"] == {"scheme": f"{__name__}:Stripes", "clients": 20}
    again = simulate(files.parse(run.file.to_toml(), tmp_path))  # this module can be imported
    assert again.model == run.model
    assert numbers(again) == numbers(run)  # those of the other file have another codec name in each upload
    with pytest.raises(JobFileError, match=r"aggregation.rule = '.*:Momentum': expected one of fedavg"):
        run.file.job_text()  # a server has only built-in names


def test_the_docstrings_example() -> None:
    assert doctest.testmod(building) == (0, 6)


def test_the_shortest_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(linear, rounds=2, selection=Selection(goal=3), config=CONFIG)
    run = simulate(
        job, SimulationOptions(engine=LoopOptions(), data=sources.Digits(), partition=partitioners.Iid(clients=5))
    )
    assert run.result.status == "COMPLETED"
    assert run.file.raw["model"] == {"initial": f"{__name__}:linear"}
    assert capsys.readouterr() == ("", "")  # no progress bar, because this is not a terminal


def test_a_learner_and_a_data_set_in_memory() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 3)).astype(np.float32)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32)
    data = Dataset.from_arrays(inputs[:300], targets[:300], (inputs[300:], targets[300:]))
    job = make_job(rounds=10, selection=Selection(goal=3), config=CONFIG)
    options = SimulationOptions(engine=LoopOptions(), target_metric="loss", partition=partitioners.Iid(clients=10))
    learner = Learner(model=lambda: nn.Linear(3, 1), loss=nn.functional.mse_loss)
    run = simulate(job, options, data=data, learner=learner)
    assert run.summary.best is not None
    assert run.summary.best.value < 0.1
    with pytest.raises(JobFileError, match=r"^model: missing; expected make_job\(model, ...\) or simulate\("):
        simulate(job, options, data=data)
    with pytest.raises(DataError, match="the data is not partitioned"):
        simulate(job, msgspec.structs.replace(options, partition=None), data=data, learner=learner)


def test_the_example_with_data_in_memory() -> None:
    found = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "own_data.py"))
    run = found["main"]()
    assert run.summary.best.value < 0.02  # the noise has a variance of 0.01
    assert run.result.num_clients == 40


def make_memory_job(label: Any = np.argmax) -> tuple[JobSpec, SimulationOptions]:
    inputs = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    job = make_job(small, rounds=3, selection=Selection(goal=3), config=CONFIG, aggregation=Momentum())
    data = InMemory(inputs, label)
    return job, SimulationOptions(engine=LoopOptions(), data=data, partition=partitioners.Iid(clients=5))


def small() -> nn.Module:
    return nn.Linear(3, 3)


class StoppedError(Exception):
    pass


def stop_after_two(record: AttemptResult) -> None:
    if record.round == 2:
        raise StoppedError


def test_a_run_of_objects_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = simulate(*make_memory_job())
    folder = RunFolderOptions(tmp_path, checkpoint_s=0.0)
    with pytest.raises(StoppedError):
        simulate(*make_memory_job(), run_folder=folder, observe=stop_after_two)
    again = dataclasses.replace(folder, resume=True)
    job, options = make_memory_job()
    other = msgspec.structs.replace(job, aggregation=Momentum(0.5))
    with pytest.raises(DataError, match=r"has aggregation.momentum = None, and this one 0.5; resume with the same"):
        simulate(other, options, run_folder=again)
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "_read_source", lambda record: b"edited")  # pyright: ignore[reportUnknownLambdaType]
        with pytest.raises(DataError, match=r"the file of the plugin .*Momentum has changed since the run in"):
            simulate(job, options, run_folder=again)
    resumed = simulate(job, options, run_folder=again)
    assert resumed.model == expected.model
    assert numbers(resumed) == numbers(expected)
    assert json.loads((tmp_path / "results.json").read_text())["simulation"]["simulation"]["data"]["label"] == "argmax"


def test_an_option_that_cannot_be_stored_prevents_a_run_folder(tmp_path: Path) -> None:
    run = simulate(*make_memory_job(lambda row: row.argmax()))  # pyright: ignore[reportUnknownLambdaType]
    assert run.result.status == "COMPLETED"
    with pytest.raises(JobFileError, match=r"simulation.data.inputs: a file cannot have a value of type ndarray"):
        run.file.to_toml()
    job, options = digits()
    scheduled = msgspec.structs.replace(job, aggregation=Scheduled([small, np.arange(3)]))
    assert simulate(scheduled, options, run_folder=RunFolderOptions(tmp_path / "named")).result.status == "COMPLETED"
    job = msgspec.structs.replace(job, aggregation=Scheduled(lambda: 1.0))
    with pytest.raises(ReplayError, match=r"an option of a plugin is a function without a name, so a resumed"):
        simulate(job, options, run_folder=RunFolderOptions(tmp_path))


class Scheduled(msgspec.Struct, frozen=True):
    schedule: Any

    def build(self):
        return weighted_mean()


def define_in_notebook(monkeypatch: pytest.MonkeyPatch, body: str) -> Any:
    """Define a class as a cell of a notebook does: in `__main__`, which has no file."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(body, module.__dict__)
    return module


RULE = """
import msgspec
from fedplat.aggregate import weighted_mean
class Mean(msgspec.Struct, frozen=True):
    def build(self):
        return weighted_mean() if {number} else None
def make(): ...
"""


def test_classes_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = define_in_notebook(monkeypatch, RULE.format(number=1))
    job = make_job(notebook.make, rounds=1, selection=Selection(goal=1), config=CONFIG, aggregation=notebook.Mean())
    made = files.of_records(job, SimulationOptions())
    assert made.raw["aggregation"] == {"rule": "Mean"}
    assert made.raw["model"] == {"initial": "__main__:make"}
    with pytest.raises(JobFileError, match=r"aggregation.rule = 'Mean': .*; a file names only built-in classes, and"):
        made.to_toml()
    plain = msgspec.structs.replace(job, aggregation=FedAdam())
    for write in (files.of_records(plain, SimulationOptions()).to_toml, lambda: job_file(plain)):
        with pytest.raises(JobFileError, match=r'model.initial = "__main__:make": the function is defined'):
            write()
    before = plugins.digests(job)
    assert set(before) == {"Mean"}
    assert plugins.digests(job) == before
    other = define_in_notebook(monkeypatch, RULE.format(number="2 > 1 and 3"))
    assert plugins.digests(msgspec.structs.replace(job, aggregation=other.Mean())) != before


def test_a_job_file_describes_the_job_for_a_server() -> None:
    job, options = digits()
    job = msgspec.structs.replace(job, aggregation=FedAdam(learning_rate=0.05), robust=None)
    text = job_file(job)
    assert parse_job(text) == job
    assert "robust" not in text
    assert files.of_records(job, options).job_text() == text
    whole = files.of_records(job, options).to_toml()
    assert files.parse(whole, Path.cwd()).job == job
    assert files.job_text(whole) == text + "\n"


def mistake(function: Any) -> str:
    with pytest.raises(FedplatError) as caught:
        function()
    return str(caught.value)


def test_mistakes_are_named_by_their_keys() -> None:
    goal = Selection(goal=1)
    assert mistake(lambda: make_job("x", rounds=0, selection=Selection(goal=-1), config={}, agregation=FedAdam())) == (
        "agregation = {…}: there is no such key; did you mean aggregation or secure_aggregation?\n"
        "rounds = 0: expected a whole number >= 1\n"
        "model.initial = 'x': expected a path that ends in .safetensors, or module:function\n"
        "selection.goal = -1: expected a whole number >= 1"
    )
    assert mistake(lambda: make_job("a:b", rounds=1, selection=goal, config={}, aggregation=FedAdam)) == (
        "aggregation = FedAdam: expected an object, such as FedAdam(), not the class"
    )
    assert mistake(lambda: make_job("a:b", rounds=1, selection=goal, config={}, aggregation="fedavg")) == (
        "aggregation = 'fedavg': expected an aggregation rule as an object, such as FedAvg()"
    )
    assert mistake(lambda: make_job("a:b", rounds=1, selection=Selection(1, sampling=Momentum()), config={})) == (  # pyright: ignore[reportArgumentType]
        "selection.sampling: policies.Momentum: Momentum has no draw(); a sampling policy has draw()"
    )
    assert mistake(lambda: SimulationOptions(partition=First())).startswith("simulation.partition: partitions.First")  # pyright: ignore[reportArgumentType]
    assert mistake(lambda: make_job(lambda: linear(), rounds=1, selection=goal, config={})).startswith(
        "model = test_mistakes_are_named_by_their_keys.<locals>.<lambda>.<locals>.<lambda>: it cannot be found by its "
        "name; define the function with def, outside of other functions, or call simulate(..., learner="
    )
    assert mistake(lambda: make_job(nn.Linear(1, 1), rounds=1, selection=goal, config={})).startswith(
        "model is a Linear; expected a function or class that creates the module"
    )
    untyped: Any = simulate
    job, options = digits()
    bad = msgspec.structs.replace(job, rounds=-1, model="a:b")
    assert mistake(lambda: simulate(bad, SimulationOptions(seed=-1, partition=partitioners.Iid(0)))) == (
        "rounds = -1: expected a whole number >= 1\n"
        "model = 'a:b': expected a table, [model]\n"
        "simulation.seed = -1: expected a whole number >= 0\n"
        "simulation.partition.clients = 0: expected a whole number >= 1"
    )
    assert mistake(lambda: untyped(job, {"rounds": 3})).startswith(
        "changes: expected SimulationOptions after a JobSpec"
    )
    assert mistake(lambda: untyped("job.toml", options)).startswith("SimulationOptions: expected a JobSpec before")
    assert mistake(lambda: untyped(job, options, data=np.zeros(5))) == (
        "data is a ndarray; expected a Federation, or a Dataset such as Dataset.from_arrays(inputs, targets)"
    )
    made = files.of_records(job, options)
    assert mistake(lambda: untyped(made, {"rounds": 3})).startswith("changes: expected none with a SimulationFile")


def test_a_robust_rule_and_numbers_of_numpy() -> None:
    job = make_job(
        "a:b",
        rounds=np.int64(5),  # pyright: ignore[reportArgumentType]
        selection=Selection(goal=7),
        config={"learning_rate": np.float32(0.5), "epochs": np.int64(2)},  # pyright: ignore[reportArgumentType]
        robust=Robust(rule=Median(), byzantine=2),
        aggregation=Momentum(1),
    )
    assert (job.rounds, job.config) == (5, {"learning_rate": 0.5, "epochs": 2})
    assert isinstance(job.config["epochs"], int)
    assert repr(getattr(job.aggregation, "momentum", None)) == "1.0"  # as if read from a file
    assert job.aggregation.works_on_mean


def test_a_value_that_is_not_a_record_is_refused() -> None:
    class Plain:
        def build(self) -> None: ...

    with pytest.raises(PluginError, match=r"expected an aggregation rule as an object, such as FedAvg\(\)"):
        make_job("a:b", rounds=1, selection=Selection(goal=1), config={}, aggregation=Plain())


KEYS = st.text(max_size=8)
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_written_toml_is_read_again(table: dict[str, Any]) -> None:
    table = json.loads(json.dumps(table)) if not has_infinity(table) else {}
    try:
        text = write_toml(table)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate is not text
        return
    assert read_toml(text) == table


def has_infinity(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(has_infinity, value.values() if isinstance(value, dict) else value))  # pyright: ignore[reportUnknownMemberType]
    return isinstance(value, float) and math.isinf(value)
