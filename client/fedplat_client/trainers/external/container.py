"""Programs in containers (`container:`), by the command line of Docker or Podman.

A container has no network, no capabilities, a root file system that is read-only, and only the task folder, as /task.
The owner adds data and limits by options of the engine. Images are named by digest: what runs is what was approved.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedplat import system
from fedplat_client.trainers.external.folder import TaskFolder
from fedplat_client.trainers.external.process import TASK_VARIABLE, Program, end_processes, start_program

ENGINES = ("podman", "docker")
_IMAGE = re.compile(r"(?:[a-z0-9][a-zA-Z0-9._/:-]*@)?sha256:[0-9a-f]{64}")
_PLACE = "/task"
_MAX_PROCESSES = 1024
_COMMAND_S = 60.0
_NOT_STARTED = 125


def is_fixed(image: str) -> bool:
    """Return whether an image is named by its digest or its ID, so that its content cannot change."""
    return _IMAGE.fullmatch(image) is not None


@dataclass(frozen=True)
class ContainerLauncher:
    """An image, the command within it (empty: the image's own), and further options of the engine."""

    engine: str
    image: str
    command: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables for the engine's command; the container gets those of `passed`."""
    passed: tuple[str, ...] = ()
    poll_s: float = 0.5
    continues: bool = False

    @property
    def kind(self) -> str:
        """The name of the engine."""
        return Path(self.engine).name

    def start(self, folder: TaskFolder) -> Container:
        """Start a container."""
        return Container(self.engine, folder, start_program(self.make_command(folder), self.environment, folder))

    def make_command(self, folder: TaskFolder) -> tuple[str, ...]:
        """Return the command line that runs a task."""
        # Windows has no such numbers.
        user = (f"--user={system.user_id()}:{os.getgid()}",) if hasattr(os, "getgid") else ()
        is_rootless_podman = self.kind == "podman" and system.user_id() != 0
        return (
            *(self.engine, "run", "--rm", "--init", "--pull=never", f"--name={folder.name}"),
            *("--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(f"--pids-limit={_MAX_PROCESSES}", "--tmpfs=/tmp:rw,nosuid,nodev", *user),
            *(("--userns=keep-id",) if is_rootless_podman else ()),
            *(f"--mount=type=bind,source={folder.path},target={_PLACE}", f"--workdir={_PLACE}"),
            *(f"--env={TASK_VARIABLE}={_PLACE}", "--env=HOME=/tmp"),
            *(f"--env={name}" for name in self.passed),  # without the value, which other users would see
            *self.options,
            self.image,
            *self.command,
        )

    def attach(self, folder: TaskFolder) -> None:
        """Return None: containers of an earlier process are ended."""

    def end(self, folder: TaskFolder) -> None:
        """Remove the container."""
        remove_container(self.engine, folder)


class Container:
    """A container, by the engine's command that runs it in the foreground."""

    def __init__(self, engine: str, folder: TaskFolder, program: Program) -> None:
        self._engine = engine
        self._folder = folder
        self._program = program

    def poll(self) -> str | None:
        """Return how it has ended; see `OuterProcess`."""
        problem = self._program.poll()
        if problem and problem.endswith(f" {_NOT_STARTED}"):
            return f"{Path(self._engine).name} could not start the container; its message is in the log"
        return problem

    def stop(self, *, force: bool) -> None:
        """Send a signal to the program in the container."""
        _call(self._engine, "kill", f"--signal={'KILL' if force else 'TERM'}", self._folder.name)
        if force:
            self._program.stop(force=True)


def remove_container(engine: str, folder: TaskFolder) -> None:
    """Remove the container of a task folder, and the engine's command that runs it."""
    _call(engine, "rm", "--force", folder.name)
    end_processes(folder)


def _call(*command: str) -> None:
    """Run a command of the engine, which fails if the container is gone already."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDPLAT_")}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
        )
