"""Ray: how actors begin, are lost and end."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import psutil
import pytest
from torch import nn

from fedplat.errors import EngineError, MissingExtraError, UserCodeError
from fedplat.pytorch.training import Learner
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine
from fedplat.simulation.engines.ray import Cluster, RayEngine
from fedplat.simulation.scenario.model import OwnFunction, OwnModule
from support.simulation.engines import RAY
from support.simulation.failing_tasks import Failing, Stuck
from support.simulation.tasks import federation, personal, rounds, task

MakeRay = Callable[[ClientTraining, int], RayEngine]
WORKS = [[ClientTask(client, version, client) for client in range(6)] for version in range(4)]


@pytest.fixture
def make_ray(ray_cluster: Cluster) -> Generator[MakeRay]:
    engines: list[RayEngine] = []

    def make(task: ClientTraining, num_workers: int) -> RayEngine:
        engines.append(RayEngine(task, num_workers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_without_ray_it_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ray>="):
        RayEngine(task(), 1)


@pytest.mark.slow
@RAY
def test_a_lost_actor_ends_the_training_with_words(make_ray: MakeRay) -> None:
    given = task(Stuck)
    engine = make_ray(given, 1)
    engine.publish(0, given.learner.initial())
    works = [ClientTask(client, 0, 0) for client in range(4)]
    engine.begin(works)
    (name,) = engine._names  # pyright: ignore[reportPrivateUsage]
    pid = int(name.split()[1])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"the Ray actor process {pid} on .* was lost while it trained client 3"):
        engine.result(works[0])
    with pytest.raises(EngineError, match="use fewer workers"):
        engine.result(works[1])


@pytest.mark.slow
@RAY
def test_what_training_raises_names_the_client_and_the_line_and_the_actor_continues(make_ray: MakeRay) -> None:
    given = task(Failing, sizes=(1, 20))
    engine = make_ray(given, 1)
    engine.publish(0, given.learner.initial())
    works = [ClientTask(0, 0, 0), ClientTask(1, 0, 0)]
    engine.begin(works)
    with pytest.raises(
        UserCodeError, match=r"client 0 raised ArithmeticError: one .* \(.*failing_tasks.py, line \d+\)$"
    ):
        engine.result(works[0])
    assert engine.result(works[1]).num_examples == 20


@pytest.mark.slow
@RAY
def test_memories_follow_clients_from_actor_to_actor(make_ray: MakeRay) -> None:
    given = personal()
    model = given.learner.initial()
    shuffled = [cohort[turn:] + cohort[:turn] for turn, cohort in enumerate(WORKS)]
    found, expected = rounds(make_ray(given, 2), model, shuffled), rounds(LoopEngine(given), model, shuffled)
    assert [[each.update for each in one] for one in found] == [[each.update for each in one] for one in expected]


@pytest.mark.slow
@RAY
def test_functions_of_the_user_travel_by_name_and_folder(make_ray: MakeRay, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def module(): return nn.Sequential(nn.Flatten(), nn.Linear(144, 4))\n"
        "def loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets)\n"
    )
    learner = Learner(model=OwnModule("mine:module", tmp_path), loss=OwnFunction("mine:loss", tmp_path))
    given = ClientTraining(federation(), learner, task().options)
    model = learner.initial()
    found, expected = rounds(make_ray(given, 1), model, WORKS[:1]), rounds(LoopEngine(given), model, WORKS[:1])
    assert [each.update for each in found[0]] == [each.update for each in expected[0]]


@pytest.mark.slow
@RAY
def test_what_cannot_be_sent_is_refused_with_words(make_ray: MakeRay) -> None:
    given, lock = task(), threading.Lock()

    def make() -> nn.Module:
        with lock:
            return given.learner.model()

    with pytest.raises(EngineError, match=r"cannot be sent to actors: cannot pickle '_thread.lock' object"):
        make_ray(given._replace(learner=dataclasses.replace(given.learner, model=make)), 1)


PROGRAM = """
import os, sys
from support.simulation.tasks import task
from fedplat.errors import EngineError
from fedplat.simulation.engines.ray import RayEngine

try:
    RayEngine(task(), 5)
except EngineError as exc:
    print(exc)
engine = RayEngine(task(), 0)
engine.publish(0, task().learner.initial())
print(engine.num_workers, flush=True)
engine.close()
"""


@pytest.mark.slow
@RAY
def test_a_cluster_that_is_there_is_used_and_left_alone(ray_cluster: Cluster, make_ray: MakeRay) -> None:
    address = ray_cluster.ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    program = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert program.stderr == ""
    refused, workers = program.stdout.splitlines()
    assert "the cluster has 4 cores; expected at least one for each of 5 workers" in refused
    assert workers == "4"
    assert make_ray(task(), 1).num_workers == 1


ALONE = """
import sys, psutil
from support.simulation.tasks import task
from fedplat.simulation.engines.ray import _State
from fedplat.simulation.engines.ray import RayEngine
from fedplat.simulation.engines.interface import ClientTask

given = task()
engine = RayEngine(given, 1)
print(_State.home.name)
engine.publish(0, given.learner.initial())
engine.begin([ClientTask(0, 0, 0)])
trained = engine.result(ClientTask(0, 0, 0))
print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
if sys.stdin.readline() == "close\\n":
    engine.close()
    assert trained.update.is_finite()
    print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
"""


@pytest.mark.slow
@RAY
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cluster_of_its_own_ends_with_the_engine(is_killed: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", ALONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as program:
        assert program.stdout
        assert program.stdin
        home = Path(program.stdout.readline().strip())
        members = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        assert len(members) > 2
        assert home.is_dir()
        if is_killed:
            program.kill()
            program.wait(60)
            # Ray's agents check their parent only from time to time.
            members = [process for process in members if "Agent" not in _name(process)]
        else:
            rest, errors = program.communicate("close\n", 60)
            assert (program.returncode, rest.strip(), errors) == (0, "", "")
        _, alive = psutil.wait_procs(members, timeout=60)
    assert not alive
    assert home.is_dir() == is_killed  # after a kill no process is left to remove it
    shutil.rmtree(home, ignore_errors=True)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
