"""The units in `systemd/`, which docs/runbook.md installs, are valid, and their options are those of the programs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.docs import commands
from support.docs.blocks import ROOT

UNITS = {path.name: path.read_text() for path in sorted((ROOT / "systemd").glob("*.service"))}
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "systemd").iterdir())])
def test_a_unit_is_valid(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    for path in (ROOT / "systemd").iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/fedplat/bin", str(BIN)))
    done = subprocess.run(
        [analyze, "verify", "--man=no", tmp_path / name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if name in line]) == (0, [])


@pytest.mark.parametrize("name", UNITS)
def test_the_program_has_the_options_of_the_unit(name: str) -> None:
    (line,) = re.findall(r"^ExecStart=/opt/fedplat/bin/(.*)$", UNITS[name], re.M)
    (command,) = commands.find(line.removesuffix(" $FEDPLAT_OPTIONS"))
    assert command.program
    assert not commands.check(command)
