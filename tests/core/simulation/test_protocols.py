"""Each kind of job has a behaviour of its clients in the simulator."""

from __future__ import annotations

from fedplat.rounds.protocols.registry import ALL
from fedplat.rounds.states import AttemptKind
from fedplat.simulation.protocols.registry import KINDS

_OF_ATTEMPTS = {"evaluation", "warm_start"}


def test_each_kind_of_job_is_simulated() -> None:
    assert {*KINDS} == {protocol.name for protocol in ALL} - _OF_ATTEMPTS
    assert len(_OF_ATTEMPTS) == len(AttemptKind) - 1
