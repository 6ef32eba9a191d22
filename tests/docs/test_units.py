"""The units of docs/machines.md are valid for systemd, and their options are those of the programs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.docs.blocks import ROOT

UNITS = dict(
    re.findall(
        r"^# /etc/systemd/system/(\S+\.service)\n(.*?)^```$", (ROOT / "docs/machines.md").read_text(), re.M | re.DOTALL
    )
)
BIN = Path(sys.executable).parent


def test_client_and_server_have_a_unit() -> None:
    assert sorted(UNITS) == ["fedplat-client.service", "fedplat-server.service"]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_valid(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    (tmp_path / name).write_text(UNITS[name].replace("/opt/fedplat/bin", str(BIN)))
    done = subprocess.run(
        [analyze, "verify", "--man=no", tmp_path / name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if name in line]) == (0, [])


@pytest.mark.parametrize("name", UNITS)
def test_the_program_has_the_options_of_the_unit(name: str) -> None:
    (command,) = re.findall(r"^ExecStart=/opt/fedplat/bin/(\S+ run) ", UNITS[name], re.M)
    program, *words = command.split()
    help_text = subprocess.run(
        [BIN / program, *words, "--help"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    options = re.findall(r" (--[\w-]+)", re.findall(r"^ExecStart=(.*)$", UNITS[name], re.M)[0])
    assert options
    assert set(options) <= set(re.findall(r"--[\w-]+", help_text))
