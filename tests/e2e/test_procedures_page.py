"""docs/procedures.md is true: its five sites answer, and the result has the numbers of the pooled table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from fedplat.admin import AdminClient, profile
from support import processes
from support.docs.blocks import read

SITES = ("north", "east", "south", "west", "centre")


@pytest.mark.slow
def test_its_five_sites_have_the_numbers_of_the_pooled_table(tmp_path: Path) -> None:
    blocks = list(read("docs/procedures.md"))
    for block in blocks:
        if block.marker.startswith("file: "):
            (tmp_path / block.marker.removeprefix("file: ")).write_text(block.text)
    server, operator, released = (block.text for block in blocks if block.language == "bash")
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    environment = {**os.environ, **home, "OMP_NUM_THREADS": "1", "PATH": f"{processes.BIN}:/usr/bin:/bin"}

    def bash(script: str) -> str:
        script = f"set -e\ntrap 'kill $(jobs -p) || true' EXIT\n{script}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    variables = [f"{name}={environment[name]}" for name in ("PATH", *home)]
    command = ["env", "-C", str(tmp_path), *variables, *server.split()]
    command += ["--listen", f"127.0.0.1:{processes.free_port()}", "--dashboard="]
    with processes.processes([command], tmp_path / "server.log"):
        processes.until((tmp_path / "fedplat-data" / "demo.ticket").exists, "the ticket")
        with AdminClient(profile.load(tmp_path / "config/fedplat/profile.toml")) as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
            printed = bash(operator)
            assert json.loads(admin.result("age-and-crp").to_json()) == json.loads(printed.splitlines()[-1])
    assert "rows: how many rows have a value, for each column; 2 numbers from -1e+06 to 1e+06, once" in printed
    found = json.loads(printed.splitlines()[-1])
    assert (found["sites"], found["steps"]) == (5, 1)
    pooled = pd.concat([pd.read_csv(tmp_path / f"{site}.csv") for site in SITES])
    for name in ("age", "crp"):
        column = found["result"]["columns"][name]
        assert column["mean"] == pytest.approx(pooled[name].mean(), rel=1e-12)
        assert column["standard_error"] == pytest.approx(pooled[name].sem(), rel=1e-12)
    assert "age-and-crp" in bash(released)
