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

import numpy as np
import psutil
import pytest
from typing_extensions import override

from fedplat.errors import DataError, EngineError, FedplatError, UserCodeError
from fedplat.learner import Config, Data
from fedplat.model import Parameters
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from fedplat.simulation.engines.tasks import ClientTraining
from support.learners import Centroids
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


def test_what_training_raises_names_the_client_and_the_line_and_the_worker_continues(
    engines: list[ProcessEngine],
) -> None:
    given = task(Failing, sizes=(1, 20))
    engine, loop = ProcessEngine(given, 1), LoopEngine(given)
    engines.append(engine)
    works = [ClientTask(0, 0, 0), ClientTask(1, 0, 0)]
    said: list[str] = []
    for each in (engine, loop):
        each.publish(0, given.learner.initial())
        each.begin(works)
        sentence = r"client 0 raised ArithmeticError: one example is not enough \(.*failing_tasks.py, line \d+\)$"
        with pytest.raises(UserCodeError, match=sentence) as caught:
            each.result(works[0])
        said.append(str(caught.value))
        assert each.result(works[1]).num_examples == 20
    assert said[0] == said[1], "a mistake of the user has one error in all engines"


@pytest.mark.parametrize("failing", ["train", "evaluate"])
def test_a_mistake_of_the_user_has_one_error_in_all_engines(engines: list[ProcessEngine], failing: str) -> None:
    class Broken(Centroids, frozen=True):
        @override
        def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> dict[str, float]:
            raise DataError("the input of example 3 is NaN")

        @override
        def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
            raise KeyError("epochs")

    rows = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    given = ClientTraining(Federation(*rows, [np.arange(8)], *rows), Broken(features=4, classes=3), {})
    found: list[tuple[type[Exception], str]] = []
    for engine in (ProcessEngine(given, 1), LoopEngine(given)):
        if isinstance(engine, ProcessEngine):
            engines.append(engine)
        model, work = given.learner.initial(0), ClientTask(0, 0, 0)
        engine.publish(0, model)
        engine.begin([work])
        with pytest.raises(FedplatError) as caught:
            engine.result(work) if failing == "train" else engine.evaluate(model)
        found.append((type(caught.value), str(caught.value)))
    assert found[0] == found[1]
    if failing == "train":
        assert found[0] == (DataError, "the training of client 0 failed: the input of example 3 is NaN")
    else:
        assert found[0][0] is UserCodeError
        assert "the scoring of the model failed: Broken.evaluate() raised KeyError: 'epochs' (" in found[0][1]


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
