"""The example of a warm start: the same versions on a pool of two ranks and without one, over the real server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

pytest.importorskip("torch")
EXAMPLE = processes.ROOT / "examples" / "warm_start"
ROUNDS = 2  # of ten


def test_the_pool_and_the_server_alone_make_the_same_versions(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command = [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder), "--rounds", str(ROUNDS)]
    with processes.processes([command], log) as [run]:  # with its server, should it hang
        logs = [folder / f"{name}.log" for name in ("server", "pool", "clients")]
        code = processes.exit_code(run, 300.0, log, *logs)
    assert code == 0, log.read_text()
    last = re.fullmatch(r"WARM START OK (.*)", log.read_text().splitlines()[-1])
    assert last is not None
    shown = {name: float(value) for name, _, value in (word.partition("=") for word in last[1].split())}
    assert shown["versions"] == shown["equal"] == ROUNDS + 1
    assert shown["warm_start"] < 0.7 < shown["accuracy"]  # 7 of 10 digits are public
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["pool"]["digests"] == summary["alone"]["digests"]
    assert summary["pool"]["job_id"] != summary["alone"]["job_id"]
    assert "a rank for the server's own data was started" in (folder / "server.log").read_text()
