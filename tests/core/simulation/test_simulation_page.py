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
    printed = capsys.readouterr().out
    assert printed.startswith("job            digits-dirichlet, seed 1\nstatus         COMPLETED\n")
    assert "\nconfiguration  seeds  last accuracy  best accuracy  rounds to 0.5" in printed
    assert parse_job(page.file.job_text()) == page.named
