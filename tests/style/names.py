"""Names are standard terms: one word for each concept, verbs for functions."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator

from style.sources import Finding, Sources, is_property

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


def check(sources: Sources) -> Iterator[Finding]:
    yield from find_shared_classes(sources)
    for source in sources.modules():
        for function in source.functions:
            if is_participle(function.name.strip("_")) and not is_property(function):
                yield Finding(source.path, function.lineno, f"{function.name}: a participle alone; better: a verb")
        for node in source.nodes:
            for name in filter(is_refused, names(node)):
                yield Finding(source.path, getattr(node, "lineno", 0), f"{name}: not a term of the field")


def find_shared_classes(sources: Sources) -> Iterator[Finding]:
    """Yield the public classes whose name another module of the distributions has, too."""
    places: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for source in sources.modules():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((source.path, node.lineno))
    for name, (first, *others) in places.items():
        for path, line in others:
            yield Finding(path, line, f"class {name}: {first[0]}:{first[1]} has a class of this name")


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


@functools.cache
def is_refused(name: str) -> bool:
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return not words.isdisjoint(REFUSED_WORDS)
