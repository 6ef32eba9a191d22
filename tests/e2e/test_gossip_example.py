"""The example of a decentralised job, with fewer rounds: a silo and the server are killed, and two links are cut."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

EXAMPLE = processes.ROOT / "examples" / "gossip"
SILOS, ROUNDS = 8, 15


def test_silos_agree_though_one_and_the_server_are_killed_and_links_are_cut(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command = [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder), "--rounds", str(ROUNDS)]
    with processes.processes([command], log) as [run]:  # with its server, should it hang
        code = processes.exit_code(run, 400.0, log, folder / "server.log")
    assert code == 0, log.read_text()
    last = re.fullmatch(r"GOSSIP OK (.*)", log.read_text().splitlines()[-1])
    assert last is not None
    shown = {name: float(value) for name, _, value in (word.partition("=") for word in last[1].split())}
    assert 0.0 < shown["distance"] <= 0.02
    assert shown["rounds"] > ROUNDS  # with those without training
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["cut_rounds"] == [8, 9, 10, 11]
    assert summary["killed_in_round"] > 0
    assert summary["server_killed_in_round"] > 0
    assert len(summary["gossip"]["silo_bytes"]) == SILOS
    exports = {path.read_bytes() for path in folder.glob("silo-*/exports/*.safetensors")}
    assert len(exports) == 1
    # No silo's model in the server's files; the demo itself looks for parts of them.
    assert not [path for path in (folder / "blobs").rglob("*") if path.is_file() and path.read_bytes() in exports]
