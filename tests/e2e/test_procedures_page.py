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
    server, sites, result, released = (block.text for block in blocks if block.language == "bash" and not block.marker)
    (decide,) = (block.text for block in blocks if block.marker.startswith("not run: the digest"))
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    environment = {**os.environ, **home, "OMP_NUM_THREADS": "1", "PATH": f"{processes.BIN}:/usr/bin:/bin"}

    def bash(script: str) -> str:
        command = ["bash", "-ec", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    within = ["env", "-C", str(tmp_path), *(f"{name}={environment[name]}" for name in ("PATH", *home))]
    command = [*within, *server.split(), "--listen", f"127.0.0.1:{processes.free_port()}", "--dashboard="]
    with processes.processes([command], tmp_path / "server.log"):
        processes.until((tmp_path / "fedplat-data" / "demo.ticket").exists, "the ticket")
        with AdminClient(profile.load(tmp_path / "config/fedplat/profile.toml")) as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
            script = f"set -e\ntrap 'kill $(jobs -p) || true' EXIT\n{sites}\nwait"
            with processes.processes([[*within, "bash", "-c", script]], tmp_path / "sites.log"):
                processes.until(
                    lambda: bool(admin.list_jobs()) and len(admin.list_clients()) == len(SITES), "the sites"
                )
                digest = json.loads(bash("fedplat job check job.toml --json"))["digest"]
                review, approve = decide.splitlines()
                short = approve.split()[2]
                assert digest.startswith(short)
                assert admin.show_job("age-and-crp").round == 0
                for site in SITES:  # with the whole digest, the site need not have been offered the job
                    bash(approve.replace(short, digest).replace("north", site))
                printed = bash(result)
                assert "sums: the sum of the values, for each column" in bash(review)
            assert json.loads(admin.result("age-and-crp").to_json()) == json.loads(printed.splitlines()[-1])
    shown = (tmp_path / "sites.log").read_text()
    assert "rows: how many rows have a value, for each column; 2 numbers from -1e+06 to 1e+06, once" in shown
    found = json.loads(printed.splitlines()[-1])
    assert (found["sites"], found["steps"]) == (5, 1)
    pooled = pd.concat([pd.read_csv(tmp_path / f"{site}.csv") for site in SITES])
    for name in ("age", "crp"):
        column = found["result"]["columns"][name]
        assert column["mean"] == pytest.approx(pooled[name].mean(), rel=1e-12)
        assert column["standard_error"] == pytest.approx(pooled[name].sem(), rel=1e-12)
    assert "age-and-crp" in bash(released)
