"""The command lines for Docker and Podman, by a program in their place."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat_client import Task
from fedplat_client.cancellation import client_stopped
from fedplat_client.errors import Cancelled, ExternalTaskError
from fedplat_client.task import Control
from fedplat_client.trainers.external import ExternalOptions, ExternalTrainer, TaskRoot, make_launcher
from support.polling import until

IMAGE = f"registry.example/linear@sha256:{'0a' * 32}"
ENGINE = """#!/bin/sh
# Does what an engine does for this test: runs the command of the image in the folder, and passes signals on.
printf '%s\\n' "$*" >> {log}
case $1 in
  run)
    echo $$ > {pid}; {run}
    ;;
  kill) kill "-${{2#--signal=}}" "$(cat {pid})" ;;
esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Generator[TaskRoot]:
    with TaskRoot(tmp_path / "tasks") as root:
        yield root


def make_task(**fields: object) -> Task:
    return Task(name="linear", parameters=Parameters.from_arrays({"weight": np.ones(3, "f4")}), **fields)  # type: ignore[arg-type]


def make_trainer(root: TaskRoot, monkeypatch: pytest.MonkeyPatch, run: str, engine: str = "docker") -> ExternalTrainer:
    folder = root.path.parent
    (folder / "bin").mkdir()
    program = folder / "bin" / engine
    program.write_text(ENGINE.format(log=folder / "log", pid=folder / "pid", run=run))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    options = ExternalOptions(pass_env=("SITE",), container=("--memory=8g", "--volume=/data:/data:ro"))
    monkeypatch.setenv("SITE", "a secret value")
    monkeypatch.setenv("FEDPLAT_TICKET", "another")
    launcher = make_launcher("container", f"{IMAGE} train 'two words'", options)
    return ExternalTrainer(launcher=launcher, root=root, stop_grace_s=20.0)


def test_the_command_line(root: TaskRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    run = 'cp model.safetensors model-out.safetensors; echo "{\\"num_examples\\": 2}" > result.json; env > ../env'
    trainer = make_trainer(root, monkeypatch, run)
    assert trainer(make_task()).num_examples == 2
    (folder,) = root.path.glob("fedplat-task-*")
    first, *rest = (root.path.parent / "log").read_text().splitlines()
    assert first.split() == [
        *("run", "--rm", "--init", "--pull=never", f"--name={folder.name}", "--network=none", "--read-only"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=1024", "--tmpfs=/tmp:rw,nosuid,nodev"),
        *(f"--user={os.getuid()}:{os.getgid()}", f"--mount=type=bind,source={folder},target=/task"),
        *("--workdir=/task", "--env=FEDPLAT_TASK_DIR=/task", "--env=HOME=/tmp", "--env=SITE"),
        *("--memory=8g", "--volume=/data:/data:ro", IMAGE, "train", "two", "words"),
    ]
    assert rest[0] == f"rm --force {folder.name}"
    environment = (root.path / "env").read_text()
    assert "SITE=a secret value" in environment  # which --env=SITE passes on
    assert "FEDPLAT_TICKET" not in environment


@pytest.mark.slow
def test_a_rootless_podman_keeps_the_user(root: TaskRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(root, monkeypatch, "exit 125", "podman")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(ExternalTaskError, match="podman could not start the container; its message is in the log"):
        trainer(make_task())
    assert "--user=1000:" in (log := (root.path.parent / "log").read_text())
    assert "--userns=keep-id" in log


@pytest.mark.slow
def test_a_stop_reaches_the_container(root: TaskRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    told = root.path.parent / "told"
    run = f"trap 'touch {told}; exit 143' TERM; touch {told}.ready; while :; do sleep 0.01; done"
    trainer = make_trainer(root, monkeypatch, run)
    object.__setattr__(trainer, "stop_grace_s", 0.2)
    control = Control()

    def stop() -> None:
        until(Path(f"{told}.ready").exists, "the container")
        control.signal.set(client_stopped())

    threading.Thread(target=stop).start()
    with pytest.raises(Cancelled):
        trainer(make_task(control=control))
    assert told.exists()
    assert " --signal=TERM fedplat-task-" in (root.path.parent / "log").read_text()
