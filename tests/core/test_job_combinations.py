"""Every pair of parts of a job is accepted or refused as `fedplat.job.combinations` lists it, and nothing else is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
from msgspec import NODEFAULT, Struct, structs

from fedplat.config.toml import read_record
from fedplat.errors import JobFileError
from fedplat.job import JobSpec, checks, combinations
from fedplat.job.combinations import (
    BUFFERED,
    COMBINES,
    CYCLIC,
    DISTILL,
    ELASTIC,
    GOSSIP,
    STALE_SYNCHRONOUS,
    SYNC,
    may_combine,
)
from fedplat.job.tables import JobTables

Table = dict[str, Any]
BASE: Table = {
    **{"name": "j", "population": "p", "trainer": "t", "rounds": 3, "model": {"initial": "m:f"}},
    "selection": {"goal": 10},
}
UNIFORM, CLIPPED = {"weighting": "uniform"}, {"weighting": "uniform", "clip_norm": 1.0}
LEARNING: Table = {"trainer": "t", "batch_size": 8, "learning_rate": 0.1}
PARTS: Mapping[str, Table] = {
    SYNC: {},
    BUFFERED: {"mode": {"kind": "buffered", "concurrency": 20, "staleness": "constant"}},
    STALE_SYNCHRONOUS: {"mode": {"kind": "ssp", "concurrency": 8, "slack": 2}, "selection": {"goal": 1}},
    CYCLIC: {"mode": {"kind": "cyclic", "clients": 3}, "selection": {"goal": 1}},
    GOSSIP: {"mode": {"kind": "gossip"}, "updates": UNIFORM},
    "flower": {"flower": {"app": "a"}},
    "secure_aggregation": {"secure_aggregation": {}, "updates": CLIPPED},
    "privacy": {
        "privacy": {"participation": "fixed", "delta": 1e-6, "noise_multiplier": 1.0},
        **{"updates": CLIPPED, "selection": {"close": "deadline"}},
    },
    "robust": {"robust": {"rule": {"name": "median"}, "byzantine": 1}},
    DISTILL: {"server_step": LEARNING | {"steps": 2, "method": "distill"}},
    "server_step": {"server_step": LEARNING | {"steps": 2}},
    "pool": {"pool": {"ranks": 2}},
    "durability": {"durability": "memory"},
    "evaluation.clients": {"evaluation": {"clients": {"evaluator": "e", "goal": 2}}},
    ELASTIC: {"aggregation": {"rule": "easgd"}, "config": {"algorithm": "easgd"}, "updates": UNIFORM},
    "aggregation": {"aggregation": {"rule": "fedadam"}},
    "compression.downlink": {"compression": {"downlink": {"codec": "bf16"}}},
    "compression.uplink": {"compression": {"uplink": {"codec": "none", "zstd": True}}},
    "evaluation.every": {"evaluation": {"every": 2}},
    "evaluation.server": {"evaluation": {"server": "e"}},
    "retention": {"retention": {"versions": 5}},
    "updates": {"updates": {"weighting": "uniform"}},
    "warm_start": {"warm_start": LEARNING},
}
"""A small job with each part, besides what the part needs."""
TOGETHER: Mapping[frozenset[str], Table] = {
    frozenset({"privacy", "secure_aggregation"}): {"privacy": {"trust": "none", "max_releases": 9}},
    frozenset({GOSSIP, "compression.uplink"}): {"mode": {"gamma": 0.9}},
}
"""What two parts need only together."""


def merge(one: Table, other: Table) -> Table:
    both = {key: merge(one[key], value) for key, value in other.items() if isinstance(one.get(key), dict)}
    return one | other | both


def read(*parts: str) -> JobSpec:
    raw = BASE
    for each in (*(PARTS[part] for part in parts), TOGETHER.get(frozenset(parts), {})):
        raw = merge(raw, each)
    return read_record(raw, JobSpec)


def list_pairs() -> Iterator[tuple[str, str]]:
    for one, other in itertools.combinations(PARTS, 2):
        is_same_table = combinations.is_mode(one) and combinations.is_mode(other)
        if not is_same_table and {one, other} not in ({DISTILL, "server_step"}, {ELASTIC, "aggregation"}):
            yield one, other


def test_every_pair_is_accepted_or_refused_as_it_is_listed() -> None:
    pairs = [*list_pairs()]
    assert len(pairs) == 241
    for pair in pairs:
        parts, problem = try_to_read(*pair)
        assert may_combine(*pair) == (not problem), f"{pair}: {problem or 'it is accepted'}"
        assert {*pair} <= parts or problem, f"the job of {pair} has only {parts}"
        assert all(": " in line and "expected" in line.lower() for line in problem.splitlines()), problem


def test_all_keys_that_contradict_each_other_are_told_at_once() -> None:
    cyclic = merge(merge(BASE, PARTS[CYCLIC]), {"selection": {"goal": 3, "min_separation": 2}, "pool": {"ranks": 2}})
    for changes, keys in (
        ({"aggregation": {"rule": "scaffold", "num_clients": 9}, **PARTS["robust"]}, ["aggregation.rule", "robust"]),
        ({"durability": "memory", "pool": {"ranks": 2}}, ["pool"]),
    ):
        with pytest.raises(JobFileError) as caught:
            read_record(merge(cyclic, changes), JobSpec)
        found = [line.partition(" = ")[0].partition(":")[0] for line in str(caught.value).splitlines()]
        for key in (*keys, "selection.goal", "selection.min_separation"):
            assert found.count(key) == 1, caught.value
    with pytest.raises(JobFileError) as caught:
        read(CYCLIC, "pool", "server_step")
    assert str(caught.value).count("it cannot be used with") == 2


def try_to_read(*parts: str) -> tuple[set[str], str]:
    """The parts of a job that is accepted, or why it is not."""
    try:
        return {*combinations.list_parts(read(*parts))}, ""
    except JobFileError as exc:
        return set(), str(exc)


def test_each_part_of_a_job_file_is_listed() -> None:
    """A new key has no row, and so is refused with everything until it has one."""
    named: set[str] = set()
    for field in structs.fields(JobTables):
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        if field.name in ("compression", "evaluation"):
            named |= {f"{field.name}.{key.name}" for key in structs.fields(default)}
        elif field.name == "mode":
            named |= {f'mode.kind = "{mode.__struct_config__.tag}"' for mode in get_args(field.type)}
        elif default is not NODEFAULT and field.name not in ("approval", "config", "deadlines", "retry"):
            named.add(field.name)
    assert {*COMBINES} == {*PARTS} == named | {ELASTIC, DISTILL}


class Relayed(Struct, frozen=True, tag_field="kind", tag="relayed"):
    """A mode that the table does not know."""

    clients: int = 3

    def weight(self, staleness: int) -> float:
        return 1.0


class Adapted(JobTables, frozen=True):
    """Job tables with one that the table does not know."""

    adapters: Table | None = None


def make(kind: type[JobTables], *parts: str, **fields: Any) -> JobTables:
    spec = read(*parts)
    return kind(**{name: getattr(spec, name) for name in JobTables.__struct_fields__} | fields)


@pytest.mark.parametrize("part", [part for part in PARTS if not combinations.is_mode(part)])
def test_an_unknown_mode_is_refused_with_everything(part: str) -> None:
    checks.check(make(JobTables, SYNC, mode=Relayed()))
    with pytest.raises(ValueError, match="expected") as caught:
        checks.check(make(JobTables, part, mode=Relayed()))
    assert all("expected" in line for line in str(caught.value).splitlines())


@pytest.mark.parametrize("part", PARTS)
def test_an_unknown_table_is_refused_with_everything(part: str) -> None:
    spec = make(Adapted, part, adapters={"rank": 8})
    with pytest.raises(ValueError, match="expected"):
        checks.check(spec)
    if part == SYNC:
        with pytest.raises(ValueError, match=r'^adapters: it cannot be used with mode.kind = "sync"; expected one'):
            checks.check(spec)


def test_the_reasons_are_of_pairs_that_are_refused() -> None:
    """A reason that is never given would be a mistake in the table, or a leftover."""
    from fedplat.job import part_checks

    for part, reasons in {
        GOSSIP: part_checks.GOSSIP_REASONS,
        "privacy": part_checks.PRIVACY_REASONS,
        "secure_aggregation": part_checks.SECURE_REASONS,
        ELASTIC: part_checks.ELASTIC_REASONS,
    }.items():
        assert reasons
        assert [other for other in reasons if may_combine(part, other)] == []
        assert reasons.keys() <= COMBINES.keys()
