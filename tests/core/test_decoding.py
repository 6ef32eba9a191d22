"""Records that several threads decode for the first time at once: no crash, whatever the order of their first uses."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from fedplat.decoding import prepare_type
from style.sources import modules

RACE = """
    import sys, threading
    from typing import Annotated

    import msgspec

    from fedplat.decoding import prepare_type

    sys.setswitchinterval(1e-6)
    size = Annotated[int, msgspec.Meta(ge=0)]
    names = [f"field_{number}" for number in range(20)]
    content = msgspec.json.encode({"inner": dict.fromkeys(names, 1)})
    for turn in range(100):
        inner = msgspec.defstruct("Inner", [(name, size) for name in names])
        outer = msgspec.defstruct("Outer", [("inner", inner), *((name, dict[str, size], {}) for name in names)])
        start = threading.Barrier(8)

        def decode():
            start.wait()
            msgspec.json.decode(content, type=prepare_type(outer))

        threads = [threading.Thread(target=decode) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
"""
PLAIN = frozenset({"str", "int", "float", "bool", "bytes", "object", "Any", "msgspec.Raw"})


def test_many_threads_decode_a_new_record() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(RACE)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unsupported_type_is_refused() -> None:
    with pytest.raises(TypeError, match="more than one"):
        prepare_type(dict[str, int] | list[int] | tuple[int, ...])  # type: ignore[arg-type]


def is_plain(annotation: ast.expr) -> bool:
    """Return whether a type has no records: it is never built in steps."""
    names = {ast.unparse(node) for node in ast.walk(annotation) if isinstance(node, ast.Name | ast.Attribute)}
    return names <= PLAIN | {"dict", "list", "set", "tuple", "msgspec"}


def unprepared(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls within functions that decode records, or create decoders, of types that are not prepared."""
    functions = [part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    within = {node for part in functions for node in ast.walk(part) if isinstance(node, ast.Call)}
    for call in within:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("convert", "decode", "Decoder"):
            continue
        function = ast.unparse(call.func)
        if function == "msgspec.convert":
            kinds = call.args[1:2]
        elif function.startswith("msgspec.") and function.endswith((".decode", ".Decoder")):
            named = [each.value for each in call.keywords if each.arg == "type"]
            kinds = named or (call.args[:1] if call.func.attr == "Decoder" else [])
        else:
            continue
        for kind in kinds:
            is_prepared = isinstance(kind, ast.Call) and ast.unparse(kind.func) == "prepare_type"
            if not is_prepared and not is_plain(kind):
                yield call


def test_every_record_is_prepared() -> None:
    found = [
        f"{path}:{call.lineno} {ast.unparse(call)}"
        for path, tree in modules().items()
        if path != "fedplat/decoding.py"
        for call in unprepared(tree)
    ]
    assert found == []
