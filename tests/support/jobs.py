"""Job files, built from what a test needs to say about its job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FAR_S = 3600.0
"""A deadline that no test reaches."""
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
"""The smallest job file, to which tests add keys of the selection, and tables."""
SMALL_OF_KEYS = 'name = "a"\npopulation = "p"\ntrainer = "t"\nrounds = 1\nmodel.initial = "m:f"\nselection.goal = 4\n'
"""The same without tables, to which tests add keys of tables (`pool.ranks = 4`)."""


def write_job(
    name: str = "toy",
    *,
    population: str = "demo",
    trainer: str = "toy",
    rounds: int = 1,
    more: str = "",
    **keys: object,
) -> str:
    """A job file: the smallest that is valid, with these keys and tables in place of its own, and `more` at its end.

    Of the selection, only what is given differs: one update of one client makes a version.
    """
    selection = {"goal": 1, "over_selection": 1.0, **_table(keys.pop("selection", {}))}
    top = {"name": name, "population": population, "trainer": trainer, "rounds": rounds}
    top |= {key: value for key, value in keys.items() if not isinstance(value, Mapping)}
    tables = {"model": {"initial": "unused.safetensors"}, "selection": selection}
    tables |= {key: _table(value) for key, value in keys.items() if isinstance(value, Mapping)}
    parts = [_lines(top), *(f"[{key}]\n{_lines(table)}" for key, table in tables.items())]
    return "".join(parts) + more


def job_file(name: str = "toy", rounds: int = 1, goal: int = 2, more: str = "", **selection: object) -> str:
    """A job file for a daemon: deadlines are far away and pauses short, unless `more` has a table for them."""
    tables: dict[str, Any] = {}
    if "[deadlines]" not in more:
        tables["deadlines"] = {"training_s": FAR_S, "selection_s": FAR_S}
    if "[retry]" not in more:
        tables["retry"] = {"base_s": 0.01, "max_s": 0.01}
    chosen = {"goal": goal, "min_fraction": 1.0, **selection}
    return write_job(name, rounds=rounds, selection=chosen, more=f"{more}\n", **tables)


def _table(value: object) -> dict[str, object]:
    assert isinstance(value, Mapping)
    return {str(key): each for key, each in value.items()}


def _lines(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    """A value of TOML."""
    match value:
        case str() | bool():
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in _table(value).items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return repr(value)
