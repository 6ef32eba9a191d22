"""The job of docs/coming-from.md trains on a real server with a client of each trainer, to the weight that it names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from support import processes
from support.docs.blocks import read


@pytest.mark.slow
def test_its_job_runs(tmp_path: Path) -> None:
    files = {block.marker.removeprefix("file: "): block.text for block in read("docs/coming-from.md")}
    for name in ("trainer.py", "torch_trainer.py", "job.toml"):
        (tmp_path / name).write_text(files[name])
    with processes.server(tmp_path / "server") as server:
        (tmp_path / "ticket").write_text(server.ticket("demo", 2))
        client = f"env -C {tmp_path} {processes.BIN}/fedplat-client run --ticket-file ticket --trainer linear="
        trainers = {"one": "trainer:train", "two": "torch_trainer:trainer"}
        clients = [f"{client}{trainer} --data-dir {name}".split() for name, trainer in trainers.items()]
        environment = {**os.environ, "FEDPLAT_PROFILE": str(server.profile_path), "OMP_NUM_THREADS": "1"}
        with processes.processes(clients, tmp_path / "clients.log"):
            for command in ("job submit job.toml --follow", "model export linear --to final.safetensors"):
                words = [processes.BIN / "fedplat", *command.split()]
                done = subprocess.run(
                    words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
                )  # fmt: skip
                assert done.returncode == 0, done.stdout + done.stderr
    weight = Parameters.open(tmp_path / "final.safetensors")["weight"]
    np.testing.assert_allclose(weight, [1.0, -2.0, 0.5], atol=0.05)
