"""docs/sweeps.md: its files are valid, it names every key, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from fedplat import sweep
from fedplat.sweep import plan
from support.sweeps import BASE

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "sweeps.md").read_text("utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL))
RECORDS = [
    *(plan.SweepOptions, plan.SearchOptions, plan.MedianStopping, plan.SuccessiveHalving),
    *(plan.FloatRange, plan.LogRange, plan.IntegerRange, plan.Choices),
]


def test_its_files_are_valid(tmp_path: Path) -> None:
    assert FILES["digits-sweep.toml"] == (ROOT / "examples" / "digits-sweep.toml").read_text()
    assert sweep.read(ROOT / "examples" / "digits-sweep.toml").num_runs == 18
    assert "18 runs (6 configurations, 3 seeds)" in PAGE
    (tmp_path / "digits-iid.toml").write_text((ROOT / "examples" / "digits-iid.toml").read_text())
    (tmp_path / "search.toml").write_text(FILES["search.toml"])
    assert sweep.read(tmp_path / "search.toml").num_runs == 24


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_it_names_every_key(record: type[Struct]) -> None:
    config = record.__struct_config__
    names = [*record.__struct_fields__, *([str(config.tag)] if config.tag else [])]
    missing = [name for name in names if not re.search(rf"`\[*{name}\]*`", PAGE)]
    assert not missing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits-iid.toml").write_text(BASE)
    (tmp_path / "digits-sweep.toml").write_text(FILES["digits-sweep.toml"].replace("[0, 1, 2]", "[0]"))
    (code,) = re.findall(r"<!-- code -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "sweeps.md", "exec"), found)
    assert len(found["result"].rows) == 6
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"curves.png", "heatmap.png"}
