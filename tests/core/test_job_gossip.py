"""Jobs whose silos exchange models without a server."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import parse_job

JOB = """
name = "hospitals"
population = "demo"
trainer = "digits"
rounds = 10
model.initial = "m.safetensors"
mode.kind = "gossip"
selection.goal = 8
"""
UNIFORM = f"{JOB}updates.weighting = 'uniform'\n"


def test_a_decentralised_job() -> None:
    spec = parse_job(f"{UNIFORM}mode.topology = 'exponential'\nmode.tolerance = 0.1\n")
    assert spec.gossip is not None
    assert (spec.gossip.topology, spec.gossip.exchange, spec.gossip.tolerance) == ("exponential", "neighbours", 0.1)
    assert spec.num_wanted == 8
    assert spec.buffered is None
    ring = parse_job(f"{JOB}mode.exchange = 'ring'\n").gossip
    assert ring is not None
    assert parse_job(f"{UNIFORM}compression.uplink.codec = 'bf16'\nmode.gamma = 0.9\n").compression.uplink is not None
    edges = parse_job(f"{UNIFORM}mode.topology = 'edges'\nmode.edges = [['a', 'b'], ['b', 'c']]\n").gossip
    assert edges is not None
    assert edges.edges == (("a", "b"), ("b", "c"))


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            "privacy = { noise_multiplier = 1.0, delta = 1e-5, participation = 'poisson' }\nupdates.clip_norm = 1.0",
            "privacy: neighbours read a silo's model",
        ),
        ("robust = { byzantine = 1, rule = { name = 'median' } }", "robust: no one has the updates of all silos"),
        ("secure_aggregation = {}\nupdates.clip_norm = 1.0", 'expected .mode. exchange = "ring"'),
        ("warm_start = { trainer = 'a', batch_size = 8, learning_rate = 0.1 }", "warm_start: the server has no model"),
        ("pool.ranks = 2", "pool: the server computes nothing"),
        ("aggregation.rule = 'fedadam'", 'aggregation.rule = "fedadam": silos mix models'),
        ("durability = 'memory'", "durability: the server keeps no model"),
        ("config.algorithm = 'scaffold'", 'config.algorithm = "scaffold": its other half is a rule'),
        ("config.algorithm = 'feddyn'\nconfig.alpha = 0.1", 'config.algorithm = "feddyn": its other half is a rule'),
        ("retention.versions = 3", "retention: the server keeps no model"),
        ("evaluation.server = 'accuracy'", "evaluation.server: rounds commit no version"),
        ("selection.over_selection = 2.0", "selection.over_selection: all silos that announce a model take part"),
        ("selection.close = 'deadline'", "selection.close: all silos"),
        (
            "selection.sampling.policy = 'stratified'\nselection.sampling.label = 'region'",
            "selection.sampling: all silos",
        ),
        ("updates.clip_norm = 1.0", "updates: no one sees updates to clip"),
        ("compression.downlink.codec = 'bf16'", "compression.downlink: no version is downloaded"),
        ("compression.uplink.codec = 'bf16'", 'uplink.codec = "bf16": compressed gossip needs a step size'),
        ("mode.gamma = 0.5", "mode.gamma = 0.5: expected with compression.uplink only"),
        ("mode.exchange = 'push-sum'\ncompression.uplink.codec = 'bf16'", "needs links with both directions"),
        ("mode.exchange = 'ring'\ncompression.uplink.codec = 'bf16'", "under masks, which no codec makes smaller"),
        ("mode.topology = 'star'", "mode.topology"),
        ("mode.topology = 'edges'", 'edges: expected with topology = "edges" only'),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(lines: str, text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        parse_job(f"{UNIFORM}{lines}\n")


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (JOB, 'updates.weighting = "examples": neighbours mix with weights that keep the plain mean'),
        (UNIFORM.replace("goal = 8", "goal = 1"), "one silo has no neighbour; expected at least 2"),
        (
            f"{JOB.replace('goal = 8', 'goal = 2')}mode.exchange = 'ring'\n",
            "would know the other's; expected at least 3",
        ),
    ],
)
def test_what_a_decentralised_job_needs(job: str, text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        parse_job(job)
