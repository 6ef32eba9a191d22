"""`fedplat job watch`, `logs` and `wait`: a job while it runs, its history as lines, and a wait with an exit status."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Annotated

import typer

from fedplat.admin.patience import Patience
from fedplat.cli import formats, tracking, watch
from fedplat.cli.formats import SinceOption
from fedplat.cli.options import JsonOption, ServerOption, TimeoutOption
from fedplat.cli.output import Output, to_record
from fedplat.cli.session import FAILED, INTERRUPTED, TIMED_OUT, CommandSession, JobArgument, own_timeout_s, session
from fedplat.cli.watch import AttemptTable
from fedplat.errors import ServerUnreachableError
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

POLL_S = 1.0
"""Seconds between two looks at a job that a command waits for."""
_LOST = frozenset({"FAILED", "LATE", "REJECTED"})


def watch_job(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    tensorboard: tracking.TensorBoardOption = None,
    mlflow: tracking.MlflowOption = "",
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a job until it ends.

    The exit status is 0 if the job is completed. Ctrl-C stops watching; the job continues. With --tensorboard or
    --mlflow, all rounds of the job are written there; a later watch adds the rest to the same run.
    """
    options = tracking.TrackerOptions(tensorboard, mlflow)
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        watch_until_end(command, command.patience.run(command.client, lambda: command.client.show_job(job)), options)


def watch_until_end(
    command: CommandSession, job: admin_pb2.Job, options: tracking.TrackerOptions = tracking.NO_TRACKERS
) -> None:
    """Watch a job until it ends, and write its rounds to trackers. Raises `typer.Exit` if it is not completed."""
    try:
        with (
            watch.view_for(command.output, job) as view,
            tracking.track(command.client, job, options, view.tell) as track,
        ):

            def show(event: admin_pb2.JobEvent) -> None:
                view.show(event)
                track(event)

            # The view has its own: on a terminal only the view can print below its live table.
            patience = Patience(command.patience.timeout_s, view.tell)
            ended = watch.follow(command.client, job.job_id, dataclasses.replace(view, show=show), patience)
    except KeyboardInterrupt as exc:
        command.output.note(f"stopped watching; the job continues. Watch it again with: fedplat job watch {job.job_id}")
        raise typer.Exit(INTERRUPTED) from exc
    except ServerUnreachableError as exc:
        exc.add_note(f"the job continues. Watch it again with: fedplat job watch {job.job_id}")
        raise
    if not command.output.as_json:
        print_state(command.output, ended)
    if ended.status != admin_pb2.JOB_STATUS_COMPLETED:
        raise typer.Exit(FAILED)


def show_logs(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends, with new lines.")] = False,
    since: SinceOption = "",
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only the last N lines so far.", show_default=False)
    ] = None,
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the history of a job: its attempts, versions, and the assignments that were lost, with reasons.

    With --json each event is one line, including those without a line of text. With --follow the command survives
    restarts of the server, as job watch does; it ends with the job, and Ctrl-C ends it earlier.
    """
    since_s = formats.parse_since(since)
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        found = command.patience.run(command.client, lambda: command.client.show_job(job))
        log = JobLog(command.output, found, since_s, tail)
        last = command.patience.run(command.client, lambda: log.read(command))
        log.end_tail()
        if not follow:
            return
        view = watch.View(log.add, command.output.note)
        try:
            watch.follow(command.client, found.job_id, view, command.patience, after_sequence=last)
        except KeyboardInterrupt as exc:
            raise typer.Exit(INTERRUPTED) from exc
        except ServerUnreachableError as exc:
            exc.add_note(f"the job continues. Follow it again with: fedplat job logs --follow {found.job_id}")
            raise


class JobLog:
    """Prints the events of a job as lines of a log, from a time on; of those before `end_tail` only the last `tail`."""

    def __init__(self, output: Output, job: admin_pb2.Job, since_s: float = 0.0, tail: int | None = None) -> None:
        self._output, self._job, self._since_s = output, job, since_s
        self._board = AttemptTable()
        self._last = 0
        self._kept: collections.deque[tuple[admin_pb2.JobEvent, str]] | None = (
            None if tail is None else collections.deque(maxlen=tail)
        )

    def read(self, command: CommandSession) -> int:
        """Add the events that the server has stored, and return the sequence number of the last one."""
        for event in command.client.watch_job(self._job.job_id, self._last, until_now=True):
            self.add(event)
        return self._last

    def end_tail(self) -> None:
        """Print the lines that were kept; later ones are printed at once."""
        kept, self._kept = self._kept, None
        for event, text in kept or ():
            self._print(event, text)

    def add(self, event: admin_pb2.JobEvent) -> None:
        """Print the line of an event, if it has one."""
        self._last = event.sequence
        text = self._describe(event)
        if event.unix_s < self._since_s or not (text or self._output.as_json):
            return
        if self._kept is None:
            self._print(event, text)
        else:
            self._kept.append((event, text))

    def _print(self, event: admin_pb2.JobEvent, text: str) -> None:
        if self._output.as_json:
            self._output.json(to_record(event))
        else:
            self._output.line(f"{formats.moment(event.unix_s)}  {text}")

    def _describe(self, event: admin_pb2.JobEvent) -> str:
        text = watch.describe_event(self._board, event, self._job)
        if event.entity == "assignment" and event.to_state in _LOST:
            place = f"round {formats.rounds(event.round, self._job)}"
            place += f" attempt {event.attempt}" if event.attempt > 1 else ""
            reason = f": {event.reason}" if event.reason else ""
            return f"{place}  client {event.client_id} {event.to_state.lower()}{reason}"
        if event.entity == "version" and not event.metrics:
            return f"round {formats.rounds(event.round, self._job)}  version {event.to_state} committed"
        return text


def wait_for_job(
    context: typer.Context,
    job: JobArgument,
    goal: Annotated[
        str,
        typer.Option("--for", metavar="GOAL", help="What to wait for: completed, or round=N for a committed round."),
    ] = "completed",
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.0, help="Longest wait. Default: no limit.", show_default=False),
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until a job is completed or has committed a round.

    The exit status is 0 when that is reached, 1 if the job ended otherwise, and 3 when the time is over.
    """
    round_ = _parse_goal(goal)
    with session(context, server, as_json, own_timeout_s(context, None)) as command:
        try:
            found, reached = wait(command, job, round_, timeout)
        except KeyboardInterrupt as exc:
            raise typer.Exit(INTERRUPTED) from exc
        if command.output.as_json:
            command.output.json(to_record(found))
        else:
            print_state(command.output, found)
        if reached:
            return
        if found.status in watch.ENDED:
            raise typer.Exit(FAILED)
        command.output.error(
            f"{goal} was not reached within {timeout or 0.0:g} s: {format_count(found.round, 'committed round')} so far"
        )
        raise typer.Exit(TIMED_OUT)


def wait(
    command: CommandSession,
    job: str,
    round_: int | None,
    timeout_s: float | None,
    *,
    pause: Callable[[float], object] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> tuple[admin_pb2.Job, bool]:
    """Wait until a job is completed, or has committed `round_`. Return the job, and whether that was reached.

    It is not reached if the job ends otherwise or the time is over. Raises `ServerUnreachableError` if the server stays
    away longer than the command retries.
    """
    end = None if timeout_s is None else now() + timeout_s
    job_id = job
    while True:
        left_s = math.inf if end is None else max(0.0, end - now())
        patience = Patience(min(command.patience.timeout_s, left_s), command.output.note, pause=pause, now=now)
        found = patience.run(command.client, functools.partial(command.client.show_job, job_id))
        job_id = found.job_id  # another job may get the same name
        if round_ is not None and 0 < found.num_rounds < round_:
            raise typer.BadParameter(f"--for round={round_}: the job has {found.num_rounds} rounds")
        is_completed = found.status == admin_pb2.JOB_STATUS_COMPLETED
        if is_completed if round_ is None else found.round >= round_:
            return found, True
        left_s = math.inf if end is None else end - now()
        if found.status in watch.ENDED or left_s <= 0.0:
            return found, False
        pause(min(POLL_S, left_s))


def _parse_goal(text: str) -> int | None:
    """Return the round of `round=N`, or None for `completed`. Raises `typer.BadParameter`."""
    if text == "completed":
        return None
    match = re.fullmatch(r"round=([1-9][0-9]{0,8})", text)
    if match is None:
        raise typer.BadParameter(f"--for {text!r}: expected completed, or round=N such as round=10")
    return int(match[1])


def print_state(output: Output, job: admin_pb2.Job) -> None:
    """Print the status of a job as one line, or the job as JSON."""
    if output.as_json:
        output.json(to_record(job))
    else:
        reason = f": {job.reason}" if job.reason else ""
        output.line(f"job {job.name} ({job.job_id}) is {formats.job_status(job.status)}{reason}")
