"""The example of secure aggregation, with fewer clients: three are killed, and the server once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fedplat.job import calibrate, parse_job
from support import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.fault("S1", "S2")]

EXAMPLE = processes.ROOT / "examples" / "secure"
CLIENTS, ROUNDS = 14, 5


def test_the_server_learns_sums_only_while_clients_and_the_server_are_killed(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command = [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder), "--needed-accuracy", "0"]
    command += ["--clients", str(CLIENTS), "--rounds", str(ROUNDS)]
    with processes.processes([command], log) as [run]:  # with its server, should it hang
        code = processes.exit_code(run, 300.0, log, folder / "server.log")
    assert code == 0, log.read_text()
    last = re.fullmatch(r"SECURE OK (.*)", log.read_text().splitlines()[-1])
    assert last is not None
    shown = {name: float(value) for name, _, value in (word.partition("=") for word in last[1].split())}
    spec = calibrate(parse_job((EXAMPLE / "job.toml").read_text()))
    assert spec.privacy is not None
    assert spec.privacy.epsilon is not None
    assert 0.0 < shown["epsilon"] <= spec.privacy.epsilon
    assert (shown["rounds"], shown["killed"], shown["server_killed"]) == (ROUNDS, 3, 1)
    seen = json.loads((folder / "summary.json").read_text())["seen"]
    goal = CLIENTS - 4
    # A thread of the demo looks for files that exist for a moment only: on a busy machine it finds some of them.
    assert 0 < seen["masked_updates"] <= shown["rounds"] * CLIENTS * 2
    assert seen["correlation_of_one"] < seen["correlation_of_the_sum"]
    assert seen["clients_with_both"] == 0 < seen["clients_with_key_shares"] < seen["clients_with_seed_shares"]
    assert seen["messages"]["keys"]["number"] >= ROUNDS * goal
