"""Flower's strategies as rules of ordinary jobs, compared with the same strategies called directly."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy

from fedplat.aggregate import (
    Accumulator,
    Contribution,
    read_columns,
    read_memory,
    read_scalars,
    state_to_bytes,
)
from fedplat.config.loaded_plugins import load_plugins
from fedplat.config.plugins import Plugins
from fedplat.errors import FedplatError, FlowerError, JobFileError, MissingExtraError, PluginError, UserCodeError
from fedplat.flower import app, identity
from fedplat.flower.rule import FlowerAggregation
from fedplat.flower.strategies import FLOWER_STRATEGIES
from fedplat.job import JobSpec, build_rule, job_file, parse_job
from fedplat.model import ModelFile, Parameters
from support.flower import mark_slow
from support.jobs import write_job

NUM_CLIENTS, ROUNDS = 7, 3
RNG = np.random.default_rng(4)
BASE = Parameters.from_arrays(
    {
        "weight": RNG.normal(size=(5, 3)).astype(np.float32),
        "wide": RNG.normal(size=4),
        "bias": RNG.normal(size=3).astype(np.float32),
        "steps": np.array(7),
    }
)
FLOATING = ("weight", "wide", "bias")
Updates = Sequence[tuple[Parameters, Contribution]]
CASES: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedAvgM": {"server_learning_rate": 0.7, "server_momentum": 0.8},
    "FedAdam": {"eta": 0.03, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01},
    "FedYogi": {"eta": 0.03, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01},
    "FedAdagrad": {"eta": 0.03, "tau": 0.01},
    "FedMedian": {},
    "FedTrimmedAvg": {"beta": 0.2},
    "FedProx": {"proximal_mu": 0.1},
    "QFedAvg": {"client_learning_rate": 0.1, "q": 0.5, "train_loss_key": "loss"},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "Bulyan": {"num_malicious_nodes": 1},
}
STRATEGIES = """
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

class Drift(FedAvg):
    def __init__(self, rate=1.0, **options):
        super().__init__(**options)
        self.rate, self.seen = rate, []

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.seen.append(server_round)
        noise = np.random.normal() * 1e-3
        added = self.rate * sum(self.seen) + noise
        return ArrayRecord({key: Array(array.numpy() + added) for key, array in arrays.items()}), None

class Broken(FedAvg):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def aggregate_train(self, server_round, replies):
        arrays, _ = super().aggregate_train(server_round, replies)
        found = {key: array.numpy() for key, array in arrays.items()}
        if self.how == "raise":
            raise KeyError("no such thing")
        if self.how == "none":
            return None, None
        if self.how == "list":
            return [1], None
        if self.how == "missing":
            del found["bias"]
        if self.how == "extra":
            found["more"] = found["bias"]
        if self.how == "shape":
            found["bias"] = found["bias"][:2]
        if self.how == "nan":
            found["bias"] = found["bias"] * np.nan
        if self.how == "text":
            found["bias"] = np.array(["a", "b", "c"])
        return ArrayRecord({key: Array(value) for key, value in found.items()}), MetricRecord()

class Chatty(FedAvg):
    def __init__(self, method):
        super().__init__()
        self.method = method

    def configure_train(self, server_round, arrays, config, grid):
        if self.method == "wait":
            while len(list(grid.get_node_ids())) < 1000:
                pass
        if self.method == "send":
            grid.send_and_receive([])
        return super().configure_train(server_round, arrays, config, grid)

class NoStrategy:
    def configure_train(self): ...
    def aggregate_train(self): ...
"""


class _AllNodes(Grid):
    """The nodes of a comparison."""

    run = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def get_node_ids(self) -> Sequence[int]:
        return range(NUM_CLIENTS)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a strategy sends nothing itself")

    set_run = create_message = push_messages = pull_messages = send_and_receive = _refuse


def make_spec(name: str, options: dict[str, Any], plugins: Plugins | None = None, more: str = "") -> JobSpec:
    text = write_job(
        selection={"goal": NUM_CLIENTS},
        aggregation={"rule": "flower", "strategy": name, "options": options},
        more=more,
    )
    return parse_job(text, plugins or Plugins())


def make_updates(number: int, count: int = NUM_CLIENTS) -> Updates:
    rng = np.random.default_rng(number)
    found: list[tuple[Parameters, Contribution]] = []
    for client in range(count):
        update = Parameters.zeros(BASE.schema)
        for name in FLOATING:
            update[name] = rng.normal(0.1, 0.5, BASE[name].shape)
        update["steps"] = 8
        metrics = {"loss": float(rng.uniform(0.5, 1)), **({"own": 1.0} if client == 0 else {})}
        found.append((update, Contribution(1.0 + client, 1.0 + client, metrics, client_id=f"client {client}")))
    return found


def make_reply(model: Parameters, contribution: Contribution, node: int) -> Message:
    """The reply that a client would send in Flower."""
    metrics: dict[str, Any] = {"loss": contribution.metrics["loss"], "num-examples": contribution.weight}
    arrays = ArrayRecord({name: Array(np.array(model[name])) for name in FLOATING})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    metadata = Metadata(1, f"m{node}", node, 1, "0", "", 0.0, 60.0, "train")
    return Message(content=content, metadata=metadata)  # pyright: ignore[reportCallIssue]


class Job:
    """A job's versions, with the state of its rule in a file, as on a server."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        self.spec, self.model, self.state = spec, BASE, folder / "state"

    def advance(self, updates: Updates) -> Parameters:
        rule, schema = build_rule(self.spec), BASE.schema
        size, saved = schema.num_floating, self.state.exists()
        scalars = read_scalars(self.state, rule, size) if saved else None
        memory = read_memory(self.state, rule, size) if saved else b""
        accumulator = Accumulator(schema, rule, scalars, memory=memory)
        for update, contribution in updates:
            accumulator.fold(update, contribution)
        columns = read_columns(self.state, rule, size) if saved else [rule.init(size)]
        reduced = accumulator.reduce_updates(columns, self.model)
        self.model, state = reduced.finish(self.model, {})
        self.state.write_bytes(state_to_bytes(state, accumulator.scalars, reduced.memory))
        return self.model


@pytest.fixture
def own(tmp_path: Path) -> Plugins:
    (tmp_path / "own.py").write_text(STRATEGIES)
    names = ("Drift", "Broken", "Chatty", "NoStrategy")
    return load_plugins({f"flower-strategies.{name}": f"{tmp_path}/own.py:{name}" for name in names}).table


def test_all_strategies_are_compared() -> None:
    assert CASES.keys() == FLOWER_STRATEGIES.keys() <= set(strategy.__all__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")
@pytest.mark.parametrize("name", mark_slow(CASES, fast=("FedAvg", "FedAdam", "Krum")))
def test_rule_equals_the_strategy(name: str, tmp_path: Path) -> None:
    rounds = 1 if name in ("QFedAvg", "Bulyan") else ROUNDS  # without a state, and ten times as slow as the others
    identity.assume(1)
    direct = getattr(strategy, name)(**CASES[name])
    job, model = Job(make_spec(name, CASES[name]), tmp_path), BASE.copy()
    for number in range(1, rounds + 1):
        updates = make_updates(number)
        before = {key: model[key].copy() for key in FLOATING}
        arrays = ArrayRecord({key: Array(before[key]) for key in FLOATING})
        list(direct.configure_train(number, arrays, ConfigRecord(), _AllNodes()))
        models = [model.plus(update.to_vector()) for update, _ in updates]
        replies = [make_reply(each, updates[node][1], node) for node, each in enumerate(models)]
        found, _ = direct.aggregate_train(number, replies)
        for key in FLOATING:
            model[key] = found[key].numpy()
        made = job.advance(updates)
        for key in FLOATING:
            np.testing.assert_allclose(made[key], model[key], rtol=1e-6, atol=1e-6)
            assert np.abs(made[key] - before[key]).max() > 1e-4
        assert made["steps"] == 7, "integers are carried by the model's own rule"


def test_state_and_random_numbers_are_the_same_after_a_crash(own: Plugins, tmp_path: Path) -> None:
    spec = make_spec("Drift", {"rate": 0.5}, own)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    undisturbed, job, expected = Job(spec, first), Job(spec, second), BASE
    for number in range(1, ROUNDS + 1):
        updates = make_updates(number)
        expected = undisturbed.advance(updates)
        before, state = job.model, job.state.read_bytes() if job.state.exists() else None
        random.seed(number)
        np.random.seed(number)
        job.advance(updates)
        job.model = before  # a crash before the version was stored
        if state is None:
            job.state.unlink()
        else:
            job.state.write_bytes(state)
        random_state = random.getstate()
        assert job.advance(updates) == expected
        assert random.getstate() == random_state
    mean = sum(np.average([u["bias"] for u, _ in make_updates(n)], 0, np.arange(1, 8)) for n in (1, 2, 3))
    np.testing.assert_allclose(expected["bias"], BASE["bias"] + mean + 0.5 * (1 + 3 + 6), atol=0.02)


def test_a_server_reads_the_base_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(BASE.to_bytes())
    job = Job(make_spec("FedAdam", {"eta": 0.1}), tmp_path)
    rule = build_rule(job.spec)
    accumulator = Accumulator(BASE.schema, rule)
    for update, contribution in make_updates(1):
        accumulator.fold(update, contribution)
    base = ModelFile.open(tmp_path / "base")
    parts = b"".join(part.model.tobytes() for part in accumulator.parts(base, [{}]))
    assert parts == job.advance(make_updates(1)).buffer.tobytes()


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", UserCodeError, "the strategy Broken raised KeyError: 'no such thing' ("),
        ("none", FlowerError, "the strategy Broken returned no arrays for a round of 7 updates; expected an Array"),
        ("list", PluginError, "the strategy Broken returned a list; expected an ArrayRecord and a MetricRecord"),
        ("missing", FlowerError, "the strategy Broken returned no array 'bias' (1 missing); expected the model's"),
        ("extra", FlowerError, "the strategy Broken returned the array 'more'; expected only those of the model"),
        ("shape", FlowerError, "the strategy Broken returned the array 'bias' of shape [2]; expected [3]"),
        ("nan", FlowerError, "the strategy Broken returned the array 'bias' with NaN or infinite values"),
        ("text", FlowerError, "the strategy Broken returned the array 'bias' of <U1; expected float32"),
    ],
)
def test_bad_results(how: str, kind: type[FedplatError], text: str, own: Plugins, tmp_path: Path) -> None:
    job = Job(make_spec("Broken", {"how": how}, own), tmp_path)
    with pytest.raises(kind) as caught:
        job.advance(make_updates(1))
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("Bulyan", {"num_malicious_nodes": 3}, "the strategy Bulyan returned no arrays for a round of 7 updates"),
        ("QFedAvg", {"client_learning_rate": 0.1}, "the strategy QFedAvg cannot aggregate the round: "),
        ("FedAvg", {"min_available_nodes": 9}, "the strategy FedAvg waits for 9 clients, and the round has 7 updates"),
    ],
)
def test_rounds_that_a_strategy_cannot_aggregate(name: str, options: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((FlowerError, ValueError), match=text):
        Job(make_spec(name, options), tmp_path).advance(make_updates(1))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("wait", "the strategy Chatty waits for more than the 7 clients of the round"),
        ("send", "the strategy Chatty sent messages itself; expected only configure_train and aggregate_train"),
    ],
)
def test_strategies_that_use_the_grid_themselves(method: str, text: str, own: Plugins, tmp_path: Path) -> None:
    with pytest.raises(FlowerError, match=text):
        Job(make_spec("Chatty", {"method": method}, own), tmp_path).advance(make_updates(1))


def test_weights_of_zero(tmp_path: Path) -> None:
    updates = [(update, Contribution(0.0)) for update, _ in make_updates(1)]
    with pytest.raises(ValueError, match="the weights of 7 updates add up to 0; a strategy needs one above 0"):
        Job(make_spec("FedAvg", {}), tmp_path).advance(updates)
    with pytest.raises(ValueError, match="no update was folded"):
        Job(make_spec("FedAvg", {}), tmp_path).advance([])


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("FedAdam", {"eta_2": 0.1}, 'aggregation.strategy = "FedAdam": FedAdam.__init__() got an unexpected keyword'),
        ("QFedAvg", {}, 'aggregation.strategy = "QFedAvg": QFedAvg.__init__() missing 1 required positional argument'),
        ("NoStrategy", {}, 'aggregation.strategy = "NoStrategy": NoStrategy is not a strategy; expected a subclass'),
    ],
)
def test_a_server_refuses_a_strategy_that_cannot_be_made(name: str, options: Any, text: str, own: Plugins) -> None:
    requirements = build_rule(make_spec(name, options, own)).requirements
    assert requirements.misfit(BASE.schema).startswith(text)
    assert build_rule(make_spec("FedAdam", {"eta": 0.1})).requirements.misfit(BASE.schema) == ""


def test_without_flwr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise app.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(app.importlib.metadata, "version", missing)
    spec = make_spec("FedAvg", {})
    assert "pip install" in build_rule(spec).requirements.misfit(BASE.schema)
    with pytest.raises(MissingExtraError, match="flwr"):
        Job(spec, tmp_path).advance(make_updates(1))


@pytest.mark.parametrize("name", ["Result", "os:system", "own.py:Drift", "DifferentialPrivacyServerSideFixedClipping"])
def test_a_job_file_names_only_known_strategies(name: str) -> None:
    with pytest.raises(JobFileError, match=r"aggregation\.strategy"):
        make_spec(name, {})


def test_a_simulation_names_a_class_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STRATEGIES)
    spec = make_spec("own.py:Drift", {"rate": 0.0}, Plugins(folder=tmp_path))
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    expected = Job(make_spec("FedAvg", {}), tmp_path).advance(make_updates(1))
    (tmp_path / "again").mkdir()
    found = Job(copy, tmp_path / "again").advance(make_updates(1))
    np.testing.assert_allclose(found["bias"], expected["bias"], atol=0.01)


def test_options_as_objects() -> None:
    spec = make_spec("FedAdam", {"eta": 0.5})
    assert isinstance(spec.aggregation, FlowerAggregation)
    made = FlowerAggregation(strategy="FedAdam", options={"eta": 0.5})  # pyright: ignore[reportArgumentType]
    again = msgspec.structs.replace(spec, aggregation=made)
    assert again == spec
    assert parse_job(job_file(again)) == spec


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            "[privacy]\nparticipation = 'poisson'\ndelta = 1e-5\nnoise_multiplier = 1.0\n",
            "sees the model of each client",
        ),
        ("[robust]\nbyzantine = 1\nrule = { name = 'median' }\n", "has a mean of its own"),
        ("[pool]\nranks = 2\n", "whole models in one process; expected no"),
    ],
)
def test_tables_that_a_job_with_a_strategy_cannot_have(more: str, text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        make_spec("FedAvg", {}, more=more)
