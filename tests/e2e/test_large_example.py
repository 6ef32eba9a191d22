"""The example of a model that is divided among ranks, with a smaller model: the losses and bits of single processes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

pytest.importorskip("torch")
EXAMPLE = processes.ROOT / "examples" / "large"
SMALLER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 32}


def test_divided_models_learn_what_single_processes_learn(tmp_path: Path) -> None:
    folder, log, config = tmp_path / "run", tmp_path / "run.log", tmp_path / "config.json"
    config.write_text(json.dumps(json.loads((EXAMPLE / "config.json").read_text()) | SMALLER))
    command = [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder), "--config", str(config)]
    command += ["--characters", "12000", "--rounds", "1"]
    with processes.processes([command], log) as [run]:  # with its server, should it hang
        logs = [folder / f"{name}.log" for name in ("server", "pool", "sharded", "pipelined")]
        code = processes.exit_code(run, 400.0, log, *logs)
    assert code == 0, log.read_text()
    last = re.fullmatch(r"LARGE OK (.*)", log.read_text().splitlines()[-1])
    assert last is not None
    shown = {name: float(value) for name, _, value in (word.partition("=") for word in last[1].split())}
    assert shown["difference"] <= 1e-5
    assert shown["equal"] == 1
    # A fourth of what is divided in both ways, and half of the embedding and the output.
    assert 0.25 < shown["memory_pool"] < 0.5
    assert 0.5 <= shown["memory_sharded"] < 0.51
    assert 0.5 < shown["memory_pipelined"] < 0.67
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["divided"]["digests"][1:] == summary["again"]["digests"]
    assert summary["divided"]["losses"][-1] < summary["divided"]["losses"][0]


def test_a_text_that_is_too_short_is_named(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command = [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder), "--characters", "9000000"]
    with processes.processes([command], log) as [run]:
        code = processes.exit_code(run, 100.0, log)
    assert code == 1
    assert re.search(r"LARGE FAILED .* characters; expected 9,000,000\. Set FEDPLAT_DATA", log.read_text())
