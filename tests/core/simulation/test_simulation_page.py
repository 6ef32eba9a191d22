"""docs/simulation.md: its Python code runs, from top to bottom."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from fedplat.job import parse_job

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "simulation.md").read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.slow
def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", page)
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        exec(compile(block, "simulation.md", "exec"), page.__dict__)
    assert (tmp_path / "pictures" / "accuracy.png").is_file()
    assert capsys.readouterr().out.startswith("configuration  seeds  last accuracy  best accuracy  rounds to 0.5")
    assert parse_job(page.file.job_text()) == page.named
