"""How a job file says whom an attempt draws."""

from __future__ import annotations

import pytest

from fedplat import sampling
from fedplat.errors import JobFileError
from fedplat.job import Selection, parse_job
from support.jobs import SMALL

POLICIES = "uniform, poisson, weighted, stratified, oort"
MISTAKES = {
    "an unknown policy": ("{ policy = 'random' }", f"sampling.policy = 'random': expected one of {POLICIES}"),
    "a typo": (
        "{ policy = 'wieghted' }",
        f"sampling.policy = 'wieghted': expected one of {POLICIES}; did you mean weighted?",
    ),
    "no policy": ("{ rate = 0.1 }", f"sampling.policy: this key is required and missing; expected one of {POLICIES}"),
    "a name alone": ("'uniform'", "sampling = 'uniform': expected a table, [selection.sampling]"),
    "an option of another policy": (
        "{ policy = 'poisson', rate = 0.1, label = 'region' }",
        "sampling.label = 'region': there is no such key; known keys: rate",
    ),
    "a rate above 1": ("{ policy = 'poisson', rate = 1.5 }", "sampling.rate = 1.5: expected a number <= 1.0"),
    "no rate": ("{ policy = 'poisson' }", "sampling.rate: this key is required and missing"),
    "no label to stratify by": ("{ policy = 'stratified' }", "sampling.label: this key is required and missing"),
    "other shares": (
        "{ policy = 'stratified', label = 'region', shares = 'even' }",
        "sampling.shares = 'even': expected one of proportional, equal",
    ),
    "no preferred duration": ("{ policy = 'oort' }", "sampling.pacer_s: this key is required and missing"),
    "more exploration at the end": (
        "{ policy = 'oort', pacer_s = 9, exploration = 0.1 }",
        "sampling.min_exploration = 0.2: expected at most exploration, which is 0.1",
    ),
}


@pytest.mark.parametrize(("value", "message"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_named(value: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_job(f"{SMALL}sampling = {value}\n")
    assert str(caught.value) == f"selection.{message}"


def test_a_policy_is_a_table_too() -> None:
    spec = parse_job(f"{SMALL}[selection.sampling]\npolicy = 'stratified'\nlabel = 'region'\n")
    assert spec.selection.sampling == sampling.Stratified(label="region")
    assert not spec.selection.remembers


def test_the_past_is_remembered_for_those_who_ask() -> None:
    assert not Selection(4).remembers
    assert Selection(4, min_separation=1).remembers
    assert Selection(4, sampling=sampling.Weighted()).remembers
    assert not Selection(4, sampling=sampling.Weighted(label="size")).remembers
    assert Selection(4, sampling=sampling.Oort(pacer_s=1.0)).remembers
