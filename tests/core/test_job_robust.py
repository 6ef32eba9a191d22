"""The table `[robust]` of a job file."""

from __future__ import annotations

import pytest

from fedplat import aggregate
from fedplat.aggregate.robust import (
    MAX_ROBUST_UPDATES,
    ROBUST_RULES,
    Bucketing,
    CenteredClipping,
    Krum,
    NearestNeighbours,
    Robust,
)
from fedplat.errors import JobFileError
from fedplat.job import build_rule, parse_job
from support.rules import NEEDED

SMALL = """
name = "a"
population = "p"
trainer = "t"
rounds = 3
[model]
initial = "m:f"
[selection]
goal = {goal}
min_fraction = {min_fraction}
{more}
"""


def job(more: str, goal: int = 10, min_fraction: float = 0.8) -> str:
    return SMALL.format(goal=goal, min_fraction=min_fraction, more=more)


def table(rule: str, byzantine: int = 2, more: str = "") -> str:
    return f"[robust]\nbyzantine = {byzantine}\nrule = {{{rule}}}\n{more}"


def test_the_mean_is_not_robust_by_default() -> None:
    spec = parse_job(job(""))
    assert spec.robust is None
    assert build_rule(spec).gather is None


def test_rules_and_what_is_put_before_them() -> None:
    text = table("name = 'krum'", more="before = [{name = 'nearest'}, {name = 'bucketing', size = 1}]\n")
    spec = parse_job(job("[aggregation]\nrule = 'fedadam'\n" + text))
    assert spec.robust == Robust(Krum(), 2, (NearestNeighbours(), Bucketing(size=1)))
    rule = build_rule(spec, seed=5)
    assert rule.gather is not None
    assert set(rule.init(3)) == {"first_moment", "second_moment"}
    spec = parse_job(job(table("name = 'centered-clipping', radius = 3")))
    assert spec.robust == Robust(CenteredClipping(radius=3.0), 2)
    assert set(build_rule(spec).init(3)) == {"clipping_centre"}


@pytest.mark.parametrize("name", ROBUST_RULES)
def test_too_many_byzantine_updates_are_refused(name: str) -> None:
    """By what is enough to close an attempt, not by the goal."""
    more = {"centered-clipping": ", radius = 1", "fltrust": ", trusted = ['c']"}.get(name, "")
    fewest = {"krum": 7, "multi-krum": 7, "bulyan": 11, "fltrust": 3}.get(name, 5)
    rule = f"name = '{name}'{more}"
    assert parse_job(job(table(rule), goal=fewest, min_fraction=1.0)).robust is not None
    with pytest.raises(JobFileError) as caught:
        parse_job(job(table(rule), goal=fewest, min_fraction=1 - 1 / fewest))
    assert str(caught.value) == (
        f"robust: {name} with byzantine = 2 needs at least {fewest}, not {fewest - 1} updates: this number may close "
        "an attempt, ceil(min_fraction x goal); raise selection.goal or selection.min_fraction, or lower "
        "robust.byzantine"
    )


@pytest.mark.parametrize("name", aggregate.RULES)
def test_it_replaces_the_mean_of_server_optimizers_only(name: str) -> None:
    algorithm = name if name in ("scaffold", "feddyn", "easgd") else ""
    config = f"[config]\nalgorithm = '{algorithm}'\n" if algorithm else ""
    more = "".join(f"{key} = {value}\n" for key, value in NEEDED.get(name, {}).items())
    rest = f"[updates]\nweighting = 'uniform'\n[aggregation]\nrule = '{name}'\n{more}" + table("name = 'median'")
    text = job(config + rest)
    if aggregate.RULES[name].works_on_mean:
        assert build_rule(parse_job(text)).gather is not None
    else:
        own = {
            "easgd": "robust: such a rule leaves out",
            **dict.fromkeys(("fedex_lora", "flora"), "robust: .* one update"),
        }
        plain = f"robust: expected aggregation.rule = fedavg, .*; {name} has a mean"
        with pytest.raises(JobFileError, match=own.get(name, plain)):
            parse_job(text)


@pytest.mark.parametrize(
    ("more", "mistake"),
    [
        (table("name = 'krumm'"), "robust.rule.name = 'krumm': expected one of median, "),
        ("[robust]\nbyzantine = 2\nrule = 'krum'", "robust.rule = 'krum': expected a table, [robust.rule]"),
        ("[robust]\nrule = {name = 'krum'}", "robust.byzantine: this key is required and missing"),
        (table("name = 'krum'", byzantine=-1), "robust.byzantine = -1: expected a whole number >= 0"),
        (table("name = 'centered-clipping'"), "robust.rule.radius: this key is required and missing"),
        (table("name = 'centered-clipping', radius = 0"), "robust.rule.radius = 0: expected a number > 0"),
        (table("name = 'fltrust', trusted = []"), "robust.rule.trusted = […]: expected array of length >= 1"),
        (
            table("name = 'krum'", more="before = [{name = 'buckets'}]"),
            "robust.before[0].name = 'buckets': expected one of",
        ),
        (
            table("name = 'krum'", more="before = [{name = 'nearest'}, {name = 'bucketing', size = 0}]"),
            "robust.before[1].size = 0: expected a whole number >= 1",
        ),
        (table("name = 'krum'", more="before = ['nearest']"), "robust.before[0] = 'nearest': expected a table"),
        (
            table("name = 'krum'", 1, "before = [{name = 'bucketing', size = 2}]"),
            "robust: krum with byzantine = 1 needs at least 5, not 8 updates, of which pre-aggregation makes 4: ",
        ),
        (
            table("name = 'fltrust', trusted = ['c']", more="before = [{name = 'nearest'}]"),
            "robust.before = [...]: expected none with fltrust",
        ),
    ],
)
def test_mistakes_are_named(more: str, mistake: str) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_job(job(more))
    assert str(caught.value).startswith(mistake)


def test_so_many_updates_cannot_be_read_side_by_side() -> None:
    assert parse_job(job(table("name = 'median'"), goal=MAX_ROBUST_UPDATES)).robust is not None
    with pytest.raises(JobFileError, match=r"selection.goal = 1001: expected at most 1000 with \[robust\]"):
        parse_job(job(table("name = 'median'"), goal=MAX_ROBUST_UPDATES + 1))
    late = "over_selection = 1.5\nclose = 'deadline'\n"  # then all who were assigned may report
    assert parse_job(job(late + table("name = 'median'"), goal=600)).robust is not None
    with pytest.raises(JobFileError, match=r"selection.over_selection x goal = 1050: expected at most 1000"):
        parse_job(job(late + table("name = 'median'"), goal=700))
