"""Expressions over client labels, such as `region == 'eu' and memory_mb >= 4096` (`fedplat.config.expressions`).

Labels are text; compared with a number, a label is parsed as a number. A comparison is false if the client does not
have the label, or if the label must be a number and is not one. `x not in [...]` is true if the client has x and x
equals no member.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fedplat.config.expressions import (
    MAX_LENGTH,
    Condition,
    ExpressionError,
    Junction,
    Language,
    MembershipTest,
    NamedValue,
    Negation,
    Scalar,
    Term,
    ValueComparison,
)
from fedplat.errors import LabelError

Labels = Mapping[str, str]
Predicate = Callable[[Labels], bool]

_LANGUAGE = Language("label", "region == 'eu' and memory_mb >= 4096", "region == 'eu'", "region in ['eu', 'us']")


@lru_cache(maxsize=256)
def compile_expression(text: str) -> Predicate:
    """Compile an expression to a predicate over labels; empty text accepts every client.

    Raises `LabelError`, which shows the part that is invalid.

    >>> compile_expression("memory_mb >= 4096")({"memory_mb": "8192"})
    True
    """
    if not text.strip():
        return _always
    try:
        return _predicate(_LANGUAGE.parse(text))
    except (ExpressionError, RecursionError) as exc:
        raise LabelError(str(exc)) from exc


def _always(_: Labels) -> bool:
    return True


def _predicate(condition: Condition) -> Predicate:
    match condition:
        case Junction(parts=parts, every=is_every):
            predicates = [_predicate(part) for part in parts]
            every = all if is_every else any
            return lambda labels: every(predicate(labels) for predicate in predicates)
        case Negation(part=part):
            inner = _predicate(part)
            return lambda labels: not inner(labels)
        case MembershipTest():
            return _membership(condition)
        case ValueComparison(left=left, compare=compare, right=right):
            first, second = _scalar(left), _scalar(right)

            def holds(labels: Labels) -> bool:
                a, b = first(labels), second(labels)
                return a is not None and b is not None and _compare(compare, a, b)

            return holds


def _membership(condition: MembershipTest) -> Predicate:
    value, members, wanted = _scalar(condition.value), condition.members, condition.wanted
    texts = frozenset(member for member in members if isinstance(member, str))
    numbers = [member for member in members if not isinstance(member, str)]

    def contains(labels: Labels) -> bool:
        actual = value(labels)
        if actual is None:
            return False
        if isinstance(actual, str):  # a label; text equals only text, and this runs at every check-in
            is_member = actual in texts or any(_compare(operator.eq, actual, number) for number in numbers)
        else:
            is_member = any(_compare(operator.eq, actual, member) for member in members)
        return is_member is wanted

    return contains


def _compare(compare: Callable[[Any, Any], bool], left: Scalar, right: Scalar) -> bool:
    """Compare as numbers if either side is a number, else as text."""
    if isinstance(left, str) and isinstance(right, str):
        return compare(left, right)
    try:
        a, b = float(left), float(right)
    except ValueError:
        return False
    return not (math.isnan(a) or math.isnan(b)) and compare(a, b)


def _scalar(term: Term) -> Callable[[Labels], Scalar | None]:
    if isinstance(term, NamedValue):
        name = term.name
        return lambda labels: labels.get(name)
    return lambda _: term


__all__ = ["MAX_LENGTH", "Labels", "Predicate", "compile_expression"]
