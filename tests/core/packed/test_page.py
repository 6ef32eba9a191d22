"""docs/packed-data.md: its commands and its code run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli.app import app
from support.cli.runner import CliRunner
from support.docs.blocks import read

BLOCKS = list(read("docs/packed-data.md"))


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found: dict[str, Any] = {}
    for block in BLOCKS:
        if block.marker.startswith("file: "):
            (tmp_path / block.marker.removeprefix("file: ")).write_text(block.text)
        elif block.language == "bash":
            for command in block.text.splitlines():
                result = CliRunner().invoke(app, shlex.split(command)[1:])
                assert result.exit_code == 0, result.output
        else:
            exec(compile(block.text, str(block), "exec"), found)
    sys.modules.pop("photos")
    assert len(found["photos"]) == len(found["data"]) == 2000
    assert len([*(tmp_path / "photos").glob("*.arrow")]) == 3
