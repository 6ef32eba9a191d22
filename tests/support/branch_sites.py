"""Prints the number of places that ask for the kind of a job or of an attempt; `--list` prints each of them.

    PYTHONPATH=tests python -m support.branch_sites --list

What distinguishes one kind of job from another belongs to the object of the kind. So this counts, everywhere but in
`protocols/` and in the checks of the job file: comparisons of a table of the job file with None, comparisons with a
kind of attempt, and uses of functions and attributes that answer one of these questions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("fedplat", "server/fedplat_server", "client/fedplat_client")
OWN: Final = re.compile(r"_pb2|/protocols/|^fedplat/job/")
"""The places that may ask: each kind's own files, and the checks of the job file. Generated code asks nothing."""
TABLES: Final = frozenset(
    {
        *("buffered", "clocks", "cyclic", "exchange", "flower", "gossip", "privacy", "procedure", "secure"),
        *("secure_aggregation", "stale_synchronous", "warm_start"),
    }
)
"""Attributes that are None for jobs of other kinds; `exchange` is also the name of a variable."""
FUNCTIONS: Final = frozenset(
    {
        *("is_secure", "_is_secure", "is_gossip", "fills_buffer", "is_warm_start", "makes_release", "hides_sample"),
        *("needed_features", "is_wanted", "may_be_secure", "adds_own_noise"),
    }
)
ATTRIBUTES: Final = frozenset({"fills_cohort", "is_gossip"})
KINDS: Final = "AttemptKind"
_WORDS: Final = re.compile(
    rf"\.(?:{'|'.join(sorted(TABLES | ATTRIBUTES))})\b|\b(?:{'|'.join(sorted({*FUNCTIONS, KINDS}))})\b|\bexchange is\b"
)
"""What a module with such a place contains."""


class Site(NamedTuple):
    """A place that asks."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def find_sites(root: Path = ROOT) -> list[Site]:
    """Return the places of a checkout, in the order of files and lines."""
    sites: list[Site] = []
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not OWN.search(name):
            sites += [Site(name, line) for line in find_lines(path.read_text("utf-8"))]
    return sorted(sites)


def find_lines(text: str) -> list[int]:
    """Return the line of each place of a module that asks."""
    if not _WORDS.search(text):
        return []  # most modules: parsing is what takes time
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr | ast.If) and _asks(node)]


def _asks(node: ast.expr | ast.If) -> bool:
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
            is_none = any(isinstance(side, ast.Constant) and side.value is None for side in sides)
            return (is_none and any(map(_is_table, sides))) or any(map(_names_kind, sides))
        case ast.Call():
            return _name(node.func) in FUNCTIONS
        case ast.Attribute(ctx=ast.Load()):
            return node.attr in ATTRIBUTES
        case ast.If(test=ast.Attribute(attr=attribute)) | ast.IfExp(test=ast.Attribute(attr=attribute)):
            return attribute in TABLES
        case _:
            return False


def _is_table(side: ast.expr) -> bool:
    if isinstance(side, ast.Name):
        return side.id == "exchange"
    return isinstance(side, ast.Attribute) and side.attr in TABLES


def _names_kind(side: ast.expr) -> bool:
    """Return whether an expression names a kind of attempts, alone or in a tuple."""
    return any(isinstance(each, ast.Attribute) and _name(each.value) == KINDS for each in ast.walk(side))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def main() -> None:
    """Print the places, or how many there are by package."""
    sites = find_sites()
    if "--list" in sys.argv[1:]:
        print(*sites, sep="\n")
    print(f"{len(sites)} sites in {len({site.path for site in sites})} files", *_count_by_part(sites), sep="\n  ")


def _count_by_part(sites: list[Site]) -> Iterator[str]:
    for part in ("fedplat/rounds/", "fedplat/simulation/", "server/", "client/"):
        found = [site for site in sites if site.path.startswith(part)]
        yield f"{part} {len(found)} in {len({site.path for site in found})}"


if __name__ == "__main__":
    main()
