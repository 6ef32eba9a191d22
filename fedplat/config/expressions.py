"""The language of conditions, such as `region == 'eu' and memory_mb >= 4096`, over labels or columns.

It is a small subset of Python: comparisons (`== != < <= > >= in not in`), `and`, `or`, `not`, parentheses, names,
strings, numbers, and lists of strings and numbers. Python's parser reads it, and this module turns the tree into
records; nothing is ever evaluated as Python. What the names stand for is decided by the modules that use it.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

MAX_LENGTH = 1000
Scalar: TypeAlias = str | float
Operator: TypeAlias = Callable[[Any, Any], Any]
_OPERATORS: Mapping[type[ast.cmpop], Operator] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclasses.dataclass(frozen=True)
class NamedValue:
    """The value of a label, or of a column in each row."""

    name: str


Term: TypeAlias = NamedValue | Scalar


@dataclasses.dataclass(frozen=True)
class ValueComparison:
    """True where `compare(left, right)` is."""

    left: Term
    compare: Operator
    right: Term


@dataclasses.dataclass(frozen=True)
class MembershipTest:
    """True where a value is one of the members, or, unless it is `wanted`, where it is a value and none of them."""

    value: Term
    members: tuple[Scalar, ...]
    wanted: bool


@dataclasses.dataclass(frozen=True)
class Junction:
    """True where every part is, or any."""

    parts: tuple[Condition, ...]
    every: bool


@dataclasses.dataclass(frozen=True)
class Negation:
    """True where its part is false."""

    part: Condition


Condition: TypeAlias = ValueComparison | MembershipTest | Junction | Negation


class ExpressionError(ValueError):
    """A text that is not a condition; the message shows the part that is invalid."""


@dataclasses.dataclass(frozen=True)
class Language:
    """What the names of expressions are, for messages."""

    noun: str
    """One of them, such as `label`."""
    example: str
    """A whole expression."""
    comparison: str
    """A comparison."""
    membership: str
    """A test for a list."""

    def parse(self, text: str) -> Condition:
        """Return the condition that a text states. Raises `ExpressionError`."""
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"the expression has {len(text)} characters; at most {MAX_LENGTH} are accepted")
        try:
            return self._read(ast.parse(text.strip(), mode="eval").body)
        except ExpressionError:
            raise
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as exc:
            raise ExpressionError(
                f"{text!r} is not an expression over {self.noun}s ({exc}); expected, for instance: {self.example}"
            ) from exc

    def _read(self, node: ast.expr) -> Condition:
        match node:
            case ast.BoolOp(op=op, values=values):
                return Junction(tuple(map(self._read, values)), every=isinstance(op, ast.And))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Negation(self._read(operand))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                chain = [left, *comparators]
                links = tuple(self._read_link(chain[i], op, chain[i + 1]) for i, op in enumerate(ops))
                return links[0] if len(links) == 1 else Junction(links, every=True)
            case _:
                raise ExpressionError(
                    f"{ast.unparse(node)!r} is not a condition; expected a comparison such as {self.comparison}, "
                    "joined by and, or, not"
                )

    def _read_link(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(op, ast.In | ast.NotIn):
            value = self._read_term(left)
            if not isinstance(right, ast.List | ast.Tuple):
                raise ExpressionError(
                    f"{ast.unparse(right)!r} is not a list; expected, for instance: {self.membership}"
                )
            return MembershipTest(value, tuple(map(self._read_constant, right.elts)), wanted=isinstance(op, ast.In))
        compare = _OPERATORS.get(type(op))
        if compare is None:
            name = type(op).__name__
            raise ExpressionError(f"the operator {name} is not supported; expected == != < <= > >= in, not in")
        return ValueComparison(self._read_term(left), compare, self._read_term(right))

    def _read_term(self, node: ast.expr) -> Term:
        return NamedValue(node.id) if isinstance(node, ast.Name) else self._read_constant(node)

    def _read_constant(self, node: ast.expr) -> Scalar:
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
        raise ExpressionError(f"{ast.unparse(node)!r} is not a {self.noun}, text or number")
