"""Check the texts of the project: names, sentences, imports, secrets, foreign code, and the blocks of its pages.

    python tests/style/check.py

Each file is read and parsed once. Prints every finding with its file and line, and exits with 1 if there is one.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from style import (
    blocks,
    fault_rows,
    foreign_code,
    imports_of_tests,
    names,
    parts,
    prose,
    records,
    secret_arguments,
    sizes,
)
from style.sources import Finding, Sources, read

RULES = (names, prose, imports_of_tests, secret_arguments, foreign_code, records, sizes, fault_rows, blocks, parts)
MIN_FILES = 1000
"""Fewer than the project has: a check that reads nothing finds nothing."""


def find(sources: Sources) -> list[Finding]:
    """Find everything that a rule refuses, in the order of the files."""
    return sorted(finding for rule in RULES for finding in rule.check(sources))


def main() -> int:
    """Print the findings; return the exit status."""
    warnings.simplefilter("error")
    gc.disable()  # trees live as long as the program: to search them for garbage takes longer than to parse them
    sources = read()
    assert len(sources) > MIN_FILES, len(sources)
    findings = find(sources)
    print(*findings, f"{len(sources)} texts checked, {len(findings)} findings", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
