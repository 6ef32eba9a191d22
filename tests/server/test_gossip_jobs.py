"""Decentralised jobs, which a server refuses: only the simulator runs them."""

from __future__ import annotations

import pytest

from fedplat_server.coordination import job_checks
from fedplat_server.errors import Code, RefusedError

JOB = """
name = "hospitals"
population = "demo"
trainer = "digits"
rounds = 10
model.initial = "m.safetensors"
mode.kind = "gossip"
updates.weighting = "uniform"
selection.goal = 8
"""


def test_a_server_refuses_a_decentralised_job_and_says_what_runs_it() -> None:
    spec = job_checks.parse(JOB, 10_000)
    with pytest.raises(RefusedError, match=r"servers cannot run decentralised jobs yet; simulate it") as caught:
        job_checks.check_is_runnable(spec, [], [])
    assert caught.value.code is Code.INVALID_JOB_FILE
