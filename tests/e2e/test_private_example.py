"""The private example: a stated epsilon, over the real server, with a client that is killed and two that are late."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest
from dp_accounting.pld import privacy_loss_distribution as losses

from fedplat.job import parse_job
from support import processes

pytestmark = pytest.mark.slow

EXAMPLE = processes.ROOT / "examples" / "private"


def test_it_learns_and_shows_the_epsilon_of_the_rounds_that_were_committed(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command = [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder)]
    with processes.processes([command], log) as [run]:  # with its server, should it hang
        code = processes.exit_code(run, 150.0, log, folder / "server.log", folder / "clients.log")
    assert code == 0, log.read_text()
    last = re.fullmatch(r"PRIVATE OK (.*)", log.read_text().splitlines()[-1])
    assert last is not None
    shown = {name: float(value) for name, _, value in (word.partition("=") for word in last[1].split())}
    spec = parse_job((EXAMPLE / "job.toml").read_text())
    assert spec.privacy is not None
    assert spec.privacy.epsilon is not None
    assert shown["accuracy"] > 0.6  # chance is 0.1
    assert (shown["delta"], shown["killed"]) == (spec.privacy.delta, 1)
    assert shown["late"] >= 2
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as database:
        (committed,) = database.execute("SELECT count(*) FROM model_versions WHERE version > 0").fetchone()
    assert shown["rounds"] == committed == spec.rounds
    summary = json.loads((folder / "summary.json").read_text())
    multiplier = summary["privacy"]["noise_multiplier"]
    release = losses.from_gaussian_mechanism(multiplier, sampling_prob=spec.selection.sampling.rate)  # type: ignore[union-attr]
    expected = release.self_compose(committed).get_epsilon_for_delta(spec.privacy.delta)
    assert summary["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert summary["epsilon"] <= spec.privacy.epsilon
