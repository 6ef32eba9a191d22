"""Programs outside of the client: what they get, what they return, and how they are stopped."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from fedplat import system
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.wire.v1 import model_pb2
from fedplat_client import ClientOptions, Task
from fedplat_client._state.data_dir import DataDirectory
from fedplat_client.cancellation import Stop, client_stopped
from fedplat_client.errors import Cancelled, DataDirectoryError, DataDirectoryInUseError, ExternalTaskError
from fedplat_client.task import Control
from fedplat_client.trainers.external import ExternalOptions, ExternalTrainer, TaskRoot, make_launcher
from fedplat_client.trainers.external.folder import TaskFolder
from support.polling import until

MODEL = Parameters.from_arrays({"weight": np.arange(3, dtype=np.float32), "steps": np.array(7, np.int64)})
RETURN = """
cp model.safetensors model-out.safetensors
echo '{"num_examples": 2, "metrics": {"loss": 0.5}}' > new; mv new result.json
"""


@pytest.fixture
def root(tmp_path: Path) -> Generator[TaskRoot]:
    with TaskRoot(tmp_path / "tasks") as root:
        yield root


def make_task(**fields: object) -> Task:
    return Task(name="linear", parameters=MODEL.copy(), job_id="job-1", job_name="linear", assignment_id="1", **fields)  # type: ignore[arg-type]


def make_trainer(root: TaskRoot, script: str, options: ExternalOptions | None = None) -> ExternalTrainer:
    """A trainer that is a script of the shell."""
    program = root.path.parent / "program"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o700)
    launcher = make_launcher("exec", f"{program} 'an argument'", options or ExternalOptions())
    return ExternalTrainer(launcher=launcher, root=root, stop_grace_s=20.0)


def test_what_a_program_gets_and_returns(
    root: TaskRoot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"FEDPLAT_TICKET": "secret", "TOKEN": "secret", "SITE": "a"}.items():
        monkeypatch.setenv(name, value)
    seen = root.path.parent / "seen"
    script = f"""
env > {seen}; echo "$1" >> {seen}; cp task.json {seen}.json; cp state.safetensors state-out.safetensors
echo 0.25 > progress; echo a line; echo an error >&2
{RETURN}"""
    caplog.set_level(logging.INFO)
    state = ClientState({"program": MODEL})
    task = make_task(config={"rate": 0.5, "epochs": 2, "name": "ü"}, round=3, client_state=state, num_rounds=9)
    result = make_trainer(root, script, ExternalOptions(pass_env=("SITE",)))(task)
    assert (result.num_examples, result.metrics, task.control.fraction) == (2, {"loss": 0.5}, 0.25)
    assert result.to_update(MODEL) == Parameters.from_arrays(
        {"weight": np.zeros(3, np.float32), "steps": np.array(7, np.int64)}
    )
    assert state.changed
    environment = seen.read_text()
    assert "secret" not in environment
    assert {"SITE=a", "an argument"} <= {*environment.splitlines()}
    described = json.loads(Path(f"{seen}.json").read_text())
    wanted = {"version": 1, "round": 3, "attempt": 1, "num_rounds": 9, "task": "train", "trainer": "linear"}
    wanted |= {"config": {"rate": 0.5, "epochs": 2, "name": "ü"}, "deadline_s": None, "client_state": True}
    assert described == described | wanted
    assert 0 <= described["seed"] < 2**32
    assert {"linear: a line", "linear: an error"} <= {each.getMessage() for each in caplog.records}


def test_an_evaluation_has_no_model(root: TaskRoot) -> None:
    script = (
        """grep '"task": "evaluate"' task.json; echo '{"num_examples": 3, "metrics": {"accuracy": 1}}' > result.json"""
    )
    result = make_trainer(root, script).evaluate(make_task())
    assert (result.num_examples, result.metrics) == (3, {"accuracy": 1.0})


FAILURES = {
    "status": ("exit 3", "the program ended with status 3"),
    "signal": ("kill -9 $$", "the program was ended by SIGKILL"),
    "error": ('echo \'{"error": "no data"}\' > result.json; exit 1', "the program says: no data"),
    "error and status 0": ('echo \'{"error": "no data"}\' > result.json', "the program says: no data"),
    "nothing": ("true", "the program did not write result.json"),
    "no model": (
        "echo '{\"num_examples\": 2}' > result.json",
        "the program has written neither; expected exactly one of update.safetensors",
    ),
    "both models": (
        f"cp model.safetensors update.safetensors; {RETURN}",
        "update.safetensors and model-out.safetensors",
    ),
    "a pipe": ("mkfifo result.json", "result.json is not a regular file"),
    "a link": ("ln -s /etc/passwd result.json", "result.json is a symbolic link"),
    "a folder": ("mkdir result.json", "result.json is not a regular file"),
    "too long": ("truncate -s 1G result.json", "result.json has 1,073,741,824 bytes; at most 65,536 are accepted"),
    "a model that is too long": (
        f"{RETURN} truncate -s 1G model-out.safetensors",
        "model-out.safetensors has 1,073,741",
    ),
    "a log that is too long": ("truncate -s 65M log", "the log has 68,157,440 bytes"),
    "not UTF-8": ('printf \'{"error": "\\377"}\' > result.json', "result.json cannot be read"),
    "no program": ("rm ../../program; exec ../../program", "the program ended with status 127"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_says_what_is_wrong(root: TaskRoot, name: str) -> None:
    script, message = FAILURES[name]
    with pytest.raises(ExternalTaskError) as caught:
        make_trainer(root, f"echo the end of the log\n{script}")(make_task())
    assert message in str(caught.value)
    assert [each.name for each in root.path.iterdir() if each.is_dir()] == []
    if "log" not in name:
        assert (root.path / "failed.log").read_bytes().startswith(b"the end of the log\n")


@pytest.mark.parametrize("kind", ["stopped", pytest.param("expired", marks=pytest.mark.slow)])
def test_a_task_that_must_end_tells_its_program(root: TaskRoot, kind: str) -> None:
    """The program finds the file, or else gets SIGTERM; all of its children are gone, too."""
    told = root.path.parent / "told"
    script = f"""
trap 'cat stop > {told}; exit 1' TERM
(setsid sh -c 'trap "" TERM; touch {told}.child; while :; do sleep 1000; done') &
while [ ! -e stop ]; do sleep 0.01; done
echo stopped > progress
wait
"""
    control = Control(0.3) if kind == "expired" else Control()
    task = make_task(control=control)
    trainer = dataclasses.replace(make_trainer(root, script), stop_grace_s=0.1)
    if kind == "stopped":

        def stop() -> None:
            until(Path(f"{told}.child").exists, "the program's child")
            control.signal.set(client_stopped())

        threading.Thread(target=stop).start()
    with pytest.raises(Cancelled, match="CLIENT_STOPPED" if kind == "stopped" else "TRAIN_TIMEOUT"):
        trainer(task)
    if kind == "stopped":
        assert told.read_text() == "CLIENT_STOPPED\n"
    assert find_marked(root) == []
    assert [each for each in root.path.iterdir() if each.is_dir()] == []


def find_marked(root: TaskRoot) -> list[str]:
    """The processes of this root's tasks."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"FEDPLAT_TASK_DIR={root.path}".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_program_that_ignores_sigterm_is_killed(root: TaskRoot) -> None:
    control = Control()
    ready = root.path.parent / "ready"
    script = f"trap '' TERM\ntouch {ready}\nwhile :; do sleep 1000; done"

    def stop() -> None:
        until(ready.exists, "the program")
        control.signal.set(Stop(model_pb2.REASON_SURPLUS, "enough"))

    threading.Thread(target=stop).start()
    with pytest.raises(Cancelled, match="SURPLUS"):
        dataclasses.replace(make_trainer(root, script), stop_grace_s=0.05)(make_task(control=control))
    assert find_marked(root) == []


def test_what_a_killed_client_has_left_is_ended_and_what_is_complete_is_used(tmp_path: Path) -> None:
    path = tmp_path / "tasks"
    count = tmp_path / "count"
    with TaskRoot(path) as root:
        make_trainer(root, f"echo run >> {count}\n{RETURN}")(make_task())
        folder = next(path.glob("fedplat-task-*"))
        kept = tmp_path / "kept"
        folder.rename(kept)  # the end of the block removes a folder
    kept.rename(folder)
    with TaskRoot(path) as root:
        trainer = make_trainer(root, f"echo run >> {count}\n{RETURN}")
        assert trainer(make_task()).num_examples == 2
        assert count.read_text() == "run\n"  # the same assignment: the result was there
        (folder / "result.json").write_text('{"num_exam')
        assert trainer(make_task()).num_examples == 2
        assert count.read_text() == "run\nrun\n"
        trainer(dataclasses.replace(make_task(), assignment_id="2"))
        assert not folder.exists()


def test_a_root_has_one_client_and_no_strangers(tmp_path: Path) -> None:
    with TaskRoot(tmp_path / "tasks") as root:
        with pytest.raises(DataDirectoryInUseError, match="is in use by another client"):
            TaskRoot(root.path).__enter__()
        assert stat.S_IMODE(root.path.stat().st_mode) == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(DataDirectoryError, match=r"open belongs to or can be changed by other users .*--task-root"):
        TaskRoot(open_to_all / "tasks").__enter__()


@pytest.mark.parametrize(
    ("kind", "rest", "message"),
    [
        ("exec", "", "the program '' is not found"),
        ("exec", "no-such-program x", "the program 'no-such-program' is not found, or not executable"),
        ("exec", "sh 'train.R", "cannot be read: No closing quotation"),
        ("exec", "sh train.R", "the argument 'train.R' is a file here, but programs run in their task folder"),
        ("container", "python:3.12", "the image 'python:3.12' is not named by its content"),
        ("folder", "x", "folder: has no command"),
    ],
)
def test_a_wrong_command_is_refused(
    kind: str, rest: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.R").touch()
    with pytest.raises(ValueError, match="a") as caught:
        make_launcher(kind, rest, ExternalOptions())
    assert message in str(caught.value)


def test_slurm_needs_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="sbatch of Slurm is not in PATH"):
        make_launcher("slurm", "sh", ExternalOptions())
    with pytest.raises(ValueError, match="neither podman nor docker"):
        make_launcher("container", f"sha256:{'0' * 64}", ExternalOptions())


@pytest.mark.parametrize("name", ["FEDPLAT_TICKET", "A-B", ""])
def test_secrets_are_not_passed_on(name: str) -> None:
    with pytest.raises(ValueError, match="is refused"):
        ExternalOptions(pass_env=(name,))


def test_a_detached_client_takes_no_part_in_secure_aggregation() -> None:
    with pytest.raises(ValueError, match=r"leaves_tasks \(--detach\) is set"):
        ClientOptions(leaves_tasks=True, require_secure_aggregation=True)


def test_a_number_that_json_cannot_hold_is_refused(root: TaskRoot) -> None:
    with pytest.raises(ExternalTaskError, match="the config 'rate' is inf, which JSON cannot hold"):
        make_trainer(root, RETURN)(make_task(config={"rate": float("inf")}))


def test_a_full_disk_is_named(root: TaskRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("fedplat.durable.write_all", fail)
    with pytest.raises(ExternalTaskError, match="No space left on device; free space, or name another place"):
        make_trainer(root, RETURN)(make_task())


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, *, wait: bool = True) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(system, "lock", refuse)
    with pytest.raises(DataDirectoryError, match=r"cannot be locked: .*No locks available.*; name one on a file"):
        TaskRoot(tmp_path / "tasks").__enter__()
    with (
        pytest.raises(DataDirectoryError, match=r"cannot be locked: .*No locks available.*; choose one on a file"),
        DataDirectory(tmp_path / "data", "localhost:1", "p").lock(),
    ):
        pass


def test_the_kind_of_a_folder_is_read_as_what_a_program_has_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".kind")
    assert TaskFolder(tmp_path).kind == ""
    (tmp_path / ".kind").unlink()
    (tmp_path / ".kind").write_bytes(b"e" * 65)
    assert TaskFolder(tmp_path).kind == ""
