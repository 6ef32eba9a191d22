"""Programs as jobs of Slurm (`slurm:`), on a cluster whose nodes share the folder of tasks with this machine.

Only `sbatch`, `squeue` and `scancel` are used: neither accounting nor a network between the nodes and the client is
needed. The job's exit status is a file of the task folder. A job is named after its task folder, so it is found again
after this process was killed at any moment.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedplat import texts
from fedplat_client.errors import ExternalTaskError
from fedplat_client.trainers.external.folder import TaskFolder
from fedplat_client.trainers.external.process import TASK_VARIABLE, describe_status

_COMMAND_S = 60.0
"""The timeout of a command of Slurm, whose controller may be busy."""
_FIRST_QUERY_S, _LONGEST_QUERY_S = 2.0, 10.0
_LOST_S = 90.0
"""How long the exit status of a job that is over may take to appear: shared file systems cache folders for a minute."""
_ACTIVE = frozenset(
    (
        *("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT"),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
    )
)
_JOB, _SCRIPT, _EXIT, _OVER = ".slurm", ".job", ".exit", ".over"
_MAX_BYTES = 64
_logger = logging.getLogger(__name__)

_SCRIPT_TEXT = """\
#!/bin/sh
unset SLURM_EXPORT_ENV
{exports}
trap : TERM
{command} &
child=$!
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || break
done
printf '%s\\n' "$status" > .exit.new && mv .exit.new {exit}
exit "$status"
"""
"""A shell waits for the program, and writes its status. SIGTERM is for the program: it interrupts only the `wait`."""


@dataclass(frozen=True)
class SlurmLauncher:
    """A program and its arguments, and further options of `sbatch`."""

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: str = "slurm"
    poll_s: float = 1.0
    continues: bool = True
    lost_s: float = _LOST_S
    """How long the exit status of a job that is over may be missing."""

    def start(self, folder: TaskFolder) -> SlurmJob:
        """Submit a job."""
        exports = {**self.environment, TASK_VARIABLE: str(folder.path)}
        script = _SCRIPT_TEXT.format(
            exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
            command=shlex.join(self.command),
            exit=_EXIT,
        )
        folder.write(_SCRIPT, script)
        answer = _call(
            "sbatch",
            "--parsable",
            "--export=NONE",
            "--no-requeue",
            f"--job-name={folder.name}",
            f"--chdir={folder.path}",
            f"--output={str(folder.path).replace('%', '%%')}/log",  # %3A would be a pattern
            "--open-mode=append",
            *self.options,
            str(folder.path / _SCRIPT),
        )
        number = answer.partition(";")[0].strip()  # with the cluster's name behind it
        if not number.isdigit():
            raise ExternalTaskError(f"sbatch has answered {texts.quote(answer)}; expected the number of a job")
        folder.write(_JOB, number)
        _logger.info("The task is the job %s of Slurm.", number)
        return SlurmJob(folder, number, self.lost_s)

    def attach(self, folder: TaskFolder) -> SlurmJob | None:
        """Return the job of a folder, if there is one."""
        try:
            number = folder.read(_JOB, _MAX_BYTES).decode("ascii").strip()
        except FileNotFoundError:  # killed before it could write the file
            number = _call(
                "squeue", "--noheader", f"--name={folder.name}", f"--user={getpass.getuser()}", "--format=%i"
            )
            number = number.strip()
        return SlurmJob(folder, number, self.lost_s) if number.isdigit() else None

    def end(self, folder: TaskFolder) -> None:
        """Cancel the folder's job, if it has one."""
        cancel_jobs(folder)


class SlurmJob:
    """A job of Slurm."""

    def __init__(self, folder: TaskFolder, number: str, lost_s: float) -> None:
        self._folder = folder
        self._number = number
        self._lost_s = lost_s
        self._state = ""
        self._query_at = 0.0
        self._query_s = _FIRST_QUERY_S

    def poll(self) -> str | None:
        """Return how it has ended; see `OuterProcess`."""
        with contextlib.suppress(FileNotFoundError):
            return describe_status(_read_status(self._folder.read(_EXIT, _MAX_BYTES)))
        now = time.monotonic()
        if now < self._query_at:
            return None
        self._query_at, self._query_s = now + self._query_s, min(2 * self._query_s, _LONGEST_QUERY_S)
        state = self._query()
        if state != self._state:
            _logger.info("The job %s of Slurm is %s.", self._number, state)
        self._state = state
        if state in ("", *_ACTIVE):
            return None
        if state not in ("COMPLETED", "FAILED", "GONE"):  # without an exit status, such as TIMEOUT or CANCELLED
            return f"the job {self._number} of Slurm has ended as {state}"
        self._query_s = _FIRST_QUERY_S
        if time.time() - self._note_end() < self._lost_s:
            return None
        return f"the job {self._number} of Slurm has ended without an exit status ({state})"

    def stop(self, *, force: bool) -> None:
        """Send SIGTERM to the job's processes, or cancel it; one that does not run yet is cancelled in any case."""
        if force:
            _try("scancel", self._number)
            return
        _try("scancel", "--state=PENDING", self._number)
        _try("scancel", "--full", "--signal=TERM", self._number)

    def _note_end(self) -> float:
        """Return when the job was first seen to be over, perhaps by an earlier process."""
        try:
            return float(self._folder.read(_OVER, _MAX_BYTES))
        except (FileNotFoundError, ValueError):
            now = time.time()
            self._folder.write(_OVER, str(now))
            return now

    def _query(self) -> str:
        """Return the state of the job; "GONE" if Slurm does not know it, "" if Slurm does not answer."""
        try:
            text = _call("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self._number}")
        except ExternalTaskError as exc:
            if "invalid job id" in str(exc).casefold():
                return "GONE"
            _logger.warning("The state of the job %s of Slurm is not known: %s", self._number, exc)
            return ""
        return text.strip().partition("\n")[0] or "GONE"


def cancel_jobs(folder: TaskFolder) -> None:
    """Cancel the jobs with the name of a task folder."""
    _try("scancel", f"--name={folder.name}", f"--user={getpass.getuser()}")


def _read_status(content: bytes) -> int:
    try:
        status = int(content.decode("ascii"))
    except ValueError as exc:
        raise ExternalTaskError(f"{_EXIT} is {content!r}; expected the exit status of the job") from exc
    return 128 - status if status > 128 else status  # as a shell reports a signal


def _try(*command: str) -> None:
    with contextlib.suppress(ExternalTaskError):
        _call(*command)


def _call(*command: str) -> str:
    """Run a command of Slurm and return its output. Raises `ExternalTaskError`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDPLAT_")}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_S,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ExternalTaskError(f"{command[0]} cannot be used: {exc}") from exc
    if done.returncode != 0:
        raise ExternalTaskError(
            f"{command[0]} ended with status {done.returncode}: {texts.shorten(done.stderr.strip(), 300)}"
        )
    return done.stdout
