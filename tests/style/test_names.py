"""Names are standard terms: one word for each concept, verbs for functions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from style.sources import functions, is_property, modules

IRREGULAR = frozenset(
    [
        "begun",
        "bought",
        "brought",
        "built",
        "caught",
        "chosen",
        "dealt",
        "done",
        "drawn",
        "driven",
        "fallen",
        "felt",
        "found",
        "given",
        "gone",
        "got",
        "grown",
        "heard",
        "held",
        "hidden",
        "kept",
        "known",
        "laid",
        "led",
        "left",
        "lent",
        "lost",
        "made",
        "met",
        "paid",
        "proven",
        "said",
        "seen",
        "sent",
        "shown",
        "sold",
        "sought",
        "spent",
        "spoken",
        "stood",
        "struck",
        "sworn",
        "taken",
        "told",
        "torn",
        "understood",
        "woken",
        "won",
        "written",
    ]
)
VERBS = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"})
"""Verbs that end as a participle does."""
REFUSED_WORDS = frozenset(
    [
        "nobody",
        "whoever",
        "somebody",
        "stranger",
        "strangers",
        "crew",
        "crews",
        "desk",
        "hop",
        "door",
        "doors",
        "elsewhere",
        "nowhere",
        "obituary",
        "obey",
        "hear",
        "hears",
        "gathered",
    ]
)


def test_the_name_of_a_public_class_is_unique_over_the_distributions() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_function_is_named_by_a_participle_alone() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in modules().items()
        for node in functions(tree)
        if is_participle(node.name.strip("_")) and not is_property(node)
    ]
    assert not found, "\n".join(found)


def is_participle(name: str) -> bool:
    return name not in VERBS and (name in IRREGULAR or (name.endswith("ed") and "_" not in name))


def names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case _:
            pass


def test_identifiers_use_the_fields_terms() -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}: {name}"
        for path, tree in modules().items()
        for node in ast.walk(tree)
        for name in names(node)
        if {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)} & REFUSED_WORDS
    ]
    assert not found, "\n".join(found)
