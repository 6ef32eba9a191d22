"""Every record that is decoded in a function has a type that is built beforehand: see `fedplat/config/decoding.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from style.sources import Finding, Source, Sources

PLAIN = frozenset({"str", "int", "float", "bool", "bytes", "object", "Any", "msgspec.Raw"})


def check(sources: Sources) -> Iterator[Finding]:
    for source in sources.modules():
        if source.path != "fedplat/config/decoding.py":
            for call in unprepared(source):
                yield Finding(source.path, call.lineno, f"not in prepare_type(...): {ast.unparse(call)}")


def is_plain(annotation: ast.expr) -> bool:
    """Return whether a type has no records: it is never built in steps."""
    names = {ast.unparse(node) for node in ast.walk(annotation) if isinstance(node, ast.Name | ast.Attribute)}
    return names <= PLAIN | {"dict", "list", "set", "tuple", "msgspec"}


def unprepared(source: Source) -> Iterator[ast.Call]:
    """Yield the calls within functions that decode records, or create decoders, of types that are not prepared."""
    if "msgspec." not in source.text:
        return
    within = {id(node) for function in source.functions for node in ast.walk(function)}
    for call in source.nodes:
        if not isinstance(call, ast.Call) or id(call) not in within:
            continue
        for kind in decoded_types(call):
            is_prepared = isinstance(kind, ast.Call) and ast.unparse(kind.func).endswith("prepare_type")
            if not is_prepared and not is_plain(kind):
                yield call


def decoded_types(call: ast.Call) -> list[ast.expr]:
    """List the types that a call of msgspec decodes."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("convert", "decode", "Decoder"):
        return []
    function = ast.unparse(call.func)
    if function == "msgspec.convert":
        return call.args[1:2]
    if function.startswith("msgspec.") and function.endswith((".decode", ".Decoder")):
        named = [each.value for each in call.keywords if each.arg == "type"]
        return named or (call.args[:1] if call.func.attr == "Decoder" else [])
    return []
