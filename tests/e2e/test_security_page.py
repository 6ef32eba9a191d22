"""The table of attackers in docs/security.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_attacker_has_a_test_that_exists() -> None:
    section = (ROOT / "docs" / "security.md").read_text("utf-8").partition("## Attackers")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([a-z0-9_/]+\.py)(?:::(test_\w+))?`", row.rsplit("|", 2)[1])
        assert named, row
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
            functions = {
                node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert not name or name in functions, f"{file} has no {name}"
