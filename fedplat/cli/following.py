"""`fedplat job watch`, `logs` and `wait`: a job while it runs, and experiment trackers that follow it.

A watch receives all events of its job, from the first one, so the trackers get all rounds again after a restart.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedplat import admin, errors, trackers
from fedplat.admin.patience import Patience
from fedplat.cli import formats, watch
from fedplat.cli.formats import SinceOption
from fedplat.cli.options import JsonOption, ServerOption, TimeoutOption
from fedplat.cli.output import Output, to_record
from fedplat.cli.session import FAILED, INTERRUPTED, TIMED_OUT, CommandSession, JobArgument, own_timeout_s, session
from fedplat.cli.watch import ENDED, AttemptTable
from fedplat.command_line.with_typer import read_duration
from fedplat.config.toml import read_toml
from fedplat.errors import ServerUnreachableError
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

TensorBoardOption = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write event files for TensorBoard to DIR/JOB_ID.")
]
MlflowOption = Annotated[
    str, typer.Option("--mlflow", metavar="URI", help="Tracking server, database or folder of MLflow for the rounds.")
]
PRIVACY_EVERY_S = 60.0
"""The shortest time between two questions for the privacy cost, which the server must compute."""
_COUNTS = ("assigned", "reported", "late", "failed", "rejected", "surplus", "dropped", "update_bytes")
_STATUSES: dict[int, trackers.RunStatus] = {
    admin_pb2.JOB_STATUS_COMPLETED: "FINISHED",
    admin_pb2.JOB_STATUS_FAILED: "FAILED",
    admin_pb2.JOB_STATUS_CANCELLED: "KILLED",
}


@dataclasses.dataclass(frozen=True)
class TrackerOptions:
    """The trackers that the command line names."""

    tensorboard: Path | None = None
    mlflow: str = ""


NO_TRACKERS = TrackerOptions()


class RoundTracker:
    """Turns the events of a job into metrics of its rounds.

    `find_epsilon` returns the number of releases of a private job and their cost; None for other jobs.
    """

    def __init__(
        self,
        opened: list[trackers.Tracker],
        find_epsilon: Callable[[], tuple[int, float]] | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened, self._find_epsilon, self._now = opened, find_epsilon, now
        self._attempts = AttemptTable()
        self._num_releases = 0
        self._asked_at = -PRIVACY_EVERY_S
        self._last: trackers.RoundMetrics | None = None

    def add(self, event: admin_pb2.JobEvent) -> None:
        """Track the attempt that an event ended, or the version that it scored."""
        attempt = self._attempts.add(event)
        if attempt is None or attempt.phase != admin_pb2.ATTEMPT_PHASE_COMMITTED:
            return
        if event.entity == "version":
            self._log(attempt.round, event.unix_s, {f"server/{name}": value for name, value in event.metrics.items()})
            return
        self._log(attempt.round, event.unix_s, dict(_metrics(attempt)))
        if attempt.kind == admin_pb2.ATTEMPT_KIND_TRAIN:
            self._num_releases += 1
            self._last = trackers.RoundMetrics(attempt.round, event.unix_s, {})
            if self._now() - self._asked_at >= PRIVACY_EVERY_S:
                self.add_privacy()

    def add_privacy(self) -> None:
        """Track the privacy cost of the latest round, unless the server has committed further rounds already."""
        if self._find_epsilon is None or self._last is None:
            return
        self._asked_at = self._now()
        try:
            num_releases, epsilon = self._find_epsilon()
        except errors.FedplatError:  # the server is away: a later round asks again, or the next watch
            return
        if num_releases == self._num_releases:
            self._log(self._last.round, self._last.time_s, {"privacy/epsilon": epsilon})
            self._last = None

    def _log(self, number: int, unix_s: float, values: dict[str, float]) -> None:
        for tracker in self._opened if values else ():
            tracker.log([trackers.RoundMetrics(number, unix_s, values)])


def _metrics(attempt: admin_pb2.Round) -> Iterator[tuple[str, float]]:
    is_evaluation = attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE
    for name, value in attempt.client_metrics.items():
        yield f"{'evaluation' if is_evaluation else 'clients'}/{name}", value
    if is_evaluation:
        return
    yield "round/seconds", attempt.seconds
    yield "round/attempts", float(attempt.attempt)
    if attempt.kind == admin_pb2.ATTEMPT_KIND_WARM_START:
        return  # no client took part
    for name in _COUNTS:
        yield f"round/{name}", float(getattr(attempt, name))
    if attempt.max_staleness:
        yield "round/staleness", attempt.mean_staleness


@contextlib.contextmanager
def track_job(
    client: admin.AdminClient, job: admin_pb2.Job, options: TrackerOptions, tell: Callable[[str], object]
) -> Generator[Callable[[admin_pb2.JobEvent], None]]:
    """Open the trackers of a job; yields the function that tracks an event.

    If MLflow fails, `tell` is called. Raises `MissingExtraError` and `TrackerError` for options that cannot work.
    """
    if options == NO_TRACKERS:
        yield lambda event: None
        return
    opened: list[trackers.Tracker] = []
    delivery: trackers.BackgroundTracker | None = None
    if options.tensorboard is not None:
        opened.append(trackers.TensorBoardTracker(options.tensorboard / job.job_id))
    if options.mlflow:
        tracker = trackers.MlflowTracker(options.mlflow, _describe(job))
        delivery = trackers.BackgroundTracker(tracker, lambda text: tell(f"warning: {text}"))
        opened.append(delivery)
    rounds = RoundTracker(opened, _epsilon_of(client, job))
    try:
        yield rounds.add
        rounds.add_privacy()
    finally:
        status = _find_status(client, job)
        for tracker in opened:
            tracker.close(status)
        if delivery is not None and (missing := delivery.missing):
            tell(
                f"warning: MLflow does not have {trackers.describe_rounds(missing)} ({delivery.failure}); to add them, "
                f"repeat: fedplat job watch {job.job_id} --mlflow URI"
            )


def _describe(job: admin_pb2.Job) -> trackers.TrackedRun:
    params = trackers.flatten(read_toml(job.job_file))
    tags = {"fedplat.kind": "job", "fedplat.job": job.job_id, "fedplat.population": job.population}
    return trackers.TrackedRun(job.job_id, job.job_id, job.name, params, tags)


def _epsilon_of(client: admin.AdminClient, job: admin_pb2.Job) -> Callable[[], tuple[int, float]] | None:
    if "privacy" not in read_toml(job.job_file):
        return None

    def find() -> tuple[int, float]:
        (found,) = client.show_privacy(job.job_id).jobs
        return found.released.releases, found.released.epsilon

    return find


def _find_status(client: admin.AdminClient, job: admin_pb2.Job) -> trackers.RunStatus:
    """Return the final status of a job; RUNNING if it is open, or if the server does not answer."""
    try:
        status = client.show_job(job.job_id).status
    except errors.FedplatError:
        return "RUNNING"
    return _STATUSES[status] if status in ENDED else "RUNNING"


POLL_S = 1.0
"""Seconds between two looks at a job that a command waits for."""
_LOST = frozenset({"FAILED", "LATE", "REJECTED"})


def watch_job(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    tensorboard: TensorBoardOption = None,
    mlflow: MlflowOption = "",
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a job until it ends.

    The exit status is 0 if the job is completed. Ctrl-C stops watching; the job continues. With --tensorboard or
    --mlflow, all rounds of the job are written there; a later watch adds the rest to the same run.
    """
    options = TrackerOptions(tensorboard, mlflow)
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        watch_until_end(command, command.patience.run(command.client, lambda: command.client.show_job(job)), options)


def watch_until_end(command: CommandSession, job: admin_pb2.Job, options: TrackerOptions = NO_TRACKERS) -> None:
    """Watch a job until it ends, and write its rounds to trackers. Raises `typer.Exit` if it is not completed."""
    try:
        with (
            watch.view_for(command.output, job) as view,
            track_job(command.client, job, options, view.tell) as track,
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
        typer.Option(metavar="DURATION", parser=read_duration, help="Longest wait. Default: no limit."),
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
