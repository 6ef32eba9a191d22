"""Changes of a TOML file keep its comments, and any value can be written."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fedplat.config.toml_text import change_text, format_toml, write_toml
from support.sweeps import BASE

VALUES: list[Any] = [
    *(True, 7, -1.5, 1e-05, 1e16, "plain", 'quotes " and \\ and \n', "é \x7f", [], [1, 2], ["a", "b # c"]),
    *({}, {"kind": "lognormal", "median": 50.0}, {"a key": [{"b": 1}]}),
]


@pytest.mark.parametrize("value", VALUES)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert tomllib.loads(f"value = {format_toml(value)}")["value"] == value
    tables = {"plain": value, "a b": {"c": value, "inner": {"d": value}}, "empty": {}}
    assert tomllib.loads(write_toml(tables)) == tables


def test_changed_lines_keep_their_comments_and_all_others_are_unchanged() -> None:
    changes = {"config.learning_rate": 1e-05, "name": "a # b", "config.momentum": 0.9, "updates.clip_norm": 1.0}
    changed = change_text(BASE, changes)
    expected = (
        BASE.replace("learning_rate = 0.3 # of SGD", "learning_rate = 1e-05 # of SGD\nmomentum = 0.9")
        .replace('name = "digits" # the job', 'name = "a # b" # the job')
        .rstrip()
    )
    assert changed == expected + "\n\n[updates]\nclip_norm = 1.0\n"


def test_a_key_at_the_top_is_added_before_the_tables() -> None:
    changed = change_text("# head\n[a]\nb = 1\n", {"rounds": 5, "a.c.d": 1})
    assert changed == "# head\nrounds = 5\n[a]\nb = 1\n\n[a.c]\nd = 1\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a = [\n  1,\n  2,\n]\n", "a"),
        ("a = { b = 1, c = 2 } # inline\n", "a.b"),
        ("a.b.c = 1\n[d]\n", "a.b.c"),
        ('a = """\nb = 1\n"""\n', "b"),
        ("['a b']\n'c#d' = 'x # y' # z\n", '"a b"."c#d"'),
        ("[[a]]\nb = 1\n[c]\nb = 2\n", "c.b"),
        ("[a]\nx = 1\n[[b]]\nx = 1\n", "a.x"),
        ("a = 1", "b.c"),
    ],
)
def test_the_result_is_right_however_the_file_is_written(text: str, key: str) -> None:
    expected = tomllib.loads(text)
    table = expected
    *outer, last = {'"a b"."c#d"': ["a b", "c#d"]}.get(key, key.split("."))
    for part in outer:
        table = table.setdefault(part, {})
    table[last] = "new"
    assert tomllib.loads(change_text(text, {key: "new"})) == expected
