"""Trainers as jobs of a real Slurm of one node; skipped without Slurm."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat_client import ClientOptions, Task
from fedplat_client.cancellation import client_stopped
from fedplat_client.errors import Cancelled, ExternalTaskError, TaskLeftError
from fedplat_client.task import Control
from fedplat_client.trainers.external import ExternalOptions, ExternalTrainer, TaskRoot, make_launcher
from support import slurm
from support.polling import until

pytestmark = pytest.mark.slow
RETURN = """
cp model.safetensors model-out.safetensors; echo 0.5 > progress; env > "$0.env"
echo '{"num_examples": 2, "metrics": {"loss": 0.5}}' > new; mv new result.json
"""


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as configuration:
        yield configuration


@pytest.fixture
def root(tmp_path: Path, configuration: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[TaskRoot]:
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    monkeypatch.setenv("FEDPLAT_TICKET", "a secret")
    monkeypatch.setenv("SITE", "it's a 'site'")
    with TaskRoot(tmp_path / "127.0.0.1%3A7443") as root:  # as in the data directory
        yield root
    assert list_jobs() == []


def list_jobs(*states: str) -> list[str]:
    command = ["squeue", "--noheader", "--format=%T", *states]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def make_trainer(root: TaskRoot, script: str, *sbatch: str) -> ExternalTrainer:
    program = root.path.parent / "program"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o700)
    launcher = make_launcher("slurm", f"{program} 'an argument'", ExternalOptions(sbatch=sbatch, pass_env=("SITE",)))
    return ExternalTrainer(launcher=launcher, root=root, stop_grace_s=20.0)


def make_task(**options: object) -> Task:
    control = Control(options=ClientOptions(**options))  # type: ignore[arg-type]
    return Task(name="linear", parameters=Parameters.from_arrays({"weight": np.ones(3, "f4")}), control=control)


def test_a_job_trains(root: TaskRoot) -> None:
    task = make_task()
    result = make_trainer(root, RETURN)(task)
    assert (result.num_examples, result.metrics, task.control.fraction) == (2, {"loss": 0.5}, 0.5)
    environment = (root.path.parent / "program.env").read_text().splitlines()
    assert "SITE=it's a 'site'" in environment
    assert not any(each.startswith("FEDPLAT_TICKET") for each in environment)


@pytest.mark.parametrize(
    ("script", "sbatch", "message"),
    [
        ("echo the end; exit 3", (), "the program ended with status 3"),
        ("kill -9 $$", (), "the program was ended by SIGKILL"),
        ("scancel $SLURM_JOB_ID; sleep 100", (), "the program was ended by SIGTERM"),
        (RETURN, ("--partition=nowhere",), "sbatch ended with status 1: "),
    ],
)
def test_a_failure_says_what_is_wrong(root: TaskRoot, script: str, sbatch: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExternalTaskError) as caught:
        make_trainer(root, script, *sbatch)(make_task())
    assert message in str(caught.value)


def test_a_job_that_others_cancel_has_failed(root: TaskRoot) -> None:
    def cancel() -> None:
        until(lambda: list_jobs() == ["PENDING"], "the job")
        subprocess.run(["scancel", "--state=PENDING", "--user=root"], check=True)

    threading.Thread(target=cancel).start()
    with pytest.raises(ExternalTaskError, match=r"the job \d+ of Slurm has ended as CANCELLED"):
        make_trainer(root, RETURN, "--begin=now+1hour")(make_task())


def stop_when(condition: Callable[[], bool], task: Task) -> None:
    def stop() -> None:
        until(condition, "the job")
        task.control.signal.set(client_stopped())

    threading.Thread(target=stop).start()


def test_a_stop_reaches_the_program(root: TaskRoot) -> None:
    told = root.path.parent / "told"
    script = f"trap 'cat stop > {told}; exit 1' TERM; touch {told}.ready; while :; do sleep 0.05; done"
    trainer, task = dataclasses.replace(make_trainer(root, script), stop_grace_s=10.0), make_task()
    stop_when(Path(f"{told}.ready").exists, task)
    with pytest.raises(Cancelled, match="CLIENT_STOPPED"):
        trainer(task)
    assert told.read_text() == "CLIENT_STOPPED\n"
    until(lambda: not list_jobs(), "the end of the job")


def test_a_job_that_waits_is_cancelled(root: TaskRoot) -> None:
    trainer, task = make_trainer(root, RETURN, "--begin=now+1hour"), make_task()
    stop_when(lambda: list_jobs() == ["PENDING"], task)
    with pytest.raises(Cancelled, match="CLIENT_STOPPED"):
        dataclasses.replace(trainer, stop_grace_s=0.1)(task)
    assert list_jobs() == []


@pytest.mark.parametrize("has_number", [True, False])
def test_a_job_that_is_left_is_found_again(root: TaskRoot, has_number: bool) -> None:
    """It runs while there is no client; also after one that was killed before it could note the job's number."""
    go = root.path.parent / "go"
    trainer = make_trainer(root, f"while [ ! -e {go} ]; do sleep 0.05; done\n{RETURN}")
    with pytest.raises(TaskLeftError, match="the task continues in"):
        trainer(make_task(leaves_tasks=True))
    (folder,) = root.path.glob("fedplat-task-*")
    root.__exit__()
    assert len(list_jobs()) == 1
    if not has_number:
        (folder / ".slurm").unlink()
    with TaskRoot(root.path) as again:
        trainer = dataclasses.replace(trainer, root=again)
        with pytest.raises(TaskLeftError):
            trainer(make_task(leaves_tasks=True))
        assert len(list_jobs()) == 1
        go.touch()
        assert trainer(make_task()).num_examples == 2
    root.__enter__()


def test_a_job_that_is_lost_has_failed_also_if_no_client_waits_for_it(root: TaskRoot) -> None:
    """Its node dies, as far as the client can tell: there is never an exit status."""
    trainer = make_trainer(root, "kill -9 $PPID")
    trainer = dataclasses.replace(trainer, launcher=dataclasses.replace(trainer.launcher, lost_s=0.01))  # type: ignore[type-var]
    messages: list[str] = []

    def has_ended() -> bool:
        try:
            trainer(make_task(leaves_tasks=True))
        except TaskLeftError:
            return False
        except ExternalTaskError as exc:
            messages.append(str(exc))
        return True

    until(has_ended, "the end of the job")
    assert "of Slurm has ended without an exit status (FAILED)" in messages[0]


def test_a_job_of_another_task_is_cancelled(root: TaskRoot) -> None:
    trainer = make_trainer(root, "sleep 1000")
    with pytest.raises(TaskLeftError):
        trainer(make_task(leaves_tasks=True))
    assert len(list_jobs()) == 1
    assert make_trainer(root, RETURN)(dataclasses.replace(make_task(), assignment_id="2")).num_examples == 2
    until(lambda: not list_jobs(), "the end of the job")
