"""The table `[mode]` of a job file."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fedplat.errors import JobFileError
from fedplat.job import parse_job

SMALL = """\
name = "a"
population = "p"
trainer = "t"
rounds = 3
[model]
initial = "m:f"
[selection]
goal = 4
"""


def test_the_mode():
    assert parse_job(SMALL).buffered is None
    assert parse_job(SMALL).num_wanted == 6
    spec = parse_job(f"{SMALL}[mode]\nkind = 'buffered'\nconcurrency = 50\nmax_staleness = 3\n")
    assert spec.buffered is not None
    assert spec.num_wanted == 50
    assert [spec.buffered.is_too_stale(tau) for tau in (0, 3, 4)] == [False, False, True]
    assert (spec.weight(100), spec.weight(100, 3)) == (100, 50)


MISTAKES: Mapping[str, tuple[str, str]] = {
    "a buffer of unknown concurrency": (
        f"{SMALL}[mode]\nkind = 'buffered'\n",
        "mode.concurrency: this key is required and missing",
    ),
    "an unknown mode": (
        f"{SMALL}[mode]\nkind = 'fast'\nconcurrency = 3\n",
        "mode.kind = 'fast': expected one of sync, buffered",
    ),
    "an option of another weight": (
        f"{SMALL}[mode]\nkind = 'buffered'\nconcurrency = 3\nstaleness = 'hinge'\nexponent = 0.5\n",
        'mode.exponent = 0.5: expected with staleness = "polynomial" only, and it is "hinge"',
    ),
    "whole cohorts": (
        f"{SMALL}sampling = {{policy = 'poisson', rate = 0.1}}\n[mode]\nkind = 'buffered'\nconcurrency = 3\n",
        'selection.sampling.policy = "poisson": it draws whole cohorts; expected mode.kind = "sync"',
    ),
    "a buffer that closes at a deadline": (
        f"{SMALL}close = 'deadline'\n[mode]\nkind = 'buffered'\nconcurrency = 3\n",
        'selection.close = "deadline": a buffer closes at its goal; expected mode.kind = "sync"',
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(text: str, message: str):
    with pytest.raises(JobFileError) as caught:
        parse_job(text)
    assert str(caught.value) == message
