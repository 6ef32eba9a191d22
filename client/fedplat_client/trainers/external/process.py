"""Programs as children of this process (`exec:`), and what they leave behind.

A program runs in a session of its own, without a shell. All that it starts inherits the variable FEDPLAT_TASK_DIR,
whose value no other task has: by it the processes of a task are found again, also after this process was killed, and
never those of anything else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedplat import system
from fedplat_client.errors import ExternalTaskError
from fedplat_client.trainers.external.folder import TaskFolder
from fedplat_client.trainers.external.launcher import OuterProcess

TASK_VARIABLE = "FEDPLAT_TASK_DIR"
_PASSES = 20
"""How often processes are looked for again, since one may start others before it is killed."""
_GONE_MS = 2000


@dataclass(frozen=True)
class ProgramLauncher:
    """A program and its arguments."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: str = "exec"
    poll_s: float = 0.5
    continues: bool = False

    def start(self, folder: TaskFolder) -> OuterProcess:
        """Start the program in the task folder."""
        return start_program(self.command, self.environment, folder)

    def attach(self, folder: TaskFolder) -> None:
        """Return None: the status of another process's child is not known."""

    def end(self, folder: TaskFolder) -> None:
        """Kill the processes of the task."""
        end_processes(folder)


def start_program(command: tuple[str, ...], environment: Mapping[str, str], folder: TaskFolder) -> Program:
    """Start a program in a task folder, with its output in the log. Raises `ExternalTaskError`."""
    with folder.open_log() as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder.path,
                env={**environment, TASK_VARIABLE: str(folder.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as exc:
            raise ExternalTaskError(f"the program {command[0]} cannot be started: {exc.strerror or exc}") from exc
    return Program(process)


class Program:
    """A child of this process, and its process group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> str | None:
        """Return how it has ended; see `OuterProcess`."""
        status = self._process.poll()
        return None if status is None else describe_status(status)

    def stop(self, *, force: bool) -> None:
        """Send the group SIGTERM or SIGKILL."""
        if self._process.poll() is None:  # else its number may belong to another process by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                system.signal_group(self._process, system.SIGKILL if force else signal.SIGTERM)


def describe_status(status: int) -> str:
    """Return what is wrong with an exit status, negative for a signal; "" if it is 0."""
    if status == 0:
        return ""
    if status > 0:
        return f"the program ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the program was ended by {name}"


def end_processes(folder: TaskFolder) -> None:
    """Kill all processes of this user that have the folder in FEDPLAT_TASK_DIR, and wait until they are gone.

    Without Linux's /proc, only the group of a program that this process has started is ended.
    """
    marker = f"{TASK_VARIABLE}={folder.path}".encode()
    for _ in range(_PASSES):
        found = False
        for descriptor in _open_processes(marker):
            try:
                signal.pidfd_send_signal(descriptor, system.SIGKILL)
                found = True
                gone = select.poll()
                gone.register(descriptor, select.POLLIN)
                gone.poll(_GONE_MS)
            except OSError:  # it has ended meanwhile
                pass
            finally:
                os.close(descriptor)
        if not found:
            return


def _open_processes(marker: bytes) -> Iterator[int]:
    """Yield a descriptor of each process whose environment has the marker; its number may be used again meanwhile."""
    if not hasattr(os, "pidfd_open") or not Path("/proc/self/environ").exists():
        return
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        try:
            if path.stat().st_uid != system.user_id():
                continue
            descriptor = os.pidfd_open(int(path.name))
        except OSError:  # it has ended
            continue
        try:
            environment = (path / "environ").read_bytes()  # of the process that the descriptor is open for
        except OSError:
            environment = b""
        if marker in environment.split(b"\0"):
            yield descriptor
        else:
            os.close(descriptor)
