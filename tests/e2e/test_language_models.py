"""Adapters of a language model on a real server: a client and the server die in a round, and the bits are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
from fedplat.admin import AdminClient
from fedplat.model import Parameters
from fedplat.pytorch.huggingface import HuggingFaceLearner
from support import deployment, language, language_client, processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow
LEARNER = HuggingFaceLearner(model=language.make_adapted)
START = LEARNER.initial()
THIRD = (3, "TRAINING")


def submit(admin: AdminClient, folder: Path) -> str:
    folder.mkdir()
    text = write_job(
        folder.name,
        population=folder.name,
        trainer="chat",
        rounds=4,
        selection={"goal": 2, "min_fraction": 1.0},
        deadlines={"heartbeat_s": 0.2},
        retry={"base_s": 0.1},
        config={
            **{"max_steps": 3, "keep_optimizer": True, "schedule": "job"},
            **{"base_sha256": LEARNER.base_sha256()},
        },
    )
    return deployment.submit_file(admin, folder, text, START)


def finish(admin: AdminClient, job: str, folder: Path) -> Parameters:
    deployment.completed(admin, job)
    header = len(START.to_bytes()) - len(START.buffer)
    sizes = [each.update_bytes for each in admin.iter_assignments(job=job, round_=4)]
    assert sizes == [4 * 896 + header] * 2
    return deployment.exported(admin, job, folder)


def kill_in_the_third_round(server: processes.Server, job: str, folder: Path, ticket: str) -> None:
    """Run the first silo in a process of its own until it trains in the third round; then it and the server die."""
    mark = folder / "training"
    tests = Path(__file__).resolve().parents[1]
    script = ["env", f"PYTHONPATH={tests}", sys.executable, language_client.__file__]
    with processes.processes([[*script, ticket, str(folder / "silo-0"), str(mark)]], folder / "silo.log") as running:
        with server.admin() as admin:
            next(event for event in admin.watch_job(job) if (event.round, event.to_state) == THIRD)
        processes.until(mark.exists, "the training of the third round")
        running[0].kill()
        server.kill()
    server.start()


def test_a_silo_and_the_server_are_killed_and_the_adapters_have_the_same_bits(tmp_path: Path) -> None:
    results: list[Parameters] = []
    with processes.server(tmp_path / "server") as server:
        for name in ("undisturbed", "killed"):
            folder = tmp_path / name
            with server.admin() as admin:
                job = submit(admin, folder)
            tickets = [server.ticket(name) for _ in range(2)]
            with at_work([language_client.make_silo(tickets[1], folder / "silo-1", 1)]):
                if name == "killed":
                    kill_in_the_third_round(server, job, folder, tickets[0])
                with at_work([language_client.make_silo(tickets[0], folder / "silo-0", 0)]), server.admin() as admin:
                    results.append(finish(admin, job, folder))
    undisturbed, killed = results
    assert not np.array_equal(undisturbed.buffer, START.buffer)
    np.testing.assert_array_equal(killed.buffer, undisturbed.buffer)
