"""The marks of tests name rows of the fault table that exist, and none that is excused from having a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from faults import table
from style.sources import Finding, Source, Sources


def check(sources: Sources) -> Iterator[Finding]:
    excused = {row.number for row in table.ROWS if row.not_built}
    for source in sources.tests():
        for argument in named_rows(source) if ".fault(" in source.text else ():
            if not isinstance(argument, ast.Constant):
                yield Finding(source.path, argument.lineno, "rows of the fault table are named by literals")
            elif str(argument.value) not in table.NUMBERS:
                yield Finding(source.path, argument.lineno, f"the fault table has no row {argument.value}")
            elif str(argument.value) in excused:
                yield Finding(source.path, argument.lineno, f"row {argument.value} is excused from having a test")


def named_rows(source: Source) -> Iterator[ast.expr]:
    """Yield every row that a `mark.fault(...)` names, also in the marks of a parameter."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fault":
            yield from node.args
