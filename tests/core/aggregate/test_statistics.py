"""Running statistics are averaged under every rule, and a variance is never negative."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.aggregate import Accumulator, Contribution
from fedplat.codecs import Quantize
from fedplat.codecs.container import Format
from fedplat.errors import JobFileError
from fedplat.job import build_rule, parse_job
from fedplat.model import Parameters, apply_step
from fedplat.simulation import simulate

NAMES = ("weight", "norm.running_mean", "norm.running_var")
JOB = """
name = "j"
population = "p"
trainer = "t"
rounds = 2
config = { epochs = 1, batch_size = 8, learning_rate = 0.1 }
model.initial = "m.safetensors"
selection = { goal = 4, over_selection = 1.0 }
[deadlines]
training_s = 30
upload_s = 30
"""
RULES = {
    "fedavg": "learning_rate = 3.0",
    "fedavgm": "learning_rate = 1.0\nmomentum = 0.9",
    "fedadam": "learning_rate = 1.0",
    "fedyogi": "learning_rate = 1.0",
    "fedadagrad": "learning_rate = 1.0",
    "fednova": "",
    "qfedavg": "q = 2.0\nlocal_learning_rate = 0.1",
    "feddyn": "num_clients = 4",
    "fedbuff": "learning_rate = 3.0",
    "fedasync": "mixing = 1.0",
    "easgd": "",
    "scaffold": "num_clients = 4\nlearning_rate = 3.0",
}
CONFIG = {
    "qfedavg": ", measure_before = true",
    "feddyn": ', algorithm = "feddyn", alpha = 1.0',
    "easgd": ', algorithm = "easgd", rho = 1.0',
    "scaffold": ', algorithm = "scaffold"',
}
WEIGHTS = {"fedbuff": (1.0, 1.0), "fedasync": (1.0, 1.0), "easgd": (0.5, 0.5)}
"""The weights of rules for which these are no fractions of their sum; those of EASGD make it the mean."""


def job(rule: str, more: str = "") -> str:
    text = JOB.replace("0.1 }", f"0.1{CONFIG.get(rule, '')} }}")
    uniform = '[updates]\nweighting = "uniform"\n' if rule in {*WEIGHTS, "feddyn", "scaffold"} else ""
    return f'{text}{uniform}[aggregation]\nrule = "{rule}"\n{RULES[rule]}\n{more}'


def model(*values: float) -> Parameters:
    return Parameters.from_arrays(
        {name: np.full(3, value, np.float32) for name, value in zip(NAMES, values, strict=True)}
    )


@pytest.mark.parametrize("rule_name", RULES)
def test_statistics_are_averaged_while_weights_are_stepped(rule_name: str) -> None:
    rule, weights = build_rule(parse_job(job(rule_name))), WEIGHTS.get(rule_name, (1.0, 3.0))
    latest = rule.requirements.extend(model(1.0, 0.0, 1.0))
    state = rule.init(latest.schema.num_floating)
    for mean, variance in ((4.0, 0.01), (2.0, 0.04), (0.0, 0.0)):
        accumulator = Accumulator(latest.schema, rule)
        for number, weight in enumerate(weights):
            trained = rule.requirements.extend(model(0.5, mean + number, variance * (1 + number)))
            metrics = {"local_steps": 10.0**number, "loss_before": 1.0 + number}
            accumulator.fold(trained.minus(latest), Contribution(weight, weight, metrics))
        factors = np.array(weights)
        if rule_name == "fednova":
            factors = factors / [1.0, 10.0]
        if rule_name == "qfedavg":
            factors = factors * [1.0, 4.0]
        factors = factors / factors.sum()
        latest, state = accumulator.finish(latest, state)
        np.testing.assert_allclose(latest["norm.running_mean"], factors @ [mean, mean + 1], rtol=1e-5)
        np.testing.assert_allclose(latest["norm.running_var"], variance * (factors @ [1, 2]), rtol=1e-4, atol=1e-7)
        assert (latest["norm.running_var"] >= 0).all()


def test_stale_updates_of_a_buffer_move_statistics_less() -> None:
    rule, base = build_rule(parse_job(job("fedbuff"))), model(1.0, 0.0, 1.0)
    accumulator = Accumulator(base.schema, rule)
    for weight, variance in ((1.0, 0.5), (0.5, 0.2)):
        accumulator.fold(model(1.0, 4.0, variance).minus(base), Contribution(weight))
    found, _ = accumulator.finish(base, {})
    np.testing.assert_allclose(found["norm.running_mean"], (1.0 * 4.0 + 0.5 * 4.0) / 2, rtol=1e-6)
    np.testing.assert_allclose(found["norm.running_var"], 1.0 - (1.0 * 0.5 + 0.5 * 0.8) / 2, rtol=1e-6)


@pytest.mark.parametrize("rule_name", ["fedavg", "fedadam"])
def test_an_update_that_a_codec_has_changed_makes_no_variance_negative(rule_name: str) -> None:
    rule, base = build_rule(parse_job(job(rule_name))), model(1.0, 0.0, 0.5)
    accumulator = Accumulator(base.schema, rule)
    accumulator.fold(model(0.1, -5.0, -0.75), Contribution(1.0))
    found, _ = accumulator.finish(base, rule.init(base.schema.num_floating))
    assert found["norm.running_var"].tolist() == [0.0] * 3
    assert found["norm.running_mean"].tolist() == [-5.0] * 3


def test_a_model_that_is_computed_in_slices() -> None:
    rule = build_rule(parse_job(job("fedadam")))
    shapes = {"a.weight": 3_000_000, "norm.running_var": 3, "z.weight": 5}
    base = Parameters.from_arrays({name: np.ones(size, np.float32) for name, size in shapes.items()})
    trained = Parameters.from_arrays({name: np.full(size, 0.25, np.float32) for name, size in shapes.items()})
    accumulator = Accumulator(base.schema, rule)
    accumulator.fold(trained.minus(base), Contribution(1.0))
    found, _ = accumulator.finish(base, rule.init(base.schema.num_floating))
    assert found["norm.running_var"].tolist() == [0.25] * 3
    assert found["a.weight"][-1] == found["z.weight"][0] < 0.25


SPREADS = [
    *("a.b.running_var", "moving_variance", "batch_stats/BatchNorm_0/var", "n.running_variance", "n.moving_var"),
    *("n.var_ema", "ema_var", "n.avg_var", "n.running_std", "n.ema_std", "std_avg", "n.average_variance"),
]
MEANS = ["a.running_mean", "moving_mean", "batch_stats/n/mean", "n.mean_ema", "ema_mean", "n.avg_mean"]


@pytest.mark.parametrize("name", MEANS)
def test_names_of_means(name: str) -> None:
    schema = Parameters.from_arrays({name: np.zeros(3, np.float32)}).schema
    assert [(each.name, each.is_spread) for each in schema.statistics] == [(name, False)]


@pytest.mark.parametrize(
    "name", ["ema.weight", "ema", "log_var", "fc_var.weight", "mean.bias", "control/running_var", "ema_scale", "n.var"]
)
def test_names_of_weights(name: str) -> None:
    assert not Parameters.from_arrays({name: np.zeros(3, np.float32)}).schema.statistics


@pytest.mark.parametrize("name", SPREADS)
def test_names_of_variances(name: str) -> None:
    schema = Parameters.from_arrays({"w": np.zeros(2, np.float32), name: np.ones(3, np.float32)}).schema
    assert [(each.name, each.columns, each.is_spread) for each in schema.statistics] == [(name, range(2, 5), True)]
    other = Parameters.from_arrays({"mean": np.zeros(2, np.float32), "running": np.zeros(1, np.float32)})
    assert not other.schema.statistics


def private_job() -> str:
    more = """
[privacy]
participation = "poisson"
noise_multiplier = 1.0
delta = 1e-5
"""
    sampling = 'close = "deadline", sampling = { policy = "poisson", rate = 0.5 }, wait_for = 8'
    text = job("fedavg", more).replace("over_selection = 1.0", sampling)
    return text.replace("[aggregation]", '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n[aggregation]')


def test_a_private_job_refuses_them() -> None:
    requirements = build_rule(parse_job(private_job())).requirements
    assert "running statistics ('norm.running_mean')" in requirements.misfit(model(1.0, 0.0, 1.0).schema)
    assert requirements.misfit(Parameters.from_arrays({"weight": np.zeros(3, np.float32)}).schema) == ""


def test_a_private_simulation_refuses_them(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))\n"
    )
    text = private_job().replace('"m.safetensors"', '"net:net"') + (
        '[simulation]\nengine = "loop"\ndata = { source = "digits" }\npartition = { scheme = "iid", clients = 40 }\n'
    )
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(JobFileError, match=r"model.initial = 'net:net': .*running statistics \('0.running_mean'\)"):
        simulate(tmp_path / "job.toml", progress=False)


def test_a_step_that_the_downlink_has_rounded_makes_no_variance_negative() -> None:
    base = model(1.0, 0.0, 0.001)
    arrays = {name: values - np.float32(0.0009) for name, values in base.items()}
    trained = Parameters.from_arrays({**arrays, "weight": np.array([1.01, 0.99, 1.0], np.float32)})
    text = job("fedavg", '[compression]\ndownlink = { codec = "quantize", bits = 4 }\n').replace("3.0", "1.0")
    payloads: list[bytes] = []
    rule = build_rule(parse_job(text), keep_step=payloads.append)
    accumulator = Accumulator(base.schema, rule)
    accumulator.fold(trained.minus(base), Contribution(1.0))
    found, _ = accumulator.finish(base, rule.init(base.schema.num_floating))
    decoded = list(Format(Quantize(bits=4), base.schema).codec.decode(payloads[-1], 9))
    step = np.concatenate([block.copy() for block in decoded])
    assert (base.to_vector() + step).min() < 0.0
    steps = iter([step])
    client = np.concatenate([part.values for part in apply_step(base, steps, lambda read, run: iter(()))])
    np.testing.assert_array_equal(found.to_vector(), client)  # a client that rebuilds it has the same bits
    assert (found["norm.running_var"] >= 0).all()
