"""Parsing of TOML texts of others in bounded memory.

`tomllib` keeps every beginning of a dotted key, so a key of n parts costs n²/2 pointers (CPython issue 149231): one key
of 30 KB takes a gigabyte. So keys are counted before they are parsed.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_PARTS = 32
"""Parts of a dotted key, such as 2 in `rounds.goal`."""
MAX_COST = 4_000_000
"""Pointers that the beginnings of all dotted keys may take, in a table with a header of `MAX_PARTS`."""
_TOKEN = re.compile(
    r"""
    (?P<text> \"{3}(?:\\.|[^\\])*?\"{3,5} | '{3}.*?'{3,5} | \"(?:\\.|[^\"\\\n])*\" | '[^'\n]*' | [A-Za-z0-9_-]+ )
    | (?P<dot> \. ) | (?P<space> [ \t]+ ) | \#[^\n]* | [^"'#.A-Za-z0-9_\ \t-]+ | .
    """,
    re.VERBOSE | re.DOTALL,
)


def loads(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises `tomllib.TOMLDecodeError` also for dotted keys that would take too much memory.

    >>> loads("a.b = 1")
    {'a': {'b': 1}}
    >>> loads("a" + 40 * ".a" + " = 1")
    Traceback (most recent call last):
      ...
    tomllib.TOMLDecodeError: a key has more than 32 parts (at line 1)
    """
    _check_keys(text)
    return tomllib.loads(text)


def _check_keys(text: str) -> None:
    """Raise `tomllib.TOMLDecodeError` for a dotted key with too many parts, or too many of them.

    Whatever has the form of a dotted key counts, also where TOML has a number.
    """
    num_parts, is_after_dot, cost = 0, False, 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "space":
            continue
        if kind == "dot":
            is_after_dot = True
        elif kind == "text" and is_after_dot and num_parts:
            num_parts, is_after_dot = num_parts + 1, False
            cost += num_parts + MAX_PARTS if num_parts > 2 else 0  # a number has two parts
            if num_parts > MAX_PARTS or cost > MAX_COST:
                line = text.count("\n", 0, token.start()) + 1
                reason = f"a key has more than {MAX_PARTS} parts" if num_parts > MAX_PARTS else "too many dotted keys"
                raise tomllib.TOMLDecodeError(f"{reason} (at line {line})")
        else:
            num_parts, is_after_dot = int(kind == "text"), False
