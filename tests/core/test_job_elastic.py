"""Jobs with elastic averaging, and what would break its sum."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import build_rule, parse_job

JOB = """\
name = "a"
population = "p"
trainer = "t"
rounds = 3
durability = "spool"
[model]
initial = "m:f"
[selection]
goal = 4
[config]
algorithm = "easgd"
rho = 1.0
[aggregation]
rule = "easgd"
[updates]
weighting = "uniform"
"""


def test_its_halves_and_its_modes() -> None:
    spec = parse_job(JOB)
    assert build_rule(spec).requirements.algorithm == "easgd"
    assert build_rule(spec).unit_weights
    assert parse_job(JOB + '[mode]\nkind = "buffered"\nconcurrency = 3\nstaleness = "constant"\n').buffered is not None
    turns = JOB.replace("goal = 4", "goal = 1") + '[mode]\nkind = "ssp"\nconcurrency = 3\nslack = 1\n'
    assert parse_job(turns).stale_synchronous is not None
    assert parse_job(JOB + 'max_norm = 3.0\n[compression]\nuplink = { codec = "none", zstd = true }\n')


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "[privacy]\nnoise_multiplier = 1.0\ndelta = 1e-5\nmax_releases = 3\nparticipation = 'fixed'\n",
            r"privacy: a client's difference from the centre is not clipped",
        ),
        ("[secure_aggregation]\n", "secure_aggregation: the server decodes a mean of clipped updates"),
        ("[robust]\nbyzantine = 1\n[robust.rule]\nname = 'median'\n", "robust: such a rule leaves out or shortens"),
        ("clip_norm = 1.0\n", "updates.clip_norm, updates.adaptive_clip: a client would lose more"),
        ("[updates.adaptive_clip]\n", "updates.clip_norm, updates.adaptive_clip: a client would lose more"),
        ("[compression]\nuplink = { codec = 'bf16' }\n", 'compression.uplink: with the codec "bf16" the centre'),
        (
            "[compression]\nuplink = { codec = 'topk', fraction = 0.1 }\n",
            r'compression.uplink: .* expected none, or \{ codec = "none", zstd = true \}',
        ),
        ("[compression]\ndownlink = { codec = 'bf16' }\n", "compression.downlink: the centre would gain less"),
        ("[mode]\nkind = 'buffered'\nconcurrency = 3\n", 'mode.staleness = "polynomial": .* expected "constant"'),
    ],
)
def test_what_would_break_the_sum_is_refused(more: str, message: str) -> None:
    with pytest.raises(JobFileError, match=rf'aggregation.rule = "easgd": .*{message}'):
        parse_job(JOB + more)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(JobFileError, match=r"updates.clip_norm, .*; compression.downlink: "):
        parse_job(JOB + "clip_norm = 1.0\n[compression]\ndownlink = { codec = 'bf16' }\n")


def test_both_halves_are_needed() -> None:
    with pytest.raises(JobFileError, match=r'expected \[config\] algorithm = "easgd"'):
        parse_job(JOB.replace('algorithm = "easgd"\n', ""))
    with pytest.raises(JobFileError, match=r'config.algorithm = "easgd": .* expected \[aggregation\] rule = "easgd"'):
        parse_job(JOB.replace('rule = "easgd"', 'rule = "fedavg"'))
    with pytest.raises(JobFileError, match=r'it needs \[updates\] weighting = "uniform"'):
        parse_job(JOB.replace("uniform", "examples"))
