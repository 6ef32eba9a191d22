"""Modules in the folder where a server was started do not run in the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat import aggregate
from fedplat.model import Parameters
from fedplat_server.training import evaluation
from fedplat_server.workers.client import LocalRank
from fedplat_server.workers.tasks import Echo
from support.pool import pool

PLANTED = ("torch", "multiprocessing", "msgspec")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with planted modules; a file appears there if one of them runs."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write('{name} ')\n")
    (folder / "scores.py").write_text("from beside import score\n")
    (folder / "beside.py").write_text("def score(parameters):\n    return {'size': float(parameters['w'].size)}\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return folder


def ran(planted: Path) -> str:
    found = planted / "ran"
    return found.read_text() if found.exists() else ""


@pytest.mark.slow
async def test_the_rank_of_the_daemon(planted: Path) -> None:
    rank = LocalRank("gloo")
    try:
        async with rank.start_task("echo", Echo(["a"]), lambda note: None) as session:
            assert (await session.result(Echo)).texts == ["a"]
    finally:
        await rank.close()
        assert ran(planted) == ""


@pytest.mark.slow
async def test_the_ranks_of_a_pool(planted: Path, tmp_path: Path) -> None:
    with pool(tmp_path, 1) as running:
        await running.ready()
        assert {rank.environ()["PYTHONSAFEPATH"] for rank in running.ranks().values()} == {"1"}
    assert ran(planted) == ""


@pytest.mark.slow
def test_the_ranks_of_a_measurement(planted: Path) -> None:
    command = [
        str(Path(sys.executable).parent / "fedplat-server"),
        "pool",
        "bench",
        "--ranks",
        "2",
        "--max-size",
        "4KB",
    ]
    done = subprocess.run([*command, "--collective", "broadcast"], check=False, capture_output=True, timeout=600)
    assert b"busbw" in done.stdout, done.stderr
    assert ran(planted) == ""


@pytest.mark.parametrize("reference", ["scores:score", "{folder}/scores.py:score"])
async def test_the_process_of_evaluators_which_still_finds_what_lies_beside_one(planted: Path, reference: str) -> None:
    model = planted / "model.safetensors"
    model.write_bytes(Parameters.from_arrays({"w": np.zeros(3, np.float32)}).to_bytes())
    process = evaluation._EvaluationProcess()  # pyright: ignore[reportPrivateUsage]
    try:
        found = await process.run(reference.format(folder=planted), model, aggregate.FedAvg(), 120.0)
    finally:
        process.end()
    assert found == {"size": 3.0}
    assert ran(planted) == ""
    assert "PYTHONSAFEPATH" not in os.environ, "the programs that this process starts later need their own folders"
