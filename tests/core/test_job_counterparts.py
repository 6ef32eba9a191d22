"""Rules whose other half is the clients' work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedplat import submission_checks
from fedplat.config import user_code
from fedplat.config.plugins import Plugins
from fedplat.errors import JobFileError
from fedplat.job import JobSpec, build_rule, parse_job, warnings
from fedplat.simulation.scenario import feasible

JOB = """\
name = "a"
population = "p"
trainer = "t"
rounds = 3
[model]
initial = "m:f"
[selection]
goal = 4
[config]
algorithm = "{algorithm}"
[updates]
weighting = "{weighting}"
[aggregation]
rule = "{rule}"
num_clients = 10
"""


@pytest.mark.parametrize("rule", ["scaffold", "feddyn"])
def test_clients_have_to_do_their_half(rule: str) -> None:
    spec = parse_job(JOB.format(rule=rule, algorithm=rule, weighting="uniform"))
    assert build_rule(spec).requirements.algorithm == rule
    with pytest.raises(JobFileError, match=rf'expected \[config\] algorithm = "{rule}"'):
        parse_job(JOB.format(rule=rule, algorithm="sgd", weighting="uniform"))
    with pytest.raises(JobFileError, match=rf'"{rule}": it needs \[updates\] weighting = "uniform"'):
        parse_job(JOB.format(rule=rule, algorithm=rule, weighting="examples"))


@pytest.mark.parametrize(("algorithm", "more"), [("scaffold", ""), ("feddyn", "alpha = 0.1")])
def test_the_server_has_to_do_its_half(algorithm: str, more: str) -> None:
    text = JOB.format(rule="fedavg", algorithm=algorithm, weighting="examples").replace("num_clients = 10\n", "")
    spec = parse_job(text.replace("[updates]", f"{more}\n[updates]"))  # a stored job can still be read
    for check in (submission_checks.check_job, feasible.check_supported):
        with pytest.raises(
            JobFileError, match=rf'"{algorithm}": this is .* expected \[aggregation\] rule = "{algorithm}"'
        ):
            check(spec)
        check(parse_job(JOB.format(rule=algorithm, algorithm=algorithm, weighting="uniform")))


def test_fedprox_without_its_factor_is_reported() -> None:
    text = JOB.format(rule="fedavg", algorithm="fedprox", weighting="examples").replace("num_clients = 10\n", "")
    text = text.replace("[updates]", "[updates]\nmax_norm = 1.0")
    (warning,) = warnings(parse_job(text))
    assert warning.startswith('config.mu: missing, so it is 0, and the steps of config.algorithm = "fedprox" are')
    assert warnings(parse_job(text.replace("[updates]", "mu = 0.0\n[updates]"))) == []


def test_the_number_of_clients_is_needed() -> None:
    text = JOB.format(rule="scaffold", algorithm="scaffold", weighting="uniform").replace("num_clients = 10", "")
    with pytest.raises(JobFileError, match=r"aggregation.num_clients: this key is required and missing"):
        parse_job(text)


BOTH = """
import dataclasses
import msgspec
from fedplat.aggregate import ClientRequirements, LocalAlgorithm, weighted_mean

class Half(msgspec.Struct, frozen=True):
    strength: float = 1.0

    def build(self):
        return LocalAlgorithm()

class Other(msgspec.Struct, frozen=True):
    def build(self):
        return LocalAlgorithm()

class Rule(msgspec.Struct, frozen=True):
    def build(self):
        return dataclasses.replace(weighted_mean(), requirements=ClientRequirements(algorithm=Half))
"""
OWN = JOB.replace("num_clients = 10\n", "")


def test_both_halves_of_a_plugin_are_compared_by_class(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    plugins = Plugins(folder=tmp_path)

    def read(rule: str, algorithm: str, plugins: Plugins = plugins, weighting: str = "uniform") -> JobSpec:
        return parse_job(OWN.format(rule=rule, algorithm=algorithm, weighting=weighting), plugins)

    assert read("both.py:Rule", "both.py:Half").config["algorithm"] == "both.py:Half"
    with pytest.raises(JobFileError, match=r'"both.py:Rule": clients must run their part of it; .* of the class Half '):
        read("both.py:Rule", "both.py:Other")
    with pytest.raises(JobFileError, match='"sgd" is another'):
        read("both.py:Rule", "sgd")
    with pytest.raises(JobFileError, match=r"config.algorithm = 'both.py:Halv': the module"):
        read("both.py:Rule", "both.py:Halv")
    with pytest.raises(JobFileError, match=r'it needs \[updates\] weighting = "uniform"'):
        read("both.py:Rule", "both.py:Half", weighting="examples")
    rule, half, other = (user_code.load(f"both.py:{name}", tmp_path) for name in ("Rule", "Half", "Other"))
    given = Plugins({("rules", "both"): rule, ("algorithms", "half"): half, ("algorithms", "both"): other})
    assert read("both", "half", given).config["algorithm"] == "half"
    with pytest.raises(JobFileError, match=r'of the class Half .* and "both" is another'):
        read("both", "both", given)
    with pytest.raises(JobFileError, match=r"config.algorithm = 'half': expected one of sgd"):
        read("both", "half", Plugins({("rules", "both"): rule}))


def test_both_halves_of_an_installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "both_halves.py").write_text(BOTH)
    info = tmp_path / "both_halves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: both-halves\nVersion: 1.0\n")
    points = "[fedplat.rules]\nours = both_halves:Rule\n[fedplat.algorithms]\nours = both_halves:Half\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        text = OWN.format(rule="ours", algorithm="ours", weighting="uniform")
        assert parse_job(text, Plugins(installed=True)).config["algorithm"] == "ours"
    finally:
        sys.modules.pop("both_halves", None)
