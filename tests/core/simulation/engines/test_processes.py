"""Worker processes: how they are started, fail and end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from fedplat.errors import EngineError
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from support.simulation.failing_tasks import Failing, Stuck
from support.simulation.tasks import rounds, task

BEFORE: set[BaseProcess] = set()
"""Processes of other modules: `multiprocessing` still lists one that another thread has waited for."""


@pytest.fixture
def engines() -> Generator[list[ProcessEngine]]:
    BEFORE.update(multiprocessing.active_children())
    made: list[ProcessEngine] = []
    yield made
    for engine in made:
        engine.close()
    assert not workers_now()


def workers_now() -> list[BaseProcess]:
    """The workers that still run."""
    return [process for process in multiprocessing.active_children() if process not in BEFORE]


def test_a_killed_worker_ends_the_training_with_words(engines: list[ProcessEngine]) -> None:
    given = task(Stuck)
    engine = ProcessEngine(given, 2)
    engines.append(engine)
    engine.publish(0, given.learner.initial())
    works = [ClientTask(client, 0, 0) for client in range(4)]
    engine.begin(works)
    worker = workers_now()[0]
    os.kill(worker.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"the worker process {worker.pid} was ended by SIGKILL while it"):
        engine.result(works[0])
    with pytest.raises(EngineError, match="use fewer workers"):
        engine.result(works[1])


def test_what_training_raises_is_told_in_its_words_and_the_worker_continues(engines: list[ProcessEngine]) -> None:
    given = task(Failing, sizes=(1, 20))
    engine = ProcessEngine(given, 1)
    engines.append(engine)
    engine.publish(0, given.learner.initial())
    works = [ClientTask(0, 0, 0), ClientTask(1, 0, 0)]
    engine.begin(works)
    with pytest.raises(EngineError, match="client 0 failed: ArithmeticError: one example is not enough"):
        engine.result(works[0])
    assert engine.result(works[1]).num_examples == 20


def test_updates_keep_their_values_while_they_are_referenced(engines: list[ProcessEngine]) -> None:
    given = task()
    engine = ProcessEngine(given, 2)
    engines.append(engine)
    model = given.learner.initial()
    works = [[ClientTask(client, version, client) for client in range(6)] for version in range(5)]
    found = rounds(engine, model, works)
    expected = rounds(LoopEngine(given), model, works)
    for one, other in zip(found, expected, strict=True):
        assert [each.update for each in one] == [each.update for each in other]


PROGRAM = """
import sys
from support.simulation.tasks import task
from fedplat.simulation.engines.processes import ProcessEngine
from fedplat.simulation.engines.interface import ClientTask
import multiprocessing

given = task()
engine = ProcessEngine(given, 2)
engine.publish(0, given.learner.initial())
work = ClientTask(0, 0, 0)
engine.begin([work])
engine.result(work)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_engine(way: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    ) as program:
        assert program.stdout
        assert program.stdin
        workers = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        if way == signal.SIGINT:
            os.killpg(program.pid, way)  # as a terminal does it, to all of them
        else:
            program.send_signal(way)
        program.stdin.close()  # Python handles a signal that came just before it began to read when the read returns
        assert len(workers) == 2
        assert program.wait(60) == -way
        _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
