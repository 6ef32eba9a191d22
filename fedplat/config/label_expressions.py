"""Expressions over client labels, such as `region == 'eu' and memory_mb >= 4096`.

The language is a small subset of Python: comparisons (`== != < <= > >= in not in`), `and`, `or`, `not`, parentheses,
names (labels), strings, numbers, and lists of strings and numbers. Python's parser reads it, and this module interprets
the tree; nothing is ever evaluated as Python. Labels are text; compared with a number, a label is parsed as a number.
A comparison is false if the client does not have the label, or if the label must be a number and is not one.
`x not in [...]` is true if the client has x and x equals no member.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fedplat.errors import LabelError

Labels = Mapping[str, str]
Predicate = Callable[[Labels], bool]
_Scalar = str | float

MAX_LENGTH = 1000
_OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@lru_cache(maxsize=256)
def compile_expression(text: str) -> Predicate:
    """Compile an expression to a predicate over labels; empty text accepts every client.

    Raises `LabelError`, which shows the part that is invalid.

    >>> compile_expression("memory_mb >= 4096")({"memory_mb": "8192"})
    True
    """
    if not text.strip():
        return _always
    if len(text) > MAX_LENGTH:
        raise LabelError(f"the expression has {len(text)} characters; at most {MAX_LENGTH} are accepted")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _predicate(tree.body)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as exc:
        raise LabelError(
            f"{text!r} is not an expression over labels ({exc}); "
            "expected, for instance: region == 'eu' and memory_mb >= 4096"
        ) from exc


def _always(_: Labels) -> bool:
    return True


def _predicate(node: ast.expr) -> Predicate:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = [_predicate(value) for value in values]
            every = all if isinstance(op, ast.And) else any
            return lambda labels: every(part(labels) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _predicate(operand)
            return lambda labels: not inner(labels)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            chain = [left, *comparators]
            links = [_comparison(chain[i], op, chain[i + 1]) for i, op in enumerate(ops)]
            return lambda labels: all(link(labels) for link in links)
        case _:
            raise LabelError(
                f"{ast.unparse(node)!r} is not a condition; expected a comparison such as region == 'eu', "
                "joined by and, or, not"
            )


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Predicate:
    if isinstance(op, ast.In | ast.NotIn):
        value, members = _scalar(left), _members(right)
        wanted = isinstance(op, ast.In)
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
    compare = _OPERATORS.get(type(op))
    if compare is None:
        raise LabelError(f"the operator {type(op).__name__} is not supported; expected == != < <= > >= in, not in")
    first, second = _scalar(left), _scalar(right)

    def holds(labels: Labels) -> bool:
        a, b = first(labels), second(labels)
        return a is not None and b is not None and _compare(compare, a, b)

    return holds


def _compare(compare: Callable[[Any, Any], bool], left: _Scalar, right: _Scalar) -> bool:
    """Compare as numbers if either side is a number, else as text."""
    if isinstance(left, str) and isinstance(right, str):
        return compare(left, right)
    try:
        a, b = float(left), float(right)
    except ValueError:
        return False
    return not (math.isnan(a) or math.isnan(b)) and compare(a, b)


def _scalar(node: ast.expr) -> Callable[[Labels], _Scalar | None]:
    if isinstance(node, ast.Name):
        name = node.id
        return lambda labels: labels.get(name)
    value = _constant(node)
    return lambda _: value


def _members(node: ast.expr) -> list[_Scalar]:
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(element) for element in node.elts]
    raise LabelError(f"{ast.unparse(node)!r} is not a list; expected, for instance: region in ['eu', 'us']")


def _constant(node: ast.expr) -> _Scalar:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Constant(value=bool()) | ast.UnaryOp(operand=ast.Constant(value=bool())):
            pass
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -float(number)
        case _:
            pass
    raise LabelError(f"{ast.unparse(node)!r} is not a label, text or number")
