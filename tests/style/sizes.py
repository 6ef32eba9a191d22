"""No file is too long: past 400 lines or so, look for the missing concept."""

from __future__ import annotations

from collections.abc import Iterator

from style.sources import PACKAGES, Finding, Sources

MAX_LINES = 500


def check(sources: Sources) -> Iterator[Finding]:
    """Find modules with more than `MAX_LINES` whose docstring gives no reason ("... lines because ...")."""
    for source in sources:
        if (
            source.is_module
            and source.is_in(*PACKAGES, "examples", "benchmarks", "tests")
            and "_pb2" not in source.path
        ):
            num_lines = source.text.count("\n")
            if num_lines > MAX_LINES and "lines because" not in source.text[:1500]:
                yield Finding(source.path, num_lines, f"{num_lines} lines, of at most {MAX_LINES}")
