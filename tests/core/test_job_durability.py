"""The key `durability` of a job file."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import parse_job
from support.jobs import SMALL_OF_KEYS as SMALL


@pytest.mark.parametrize(
    ("line", "durability"), [("", "spool"), ("durability = 'spool'", "spool"), ("durability = 'memory'", "memory")]
)
def test_updates_lie_in_a_spool_unless_the_job_says_otherwise(line: str, durability: str) -> None:
    assert parse_job(SMALL + line).durability == durability


@pytest.mark.parametrize("value", ["'disk'", "true", "1"])
def test_there_is_nothing_else(value: str) -> None:
    with pytest.raises(JobFileError, match=f"durability = {value}: expected one of spool, memory"):
        parse_job(f"durability = {value}\n{SMALL}")
