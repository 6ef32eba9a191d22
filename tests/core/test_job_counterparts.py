"""Rules whose other half is the clients' work."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import build_rule, parse_job

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


def test_the_number_of_clients_is_needed() -> None:
    text = JOB.format(rule="scaffold", algorithm="scaffold", weighting="uniform").replace("num_clients = 10", "")
    with pytest.raises(JobFileError, match=r"aggregation.num_clients: this key is required and missing"):
        parse_job(text)
