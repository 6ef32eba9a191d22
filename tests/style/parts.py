"""No class of the server receives more than a few parts: its arguments, and the fields of records of parts among them.

A dataclass without `eq` is no record: its fields are what it receives.

Only what builds a leader, in `leader/`, sees all its parts together.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from style.sources import Finding, Sources

MAX_PARTS = 8
FOLDER, BUILDERS = "server/fedplat_server", "server/fedplat_server/leader"


def check(sources: Sources) -> Iterator[Finding]:
    """Find classes whose constructors receive more than `MAX_PARTS` parts."""
    classes = [
        (source, node)
        for source in sources
        if source.is_module and source.is_in(FOLDER) and not source.is_in(BUILDERS)
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    ]
    records = {node.name: node for _, node in classes if node.name.endswith("Parts")}
    for source, node in classes:
        num_parts = _count(node, records)
        if num_parts > MAX_PARTS and node.name not in records:
            text = f"{node.name} receives {num_parts} parts, of at most {MAX_PARTS}; what belongs together is a part"
            yield Finding(source.path, node.lineno, text)


def _count(node: ast.ClassDef, records: Mapping[str, ast.ClassDef]) -> int:
    if node.name in records or any("eq=False" in ast.unparse(each) for each in node.decorator_list):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and not _is_own(each)]
        return sum(_weigh(field.annotation, records) for field in fields)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            arguments = each.args.args[1:] + each.args.kwonlyargs
            return sum(_weigh(argument.annotation, records) for argument in arguments)
    return 0


def _is_own(field: ast.AnnAssign) -> bool:
    return field.value is not None and "init=False" in ast.unparse(field.value)


def _weigh(annotation: ast.expr | None, records: Mapping[str, ast.ClassDef]) -> int:
    """Return the number of parts that an argument brings: the fields of a record of parts, else one."""
    record = records.get(annotation.id) if isinstance(annotation, ast.Name) else None
    return 1 if record is None else _count(record, records)
