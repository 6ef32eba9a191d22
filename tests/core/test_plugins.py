"""Plugins: options records outside of fedplat, in files like the built-in ones and refused with clear messages."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from fedplat import aggregate, codecs
from fedplat.codecs.container import options_from_text, options_to_text
from fedplat.config.plugins import BUILTIN, Plugins, find_entry_points, find_kind, kinds, name_of
from fedplat.errors import CodecError, DataError, JobFileError, PluginError, UserCodeError
from fedplat.job import JobSpec, build_rule, parse_job
from fedplat.model import VectorBlocks
from fedplat.privacy import Noise
from fedplat.sampling import Policy
from fedplat.simulation.api import simulate
from fedplat.simulation.data import DataSource, Partition, federation
from fedplat.simulation.run_folder import RunFolderOptions
from support.jobs import write_job
from support.simulation.runs import write_digits

PLUGINS = '''
import dataclasses
import msgspec
import numpy as np
from fedplat.aggregate import server_optimizer, weighted_mean
from fedplat.codecs import Codec
from fedplat.simulation.data import Dataset

print("imported", __file__)

class Momentum(msgspec.Struct, frozen=True):
    """Momentum on the server."""

    momentum: float = 0.9
    works_on_mean = True

    def build(self):
        def init(size):
            return {"velocity": np.zeros(size, np.float32)}

        def update(state, delta):
            velocity = np.float32(self.momentum) * state["velocity"] + delta
            return velocity, {"velocity": velocity}

        return server_optimizer(init, update)(weighted_mean())

class First(msgspec.Struct, frozen=True):
    """The clients that come first."""

    def draw(self, candidates, count, rng):
        return list(range(min(count, len(candidates))))

class Halves(msgspec.Struct, frozen=True):
    """16-bit floats."""

    def build(self):
        def write(vector, rng):
            return (block.astype("<f2").tobytes() for block in vector)

        def read(source, size):
            yield np.frombuffer(source.take(2 * size), "<f2").astype(np.float32)

        return Codec(write=write, read=read, max_bytes=lambda size: 2 * size)

class Stripes(msgspec.Struct, frozen=True):
    """Every n-th example."""

    clients: int

    def split(self, dataset, rng):
        return [np.arange(number, len(dataset.inputs), self.clients) for number in range(self.clients)]

class Zeros(msgspec.Struct, frozen=True):
    """No data at all, but some of it."""

    def load(self, place):
        return Dataset.from_arrays(np.zeros((100, 64), np.float32), np.arange(100) % 10)

class Bounded(msgspec.Struct, frozen=True):
    size: int

    def __post_init__(self):
        if self.size > 3:
            raise ValueError(f"size = {self.size}: expected at most 3")

    def build(self):
        return weighted_mean()

class Raises(msgspec.Struct, frozen=True):
    where: str

    def __post_init__(self):
        if self.where == "init":
            raise KeyError("size")

    def build(self):
        if self.where == "build":
            return 1 / 0
        return {"a": "dict"}

class Twice(msgspec.Struct, frozen=True):
    """The first client, twice."""

    def draw(self, candidates, count, rng):
        return [0, 0]

class Short(msgspec.Struct, frozen=True):
    """A step of five entries."""

    def build(self):
        return dataclasses.replace(weighted_mean(), apply=lambda state, partial: (partial.total[:5], state))

class Lists(msgspec.Struct, frozen=True):
    """Parts that are lists, or not indices, or not indices of examples."""

    which: str

    def split(self, dataset, rng):
        parts = {"lists": [0, 1, 2], "numbers": [0.5, 1.0], "beyond": [0, 100_000], "empty": []}
        return [[3, 4], parts[self.which]]

class Five(msgspec.Struct, frozen=True):
    def load(self, place):
        return 5

class Thawed(msgspec.Struct):
    def build(self):
        return weighted_mean()

class Unfinished(msgspec.Struct, frozen=True):
    pass

class Tagged(msgspec.Struct, frozen=True):
    rule: int = 0

    def build(self):
        return weighted_mean()

number = 5
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "own", raising=False)  # that of another test
    (tmp_path / "own.py").write_text(PLUGINS)
    return tmp_path


def read(folder: Path, more: str) -> JobSpec:
    return parse_job(write_job("toy", more=more), Plugins(folder=folder))


def mistake(folder: Path, more: str) -> str:
    with pytest.raises(JobFileError) as caught:
        read(folder, more)
    return str(caught.value)


def test_a_name_may_be_a_reference_to_a_file(folder: Path) -> None:
    spec = read(folder, '[aggregation]\nrule = "own.py:Momentum"\nmomentum = 0.5\n')
    assert name_of(spec.aggregation) == "own.py:Momentum"
    assert spec.aggregation.works_on_mean
    rule = build_rule(spec)
    partial = rule.fold(rule.start(2), VectorBlocks(np.array([1.0, 2.0], np.float32)), aggregate.Contribution(1.0))
    step, state = rule.apply({"velocity": np.array([4.0, 8.0], np.float32)}, partial)
    assert step.tolist() == state["velocity"].tolist() == [3.0, 6.0]


def test_every_kind_of_table_accepts_plugins(folder: Path) -> None:
    plugins = Plugins(folder=folder)
    for kind, name in {"policies": "First", "codecs": "Halves", "partitions": "Stripes", "sources": "Zeros"}.items():
        assert plugins.find(kinds()[kind], f"own.py:{name}") is not None
    spec = read(folder, '[selection.sampling]\npolicy = "own.py:First"\n')
    policy: Policy = spec.selection.sampling
    assert (policy.remembers, policy.is_trial) == (False, False)


def test_a_simulation_with_a_plugin_gives_the_bits_of_the_same_built_in_rule(folder: Path) -> None:
    path = write_digits(folder)
    changes: dict[str, object] = {"rounds": 2, "aggregation.rule": "fedavgm", "aggregation.momentum": 0.9}
    known = simulate(path, changes)
    own = simulate(path, {**changes, "aggregation.rule": "own.py:Momentum"})
    assert own.model is not None
    assert known.model is not None
    assert own.model.to_bytes() == known.model.to_bytes()


def test_a_simulation_with_plugins_of_all_kinds(folder: Path) -> None:
    more = """
[compression.uplink]
codec = "own.py:Halves"
[selection.sampling]
policy = "own.py:First"
"""
    text = write_digits(folder, more).read_text().replace('source = "digits"', 'source = "own.py:Zeros"')
    head, table, tail = text.partition("[simulation.partition]\n")
    assert table
    rest = tail[tail.index("\n[") + 1 :]
    path = folder / "own.toml"
    path.write_text(f'{head}{table}scheme = "own.py:Stripes"\nclients = 20\nseed = 3\n{rest}')
    run = simulate(path, {"rounds": 2})
    assert run.result.status == "COMPLETED"
    assert run.federation is not None
    assert [part[0] for part in run.federation.parts] == list(range(20))
    assert run.result.participation.merged.sum() == 2 * run.file.job.selection.goal


def test_a_run_is_resumed_only_with_the_same_plugin(folder: Path) -> None:
    path, kept = write_digits(folder), folder / "run"
    changes: dict[str, object] = {"rounds": 3, "aggregation.rule": "own.py:Momentum"}

    def stop(record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(path, changes, observe=stop, run_folder=RunFolderOptions(kept))
    resumed = RunFolderOptions(kept, resume=True)
    original = (folder / "own.py").read_text()
    (folder / "own.py").write_text(original + "# changed\n")
    with pytest.raises(
        DataError, match=r"the file of the plugin own.py:Momentum has changed since the run in .* began"
    ):
        simulate(path, changes, run_folder=resumed)
    (folder / "own.py").write_text(original)
    assert simulate(path, changes, run_folder=resumed).result.status == "COMPLETED"


def test_a_run_is_resumed_only_with_the_same_local_algorithm(folder: Path) -> None:
    text = "import msgspec\nfrom fedplat.aggregate import LocalAlgorithm\n"
    text += "class Plain(msgspec.Struct, frozen=True):\n    def build(self):\n        return LocalAlgorithm()\n"
    (folder / "local.py").write_text(text)
    path, kept = write_digits(folder), folder / "run"
    changes: dict[str, object] = {"rounds": 3, "config.algorithm": "local.py:Plain"}

    def stop(record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(path, changes, observe=stop, run_folder=RunFolderOptions(kept))
    (folder / "local.py").write_text(text + "# changed\n")
    with pytest.raises(DataError, match=r"the file of the plugin local.py:Plain has changed since the run in .* began"):
        simulate(path, changes, run_folder=RunFolderOptions(kept, resume=True))
    (folder / "local.py").write_text(text)
    found = simulate(path, changes, run_folder=RunFolderOptions(kept, resume=True))
    plain = simulate(path, {"rounds": 3})
    assert found.model is not None
    assert plain.model is not None
    assert found.model.to_bytes() == plain.model.to_bytes()


def test_a_server_finds_only_built_in_names_and_imports_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    _declare(folder, "rules", "momentum", "own:Momentum")
    for name in ("own.py:Momentum", "own:Momentum", "momentum"):
        with pytest.raises(JobFileError, match=f"aggregation.rule = '{name}': expected one of fedavg"):
            parse_job(write_job("toy", more=f'[aggregation]\nrule = "{name}"\n'))
        with pytest.raises(CodecError, match="supported codecs: none, bf16"):
            options_from_text(f'{{"codec": "{name}"}}')
    assert capsys.readouterr().out == ""
    assert "own" not in sys.modules


def _declare(folder: Path, kind: str, name: str, target: str) -> None:
    """Makes the folder an installed distribution with one entry point."""
    info = folder / "own_plugins-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugins\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[fedplat.{kind}]\n{name} = {target}\n")


def test_installed_packages_add_names_by_entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    _declare(folder, "rules", "heavy-ball", "own:Momentum")
    _declare(folder, "policies", "broken", "own:Missing")
    plugins = Plugins(installed=True)
    try:
        spec = parse_job(write_job("toy", more='[aggregation]\nrule = "heavy-ball"\n'), plugins)
        assert name_of(spec.aggregation) == "heavy-ball"
        with pytest.raises(JobFileError, match="did you mean heavy-ball"):
            parse_job(write_job("toy", more='[aggregation]\nrule = "heavy-bal"\n'), plugins)
        with pytest.raises(JobFileError, match=r"the plugin policies.broken raised AttributeError"):
            parse_job(write_job("toy", more='[selection.sampling]\npolicy = "broken"\n'), plugins)
    finally:
        sys.modules.pop("own", None)


def test_a_package_that_is_installed_later_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    os.utime(folder, ns=(0, 0))  # a folder that was last changed in the same tick of the clock has the same time
    assert "later" not in find_entry_points("rules")
    _declare(folder, "rules", "later", "own:Momentum")
    assert find_entry_points("rules")["later"].value == "own:Momentum"


def test_names_that_the_owner_gives(folder: Path) -> None:
    class Mean(Struct, frozen=True):
        def build(self) -> aggregate.Rule:
            return aggregate.weighted_mean()

    plugins = Plugins({("rules", "mine"): Mean, ("rules", "fedavg"): Mean})
    spec = parse_job(write_job("toy", more='[aggregation]\nrule = "mine"\n'), plugins)
    assert isinstance(spec.aggregation, Mean)
    assert not spec.aggregation.works_on_mean
    built_in = parse_job(write_job("toy", more='[aggregation]\nrule = "fedavg"\n'), plugins)
    assert built_in.aggregation == aggregate.FedAvg(), "a plugin never replaces a built-in name"


def test_records_of_plugins_are_encoded_compared_and_pickled_like_built_in_ones(folder: Path) -> None:
    plugins = Plugins(folder=folder)
    kind = find_kind(codecs.CodecOptions)
    assert kind is not None
    options = plugins.decode(codecs.CodecOptions, {"codec": "own.py:Halves"})
    assert options_to_text(options) == '{"codec":"own.py:Halves"}'
    assert options_from_text(options_to_text(options), plugins) == options
    assert pickle.loads(pickle.dumps(options)) == options
    assert BUILTIN.decode(codecs.CodecOptions, options) is options


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            'rule = "own.py:Momentum"\nmomentun = 1',
            "aggregation.momentun = 1: there is no such key; did you mean momentum?",
        ),
        ('rule = "own.py:Momentum"\nmomentum = "a"', "aggregation.momentum = 'a': expected a number"),
        ('rule = "own.py:Bounded"', "aggregation.size: this key is required and missing"),
        ('rule = "own.py:Bounded"\nsize = 9', "aggregation.size = 9: expected at most 3"),
        ('rule = "own.py:Nothing"', "aggregation.rule = 'own.py:Nothing': the module 'own.py'"),
        ('rule = "gone.py:Rule"', "aggregation.rule = 'gone.py:Rule': there is no file"),
        ('rule = "own.py:number"', "is of type int; expected a class, the options of an aggregation rule"),
        ('rule = "own.py:Thawed"', "expected class Thawed(msgspec.Struct, frozen=True)"),
        ('rule = "own.py:Unfinished"', "Unfinished has no build(); an aggregation rule has build()"),
        ('rule = "own.py:Tagged"', "Tagged has a field rule, the key that selects the record"),
        ('rule = "own.py:Raises"\nwhere = "init"', "own.py:Raises\": its check raised KeyError: 'size'"),
        ("rule = 3", "aggregation.rule = 3: expected one of fedavg"),
    ],
)
def test_mistakes_are_reported_by_key(folder: Path, table: str, text: str) -> None:
    assert text in mistake(folder, f"[aggregation]\n{table}\n")


@pytest.mark.parametrize("key", ["aggregation.rule", "compression.uplink.codec", "compression.downlink.codec"])
def test_options_that_cannot_be_built_are_refused(folder: Path, key: str) -> None:
    table, _, name = key.rpartition(".")
    text = f'[{table}]\n{name} = "own.py:Raises"\nwhere = '
    with pytest.raises(UserCodeError, match=rf'{key} = "own.py:Raises": build\(\) raised ZeroDivisionError: .*line'):
        read(folder, text + '"build"\n')
    with pytest.raises(PluginError, match=r"build\(\) returned a dict; expected a (Rule|Codec)"):
        read(folder, text + '"result"\n')


def test_a_policy_that_draws_impossible_clients_is_refused(folder: Path) -> None:
    path = write_digits(folder, '[selection.sampling]\npolicy = "own.py:Twice"\n')
    with pytest.raises(PluginError, match=r'the sampling policy "own.py:Twice" drew \[0, 0\] from \d+ candidates'):
        simulate(path, {"rounds": 2})


def test_a_rule_that_returns_another_shape_is_refused(folder: Path) -> None:
    changes: dict[str, object] = {"rounds": 2, "aggregation.rule": "own.py:Short"}
    with pytest.raises(PluginError, match=r"rule returned float32\[5\] for a step or a state; expected float32\[\d+\]"):
        simulate(write_digits(folder), changes)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("numbers", r"gives client 1 float64\[2\]; expected the indices of its examples"),
        ("beyond", "client 1 has examples 0 to 100000; expected 0 to 99"),
        ("empty", "leaves client 1 without an example"),
    ],
)
def test_parts_that_are_not_examples_are_refused(folder: Path, which: str, text: str) -> None:
    plugins, zeros = Plugins(folder=folder), {"source": "own.py:Zeros"}
    source = plugins.decode(DataSource, zeros)
    partition = plugins.decode(Partition, {"scheme": "own.py:Lists", "which": which})
    with pytest.raises(DataError, match=text):
        federation(source, partition)
    lists = plugins.decode(Partition, {"scheme": "own.py:Lists", "which": "lists"})
    assert [part.tolist() for part in federation(source, lists).parts] == [[3, 4], [0, 1, 2]]


def test_a_source_of_something_else_is_refused(folder: Path) -> None:
    source = Plugins(folder=folder).decode(DataSource, {"source": "own.py:Five"})
    with pytest.raises(DataError, match=r'source "own.py:Five" returned an object of type int; expected a Dataset or'):
        federation(source, None)


def test_a_module_that_fails_is_named(folder: Path) -> None:
    (folder / "bad.py").write_text("1 / 0\n")
    text = mistake(folder, '[aggregation]\nrule = "bad.py:Rule"\n')
    assert "import bad.py raised ZeroDivisionError" in text
    assert "line 1" in text


PRIVATE = """
[updates]
weighting = "uniform"
clip_norm = 1.0
[privacy]
participation = "fixed"
delta = 1e-5
noise_multiplier = 1.0
"""


def test_a_rule_of_a_private_job_sees_only_the_noisy_mean(folder: Path) -> None:
    seen: list[aggregate.Partial] = []

    class Curious(Struct, frozen=True):
        works_on_mean = True

        def build(self) -> aggregate.Rule:
            rule = aggregate.weighted_mean()

            def fold(*arguments: object) -> aggregate.Partial:
                raise AssertionError("a plugin must not read the updates of a private job")

            def apply(state: aggregate.State, partial: aggregate.Partial) -> Any:
                seen.append(partial)
                return rule.apply(state, partial)

            return aggregate.Rule(rule.init, rule.start, fold, rule.merge, apply)

    selection = {"goal": 4, "close": "deadline"}
    text = write_job("toy", selection=selection, more='[aggregation]\nrule = "curious"\n' + PRIVATE)
    rules = [
        build_rule(parse_job(each, Plugins({("rules", "curious"): Curious})), noise=Noise(bytes(32)))
        for each in (text, text.replace("curious", "fedavg"))
    ]
    steps: list[list[float]] = []
    for rule in rules:
        partial = rule.start(3)
        for number in range(4):
            update = VectorBlocks(np.full(3, 0.1 * number, np.float32))
            partial = rule.fold(partial, update, aggregate.Contribution(1.0))
        steps.append(rule.apply(rule.init(3), partial)[0].tolist())
    assert steps[0] == steps[1]
    assert (seen[0].num_updates, seen[0].weight, dict(seen[0].sums)) == (1, 1.0, {})
    assert seen[0].total.tolist() == steps[0]


def test_a_private_job_refuses_plugins_on_which_its_guarantee_would_rest(folder: Path) -> None:
    selection = {"close": "deadline", "sampling": {"policy": "own.py:First"}}
    with pytest.raises(JobFileError, match=r'selection.sampling.policy = "own.py:First": expected "uniform"'):
        parse_job(write_job("toy", selection=selection, more=PRIVATE), Plugins(folder=folder))
