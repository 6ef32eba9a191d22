"""`fedplat simulate` with secure aggregation: its output, its run folder, its plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedplat.cli.app import app
from fedplat.model import Parameters
from support.cli.runner import CliRunner

DIGITS = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 2
[model]
initial = "fedplat.pytorch.models:digits_2nn"
[config]
epochs = 1
batch_size = 32
learning_rate = 0.1
[selection]
goal = 8
over_selection = 1.0
[updates]
weighting = "uniform"
clip_norm = 2.0
[secure_aggregation]
metrics = { loss = [0.0, 5.0] }
[simulation]
engine = "loop"
[simulation.data]
source = "digits"
[simulation.partition]
scheme = "iid"
clients = 8
"""


@pytest.mark.slow
def test_a_job_file_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits.toml").write_text(DIGITS)
    done = CliRunner().invoke(app, ["simulate", "digits.toml"])
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stdout.splitlines() if line.startswith("secure sums")]
    assert "a client pays" in line
    assert "lost clients: none" in line
    assert "without keys" not in line
    assert Path("runs/digits/secure.png").stat().st_size > 10_000
    found = json.loads(Path("runs/digits/results.json").read_text())
    assert found["secure_aggregation"]["protocol"] == "real"
    assert found["secure_aggregation"]["committed"] == 2
    lines = [json.loads(line) for line in Path("runs/digits/rounds.jsonl").read_text().splitlines()]
    assert all(each["secure"]["steps"]["UNMASKING"] <= 8 for each in lines)
    size = Parameters.from_bytes(Path("runs/digits/model.safetensors").read_bytes()).schema.num_floating
    assert all(4 * size < each["secure"]["bytes_up"] < 4 * size + 5000 for each in lines)

    settings = ["--set", "simulation.secure_aggregation=model", "--dir", "modelled", "--no-plots", "--json"]
    modelled = CliRunner().invoke(app, ["simulate", "digits.toml", *settings])
    assert modelled.exit_code == 0, modelled.output
    assert json.loads(modelled.stdout)["secure_aggregation"]["protocol"] == "model"
    models = [Path(folder, "model.safetensors").read_bytes() for folder in ("runs/digits", "modelled")]
    assert models[0] == models[1]


def test_a_wrong_choice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    path.write_text(DIGITS.replace('engine = "loop"', 'secure_aggregation = "maybe"'))
    done = CliRunner().invoke(app, ["simulate", str(path)])
    assert done.exit_code == 2
    assert "simulation.secure_aggregation" in done.output
