"""Evaluators are foreign code: whatever one does, rounds continue, and the daemon stops when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedplat.aggregate import FedAvg, Scaffold
from fedplat.aggregate.drift import with_control
from fedplat_server import retries
from fedplat_server.errors import StoreUnavailableError
from fedplat_server.training import evaluation
from support import daemons
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file

EVALUATORS = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def good(parameters):
    parameters["weight"] += 1  # its own copy
    return {"first": parameters["bias"][0], "process": os.getpid()}

def raises(parameters):
    raise RuntimeError("no data today")

def exits(parameters):
    raise SystemExit("enough")

def interrupts(parameters):
    raise KeyboardInterrupt

class Peculiar(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def peculiar(parameters):
    raise Peculiar(1, 2)

def nan(parameters):
    return {"accuracy": float("nan")}

def nothing(parameters):
    return None

def dies(parameters):
    os._exit(3)

def sometimes(parameters):
    '''Dies the first time.'''
    if not (HERE / "died").exists():
        (HERE / "died").touch()
        os._exit(3)
    return good(parameters)

def hangs(parameters):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (HERE / "hangs").write_text(str(os.getpid()))
    while True:
        time.sleep(3600)
"""


FAILING = ("raises", "exits", "interrupts", "peculiar", "nan", "nothing")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "evaluators.py"
    path.write_text(EVALUATORS)
    return path


def names(file: Path) -> dict[str, str]:
    functions = (*FAILING, "good", "dies", "sometimes", "hangs")
    return {name: f"{file}:{name}" for name in functions}


def scored(name: str, rounds: int) -> str:
    return job_file(goal=1, rounds=rounds, more=f'[evaluation]\nserver = "{name}"')


def gone(process_id: int) -> None:
    """Waits until the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process_id).wait(daemons.PATIENCE_S)


async def train(site: Site, rounds: int) -> None:
    client = await site.enroll()
    for seed in range(rounds):
        await client.deliver((await client.assignment()).token, update_of(initial_model(), seed))


@pytest.mark.slow
async def test_those_that_fail_cost_a_score_and_nothing_else(
    folder: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with daemons.running(folder, evaluators=names(file)) as site:
        jobs: list[str] = []
        for name in (*FAILING, "good"):
            jobs.append(await site.operator.start(scored(name, 1).replace('"toy"', f'"{name}"', 1)))
            await train(site, 1)
            assert (await site.operator.events(jobs[-1]))[-1].to_state in ("COMPLETED", "1")
        for job in jobs[:-1]:
            assert not (await site.operator.versions(job))[-1].metrics
        assert "process" in (await site.operator.versions(jobs[-1]))[-1].metrics
    log = capsys.readouterr().out
    for said in ("RuntimeError: no data today", "SystemExit: enough", "KeyboardInterrupt", "Peculiar: 1", "is nan"):
        assert said in log
    assert "in raises" in log  # the evaluator's author needs its traceback
    assert "the evaluation process died" not in log


def test_metrics_that_take_too_much_room_are_refused(tmp_path: Path) -> None:
    path, evaluator = tmp_path / "model", tmp_path / "many.py"
    path.write_bytes(daemons.initial_model().to_bytes())
    evaluator.write_text("def many(parameters):\n    return {f'metric-{n}': 1.0 for n in range(1000)}")
    failure = evaluation.score(f"{evaluator}:many", str(path), FedAvg())
    assert isinstance(failure, evaluation.Failure)
    assert "1000 metrics take 39890 bytes; at most 32768 are stored" in failure.error


def test_evaluators_see_the_model_without_what_the_rule_keeps_in_it(tmp_path: Path) -> None:
    path, evaluator = tmp_path / "model", tmp_path / "names.py"
    path.write_bytes(with_control(initial_model()).to_bytes())
    evaluator.write_text("def count(parameters):\n    return dict.fromkeys(parameters, 1.0)")
    own, kept = (
        evaluation.score(f"{evaluator}:count", str(path), rule) for rule in (Scaffold(num_clients=9), FedAvg())
    )
    assert own == {"weight": 1.0, "bias": 1.0}
    assert kept == {"weight": 1.0, "bias": 1.0, "control/weight": 1.0, "control/bias": 1.0}


async def test_one_whose_process_dies_costs_a_score_and_nothing_else(folder: Path, file: Path) -> None:
    async with daemons.running(folder, evaluators=names(file)) as site:
        job = await site.operator.start(scored("dies", 2))
        await train(site, 2)
        history = await site.operator.events(job)
        assert history[-1].to_state == "COMPLETED"
        assert not any(event.metrics for event in history if event.entity == "version")


@pytest.mark.slow
async def test_one_that_died_costs_one_score_only(folder: Path, file: Path) -> None:
    async with daemons.running(folder, evaluators=names(file)) as site:
        job = await site.operator.start(scored("sometimes", 4))
        await train(site, 4)
        await site.operator.events(job)
        versions = await site.operator.versions(job)
        assert [bool(version.metrics) for version in versions] == [False, False, True, True, True]
        assert len({version.metrics["process"] for version in versions[2:]}) == 1


@pytest.mark.slow
async def test_one_that_hangs_is_ended_after_its_time(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the evaluator that hangs has a short timeout: the other may start its process slowly."""

    async def run(process: Any, reference: str, path: Path, rule: Any, timeout_s: float) -> Any:
        return await really_run(process, reference, path, rule, 0.5 if reference.endswith(":hangs") else timeout_s)

    really_run = evaluation._EvaluationProcess.run  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(evaluation._EvaluationProcess, "run", run)  # pyright: ignore[reportPrivateUsage]
    async with daemons.running(folder, evaluators=names(file)) as site:
        hanging = await site.operator.start(scored("hangs", 1))
        await train(site, 1)
        good = await site.operator.start(scored("good", 1).replace('"toy"', '"other"', 1))
        await train(site, 1)
        assert (await site.operator.events(hanging))[-1].to_state == "COMPLETED"
        await site.operator.events(good)
        assert (await site.operator.versions(good))[-1].metrics


async def test_stopping_does_not_wait_for_one_that_hangs(folder: Path, file: Path) -> None:
    async with daemons.running(folder, evaluators=names(file)) as site:
        job = await site.operator.start(scored("hangs", 2))
        await train(site, 2)
        await site.operator.until(job, "job", "COMPLETED")

        async def hangs() -> bool:
            return (file.parent / "hangs").exists() and (file.parent / "hangs").read_text() != ""

        await daemons.until(hangs, "the evaluator to hang")
    await asyncio.to_thread(gone, int((file.parent / "hangs").read_text()))


@pytest.mark.slow
async def test_what_was_not_scored_is_scored_after_a_restart(folder: Path, file: Path) -> None:
    async with daemons.running(folder, evaluators={"good": names(file)["hangs"]}) as site:
        job = await site.operator.start(scored("good", 1))
        await train(site, 1)
        await site.operator.until(job, "job", "COMPLETED")
    async with daemons.running(folder, evaluators=names(file)) as site:
        await site.operator.events(job)
        assert (await site.operator.versions(job))[-1].metrics


@pytest.mark.calm("counts the calls of the store")
async def test_a_score_waits_for_a_database_that_is_away(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "BACKGROUND_RETRY_S", 0.01)
    async with daemons.running(folder, evaluators=names(file)) as site:
        tries = 0

        async def away() -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise StoreUnavailableError("away")

        site.store.before["set_version_metrics"] = away
        job = await site.operator.start(scored("good", 1))
        await train(site, 1)
        await site.operator.events(job)
        assert (await site.operator.versions(job))[-1].metrics
        assert tries == 3


@pytest.mark.slow
def test_the_process_ends_when_the_daemon_is_killed(tmp_path: Path) -> None:
    """The processes of a standard pool would wait for work forever."""
    script = tmp_path / "daemon.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from fedplat.aggregate import FedAvg\n"
        "from fedplat_server.training import evaluation\n"
        "async def main():\n"
        "    process = evaluation._EvaluationProcess()\n"
        "    print((await process.run(sys.argv[1], Path(sys.argv[2]), FedAvg(), 60.0))['process'], flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    (tmp_path / "evaluators.py").write_text(EVALUATORS)
    model = tmp_path / "model.safetensors"
    model.write_bytes(initial_model().to_bytes())
    command = [sys.executable, str(script), f"{tmp_path / 'evaluators.py'}:good", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        evaluator = int(float(daemon.stdout.readline()))
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
    gone(evaluator)
