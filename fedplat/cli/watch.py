"""Watching a job: its attempts, reconstructed from its events, as lines, as a live table or as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Sequence

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat.admin import AdminClient, descriptions
from fedplat.admin.patience import DEFAULT_TIMEOUT_S, Patience
from fedplat.cli import formats
from fedplat.cli.output import Output, table, to_record
from fedplat.errors import ServerUnreachableError
from fedplat.wire.v1 import admin_pb2

ENDED = frozenset({admin_pb2.JOB_STATUS_COMPLETED, admin_pb2.JOB_STATUS_FAILED, admin_pb2.JOB_STATUS_CANCELLED})
"""Final statuses of a job."""
PICTURE_COLUMNS = ("#ROUND", "PHASE", "#ASSIGNED", "#REPORTED", "#LATE", "#FAILED", "#TIME", "METRICS")
"""Fewer columns, for a terminal of 80 characters; rejected updates are counted as failed."""
LIVE_PROGRESS_EVERY_S = 1.0
JSON_PROGRESS_EVERY_S = 5.0
LINE_PROGRESS_EVERY_S = 30.0


@dataclasses.dataclass(frozen=True)
class View:
    """How a watch is displayed: a callback for events, one for notes on the watch itself, and a progress interval.

    Progress events arrive every `progress_every_s` seconds (0: never).
    """

    show: Callable[[admin_pb2.JobEvent], object]
    tell: Callable[[str], object]
    progress_every_s: float = 0.0


def follow(
    client: AdminClient, job_id: str, view: View, patience: Patience | None = None, *, after_sequence: int = 0
) -> admin_pb2.Job:
    """Show every event of a job after a sequence number once, in order, until the job has ended; return the ended job.

    When the server becomes unreachable, `patience` retries (by default for a minute), and the watch continues after the
    last event that was shown. Raises `ServerUnreachableError` if the server stays unreachable, and `ServerRefusedError`
    if it no longer has the job.
    """
    last_sequence = after_sequence
    waiting = patience or Patience(DEFAULT_TIMEOUT_S, view.tell)

    def show_rest() -> admin_pb2.Job:
        nonlocal last_sequence
        for event in client.watch_job(job_id, last_sequence, view.progress_every_s):
            view.show(event)
            last_sequence = event.sequence
            waiting.reset()
        return client.show_job(job_id)

    def until_ended() -> admin_pb2.Job:
        if show_rest().status in ENDED:
            return show_rest()  # once more: the watch may have been interrupted before the job ended
        raise ServerUnreachableError(
            f"the server at {client.server} closed the watch before the job ended", reason="it closed the watch"
        )

    return waiting.run(client, until_ended, watches=True)


@contextlib.contextmanager
def view_for(output: Output, job: admin_pb2.Job) -> Generator[View]:
    """Yield the view for an output: JSON lines, a live table on a terminal, otherwise a line per attempt."""
    if output.as_json:
        yield View(lambda event: output.json(to_record(event)), output.note, JSON_PROGRESS_EVERY_S)
    elif output.screen.is_terminal and not output.screen.is_dumb_terminal:
        with Live(console=output.screen, refresh_per_second=4) as live:
            board = AttemptTable()

            def show(event: admin_pb2.JobEvent) -> None:
                board.add(event)
                live.update(picture(board, job, output.screen.height))

            def tell(text: str) -> None:
                # Not on stderr: the live table is redrawn at the cursor, whose position only its own console tracks.
                output.screen.print(Text(formats.printable(text)))

            live.update(picture(board, job, output.screen.height))
            yield View(show, tell, LIVE_PROGRESS_EVERY_S)
    else:
        yield View(lines(output.line, job), output.note, LINE_PROGRESS_EVERY_S)


def picture(board: AttemptTable, job: admin_pb2.Job, height: int) -> Group:
    """Render the latest attempts, as many as fit, above a progress bar over the job's rounds."""
    rows = [_short_row(attempt, job) for attempt in board.latest(max(1, height - 4))]
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text(formats.printable(job.name), style="bold"),
        ProgressBar(total=job.num_rounds or None, completed=board.committed_rounds, width=40),
        Text(f"{(shown := formats.rounds(board.committed_rounds, job))} round{'' if shown == '1' else 's'}"),
        Text(board.job_status or formats.job_status(job.status)),
    )
    return Group(table(PICTURE_COLUMNS, rows), bar)


def lines(line: Callable[[str], object], job: admin_pb2.Job) -> Callable[[admin_pb2.JobEvent], None]:
    """Return a callback that prints a line for each ended attempt, scored version, job status and progress event.

    The caller of `follow` prints the final status, and knows that a running job was a draft and was started.
    """
    board = AttemptTable()

    def show(event: admin_pb2.JobEvent) -> None:
        text = describe_event(board, event, job)
        is_start = event.to_state == "DRAFT" or (
            event.from_state == "DRAFT" and job.status == admin_pb2.JOB_STATUS_RUNNING
        )
        if text and not (event.entity == "job" and (board.has_ended or is_start)):
            line(text)

    return show


def describe_event(board: AttemptTable, event: admin_pb2.JobEvent, job: admin_pb2.Job) -> str:
    """Add an event to the attempts of a job, and return the line about it; empty for an event without one."""
    attempt = board.add(event)
    if event.entity == "job":
        return f"job {job.name} is {event.to_state}" + (f": {event.reason}" if event.reason else "")
    if event.entity == "progress":
        text = event.reason or formats.progress(event.progress)
        if event.waiting.client_ids:
            num_busy = event.progress.num_training + event.progress.num_uploading
            text += f"; {descriptions.describe_waiting(event.waiting, num_busy, formats.clock)}"
        elif event.waiting.until_unix_s:
            text += f"; until {formats.clock(event.waiting.until_unix_s)}"
        is_start = event.kind == admin_pb2.ATTEMPT_KIND_WARM_START
        place = formats.attempt_kind(event.kind, job) if is_start else f"round {formats.rounds(event.round, job)}"
        return f"{place}  {text}"
    if attempt is None:
        return ""
    is_warm_start = attempt.kind == admin_pb2.ATTEMPT_KIND_WARM_START
    place = formats.attempt_kind(attempt.kind, job) if is_warm_start else f"round {formats.rounds(attempt.round, job)}"
    place += "" if job.num_rounds or is_warm_start else formats.server_round(attempt)
    if event.entity == "version":
        return f"{place}  scored by the server  {formats.metrics(attempt.server_metrics, {})}"
    if attempt.attempt > 1:
        place += f" attempt {attempt.attempt}"
    kind = "evaluation " if attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE else ""
    parts = [
        place,
        kind + formats.attempt_phase(attempt.phase).lower(),
        *([] if is_warm_start else _cohort(attempt)),
        formats.duration(attempt.seconds),
        formats.metrics(attempt.client_metrics, {}),
        attempt.reason,
    ]
    return "  ".join(part for part in parts if part)


def _cohort(attempt: admin_pb2.Round) -> list[str]:
    """Return the counts of the clients of an attempt, in words."""
    return [
        f"assigned {attempt.assigned}",
        f"reported {attempt.reported}",
        f"late {attempt.late}",
        f"failed {attempt.failed}",
        f"rejected {attempt.rejected}",
        f"received {format_update_size(attempt)}" if attempt.update_bytes else "",
    ]


def _short_row(attempt: admin_pb2.Round, job: admin_pb2.Job) -> Sequence[str]:
    is_evaluation = attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE
    is_warm_start = attempt.kind == admin_pb2.ATTEMPT_KIND_WARM_START
    place = formats.attempt_kind(attempt.kind, job) if is_warm_start else str(attempt.round)
    return (
        place + (f" try {attempt.attempt}" if attempt.attempt > 1 and not is_evaluation else ""),
        "evaluated" if is_evaluation else formats.attempt_phase(attempt.phase).lower(),
        str(attempt.assigned),
        str(attempt.reported),
        str(attempt.late),
        str(attempt.failed + attempt.rejected),
        format_time(attempt),
        outcome(attempt),
    )


def format_update_size(attempt: admin_pb2.Round) -> str:
    """Format the total size of all updates as sent."""
    return formats.size(attempt.update_bytes) if attempt.update_bytes else formats.NOTHING


def format_time(attempt: admin_pb2.Round) -> str:
    """Format the duration of an attempt."""
    return formats.duration(attempt.seconds) if attempt.seconds else formats.NOTHING


def outcome(attempt: admin_pb2.Round) -> str:
    """Format the metrics of an attempt or, without metrics, its reason or the progress of its clients."""
    metrics = formats.metrics(attempt.client_metrics, attempt.server_metrics)
    return metrics or attempt.reason or formats.progress(attempt.progress)


_WITHOUT_PROGRESS = frozenset(
    {admin_pb2.ATTEMPT_PHASE_SELECTING, admin_pb2.ATTEMPT_PHASE_COMMITTING, *descriptions.ENDED}
)
"""Phases in which no client works for an attempt."""
_ENDED_JOB = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
_COUNTED = {
    "late": ("LATE",),
    "failed": ("FAILED",),
    "rejected": ("REJECTED",),
    "surplus": ("SURPLUS",),
    "dropped": ("DROPPED",),
}


class AttemptTable:
    """The attempts of a job, oldest first, as the server's ListRounds returns them.

    The server's moments are only compared with each other: the seconds of an open attempt are those until its last
    event. In a job with a buffer, an update may be merged by a later attempt than that of its assignment; so the
    number of reports of an attempt is known only when it is committed, from the updates merged then.
    """

    def __init__(self) -> None:
        self.attempts: list[admin_pb2.Round] = []
        self.committed_rounds = 0
        self.job_status = ""
        self._states: list[Counter[str]] = []
        self._positions: dict[tuple[int, int], int] = {}
        self._merged: list[admin_pb2.JobEvent] = []

    @property
    def has_ended(self) -> bool:
        """True if the job will have no more events."""
        return self.job_status in _ENDED_JOB

    def latest(self, count: int) -> Sequence[admin_pb2.Round]:
        """Return the last `count` attempts."""
        return self.attempts[-count:] if count > 0 else []

    def add(self, event: admin_pb2.JobEvent) -> admin_pb2.Round | None:
        """Add an event; return the attempt that it ended, or whose version it scored, if any."""
        match event.entity:
            case "job":
                self.job_status = event.to_state
            case "version":
                return self._add_version(event)
            case "assignment":
                self._add_assignment(event)
            case "attempt":
                return self._add_attempt(event)
            case "progress":
                attempt = self.attempts[self._position(event)]
                attempt.progress.CopyFrom(event.progress)
                attempt.reason = event.reason
                attempt.seconds = event.unix_s - attempt.opened_unix_s
            case _:  # from a newer server
                pass
        return None

    def _position(self, event: admin_pb2.JobEvent) -> int:
        key = (event.round, event.attempt)
        if key not in self._positions:
            self._positions[key] = len(self.attempts)
            self._states.append(Counter())
            self.attempts.append(
                admin_pb2.Round(
                    round=event.round,
                    attempt=event.attempt,
                    kind=admin_pb2.ATTEMPT_KIND_TRAIN,
                    phase=admin_pb2.ATTEMPT_PHASE_SELECTING,
                    opened_unix_s=event.unix_s,
                )
            )
        return self._positions[key]

    def _add_assignment(self, event: admin_pb2.JobEvent) -> None:
        position = self._position(event)
        attempt, states = self.attempts[position], self._states[position]
        if event.from_state:
            states[event.from_state] -= 1
        else:
            attempt.assigned += 1
        states[event.to_state] += 1
        for field, names in _COUNTED.items():
            setattr(attempt, field, max(0, sum(states[name] for name in names)))
        if event.to_state == "MERGED":
            self._merged.append(event)
        if attempt.phase not in descriptions.ENDED:
            attempt.reported = max(0, states["REPORTED"] + states["MERGED"])
            attempt.update_bytes += event.update_bytes if event.to_state == "REPORTED" else 0
            attempt.seconds = event.unix_s - attempt.opened_unix_s

    def _add_attempt(self, event: admin_pb2.JobEvent) -> admin_pb2.Round | None:
        attempt = self.attempts[self._position(event)]
        phase = admin_pb2.AttemptPhase.DESCRIPTOR.values_by_name.get(f"ATTEMPT_PHASE_{event.to_state}")
        attempt.phase = admin_pb2.AttemptPhase.ValueType(phase.number if phase is not None else 0)
        if attempt.phase in _WITHOUT_PROGRESS:
            attempt.ClearField("progress")
        attempt.reason = event.reason
        attempt.seconds = event.unix_s - attempt.opened_unix_s
        attempt.kind = event.kind or attempt.kind
        attempt.client_metrics.update(event.metrics)
        if attempt.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED and self._merged:
            attempt.reported = len(self._merged)
            attempt.update_bytes = sum(merged.update_bytes for merged in self._merged)
            self._merged.clear()
        return attempt if attempt.phase in descriptions.ENDED else None

    def _add_version(self, event: admin_pb2.JobEvent) -> admin_pb2.Round | None:
        self.committed_rounds = max(self.committed_rounds, event.round)
        position = self._positions.get((event.round, event.attempt))
        if not event.metrics or position is None:
            return None
        self.attempts[position].server_metrics.update(event.metrics)
        return self.attempts[position]
