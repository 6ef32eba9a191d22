"""Adapters of a language model on a real server: a client and the server die in a round, and the bits are the same."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
from fedplat.admin import AdminClient
from fedplat.aggregate import Accumulator, Contribution
from fedplat.client_state import ClientState
from fedplat.job import parse_job
from fedplat.job.secure import build_setup
from fedplat.model import Parameters
from fedplat.model.turns import Turn
from fedplat.pytorch.huggingface import HuggingFaceLearner
from fedplat.secure_aggregation import encoding
from fedplat_client import Task
from support import deployment, language, language_client, processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow
LEARNER = HuggingFaceLearner(model=language.make_adapted)
START = LEARNER.initial()
THIRD = (3, "TRAINING")
CLIP = 5.0


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


def make_gpt2() -> Any:
    """Two layers with factors A [4, 64] and B [192, 4] of attn.c_attn."""
    return language.with_adapters(language.make_gpt2(width=64), ("c_attn",))


@pytest.mark.parametrize("secure", [False, True])
def test_a_factor_that_rests_is_not_sent(tmp_path: Path, secure: bool) -> None:
    """RoLoRA: B is sent in odd rounds, A in even ones, also under masks, and the factor that rests keeps its bits."""
    learner, folder = HuggingFaceLearner(model=make_gpt2), tmp_path / "turns"
    folder.mkdir()
    start = learner.initial()
    config = {"max_steps": 2, "alternate": "*lora_B*, *lora_A*", "base_sha256": learner.base_sha256()}
    text = write_job(
        "turns",
        population="turns",
        trainer="chat",
        rounds=3,
        selection={"goal": 3, "min_fraction": 1.0},
        deadlines={"heartbeat_s": 0.2},
        config=config,
        updates={"clip_norm": CLIP, "outlier_factor": 0.0, "max_weight_factor": 0.0, "max_examples": 1000.0},
        more="[secure_aggregation]\nbits = 24\n" if secure else "",
    )
    versions = [start]
    with processes.server(tmp_path / "server") as server:
        silos = [
            language_client.make_silo(server.ticket("turns"), folder / str(number), number, model=make_gpt2)
            for number in range(3)
        ]
        with at_work(silos), server.admin() as admin:
            job = deployment.submit_file(admin, folder, text, start)
            deployment.completed(admin, job)
            for number in (1, 2, 3):
                sizes = {each.update_bytes for each in admin.iter_assignments(job=job, round_=number)}
                sent = 6144 if number % 2 else 2048
                if secure:
                    setup = build_setup(parse_job(text), job, number, 1, "", sent // 4)
                    assert sizes == {encoding.file_bytes(setup)}
                else:
                    header = Turn.of(str(config["alternate"]), number).select_uploaded(start.schema).header
                    assert sizes == {sent + len(header)}
                admin.export_model(job, number, folder / f"{number}.safetensors")
                versions.append(Parameters.open(folder / f"{number}.safetensors"))
    states = [ClientState() for _ in range(3)]
    data = [language_client.make_data(silo) for silo in range(3)]
    trainers = [language_client.make_trainer(lambda task, examples=each: examples, make_gpt2) for each in data]
    for number, (base, actual) in enumerate(itertools.pairwise(versions), 1):
        total, weight = np.zeros(base.schema.num_floating), 0.0
        for trainer, state in zip(trainers, states, strict=True):
            task = Task(name="chat", parameters=base.copy(), config=config, round=number, client_state=state)
            result = trainer(task)
            total += result.num_examples * result.to_update(base).to_vector().astype(float)
            weight += result.num_examples
        expected = base.plus((total / weight).astype(np.float32))
        for name in base:
            rests = ("lora_A" in name) == (number % 2 == 1)
            assert np.array_equal(base[name], actual[name]) == rests
            error = np.abs(actual[name] - expected[name]).max()
            assert error <= (3 * CLIP / 2**23 * 1000.0 / weight if secure else 1e-6)


def test_products_of_adapters_are_aggregated_exactly(tmp_path: Path) -> None:
    """FedEx-LoRA: the model has tensors of the server's own, which silos get, use and never send."""
    folder = tmp_path / "exact"
    folder.mkdir()
    config = {"max_steps": 3, "base_sha256": LEARNER.base_sha256()}
    text = write_job(
        "exact",
        population="exact",
        trainer="chat",
        rounds=3,
        selection={"goal": 2, "min_fraction": 1.0},
        deadlines={"heartbeat_s": 0.2},
        aggregation={"rule": "fedex_lora", "scaling": 2.0},
        config=config,
    )
    with processes.server(tmp_path / "server") as server:
        silos = [language_client.make_silo(server.ticket("exact"), folder / str(number), number) for number in (0, 1)]
        with at_work(silos), server.admin() as admin:
            job = deployment.submit_file(admin, folder, text, START)
            deployment.completed(admin, job)
            sizes = [each.update_bytes for each in admin.iter_assignments(job=job, round_=3)]
            actual = deployment.exported(admin, job, folder)
    assert sizes == [START.schema.file_size_bytes] * 2
    rule = parse_job(text).aggregation.build()
    expected, states = rule.requirements.extend(START), (ClientState(), ClientState())
    data = [language_client.make_data(silo) for silo in (0, 1)]
    trainers = [language_client.make_trainer(lambda task, examples=each: examples) for each in data]
    for number in (1, 2, 3):
        accumulator = Accumulator(expected.schema, rule)
        for trainer, state in zip(trainers, states, strict=True):
            task = Task(name="chat", parameters=expected.copy(), config=config, round=number, client_state=state)
            result = trainer(task)
            accumulator.fold(result.to_update(expected), Contribution(result.num_examples))
        expected, _ = accumulator.finish(expected, {})
    for name, array in expected.items():
        assert "lora_A" in name or array.any()
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=1e-6 * np.abs(array).max())
