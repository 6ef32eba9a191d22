from __future__ import annotations

import io
import threading
from collections.abc import Callable, Generator

import pytest
from rich.console import Console

from fedplat.admin import AdminClient
from fedplat.admin.patience import Patience
from fedplat.admin.profile import Profile
from fedplat.cli import job_lists, watch
from fedplat.cli.output import Output
from fedplat.cli.watch import AttemptTable
from fedplat.errors import ServerRefusedError, ServerUnreachableError
from fedplat.wire.v1 import admin_pb2
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import S, State
from support.cli.story import ending, script


class Recorder:
    """A view that remembers, and does something when an event of the script passes by."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self.actions = actions
        self.sequences: list[int] = []
        self.told: list[str] = []
        self.pauses: list[float] = []

    def show(self, event: admin_pb2.JobEvent) -> None:
        self.sequences.append(event.sequence)
        self.actions.get(event.sequence, lambda: None)()

    def follow(self, client: AdminClient, job: admin_pb2.Job) -> admin_pb2.Job:
        return watch.follow(client, job.job_id, watch.View(self.show, self.told.append), self.patience())

    def patience(self) -> Patience:
        """Remembers its pauses, and takes a hundredth of them."""

        def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            threading.Event().wait(seconds / 100.0)

        return Patience(60.0, self.told.append, pause=pause)


def test_a_watch_survives_a_restart_of_the_server(state: State, server: FakeServer, client: AdminClient):
    job = state.add_job()
    events = script()
    state.add_events(*events)

    def restart() -> None:
        server.restart()
        state.add_events(ending())

    recorder = Recorder({150: restart})
    assert recorder.follow(client, job).status == S.JOB_STATUS_COMPLETED
    assert recorder.sequences == [10 * (i + 1) for i in range(len(events) + 1)]
    # What had arrived before the server went may still be shown, so the place of the break is not known here.
    resumed = state.watched_after[1]
    assert (state.watched_after[0], resumed >= 150) == (0, True)
    (told,) = recorder.told
    assert told.startswith(f"waiting for {server.address}: ")
    assert told.endswith("; trying for 60 s")


class Flaky(AdminClient):
    """Breaks each of the first watches before its first event."""

    def __init__(self, server: str, num_breaks: int) -> None:
        super().__init__(Profile(server, insecure=True))
        self.breaks_left = num_breaks

    def watch_job(
        self,
        job: str,
        after_sequence: int = 0,
        progress_every_s: float = 0.0,
        *,
        until_now: bool = False,
        only_new: bool = False,
    ) -> Generator[admin_pb2.JobEvent]:
        self.breaks_left -= 1
        if self.breaks_left >= 0:
            raise ServerUnreachableError("no server answers (gone again)", reason="gone again")
        return super().watch_job(job, after_sequence, progress_every_s, until_now=until_now, only_new=only_new)


def test_a_watch_that_breaks_again_and_again_pauses_longer_and_longer(state: State, server: FakeServer):
    job = state.add_job()
    state.add_events(*script()[:2], ending("CANCELLED", "by an operator"))
    recorder = Recorder({})
    with Flaky(server.address, num_breaks=8) as client:
        job = recorder.follow(client, job)
    assert (job.status, job.reason) == (S.JOB_STATUS_CANCELLED, "by an operator")
    assert recorder.sequences == [10, 20, 30]
    longest = [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert all(each / 2 <= pause <= each for pause, each in zip(recorder.pauses, longest, strict=True))
    assert recorder.told == [f"waiting for {server.address}: gone again; trying for 60 s"]


def test_a_server_that_ends_the_watch_early_is_asked_again(state: State, server: FakeServer, client: AdminClient):
    job = state.add_job()
    state.add_events(*script()[:3])
    state.stop_watch_after = 2
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            state.stop_watch_after = 0
            state.add_events(ending())

    recorder = Recorder({})
    view = watch.View(recorder.show, tell)
    ended = watch.follow(client, job.job_id, view, Patience(60.0, tell, pause=recorder.pauses.append))
    assert ended.status == S.JOB_STATUS_COMPLETED
    assert recorder.sequences == [10, 20, 30, 40]
    assert told == [f"waiting for {server.address}: it closed the watch; trying for 60 s"]


def test_events_behind_a_watch_that_was_cut_off_are_not_lost(state: State, client: AdminClient):
    job = state.add_job()
    state.add_events(*script()[:3])
    state.stop_watch_after = 2

    def end() -> None:
        state.stop_watch_after = 0
        state.add_events(ending())

    recorder = Recorder({20: end})
    assert recorder.follow(client, job).status == S.JOB_STATUS_COMPLETED
    assert recorder.sequences == [10, 20, 30, 40]


def test_a_job_that_ended_before_the_watch(state: State, client: AdminClient):
    job = state.add_job(status=S.JOB_STATUS_FAILED)
    recorder = Recorder({})
    assert recorder.follow(client, job).status == S.JOB_STATUS_FAILED
    assert recorder.told == []


def test_a_server_that_came_back_without_the_job_ends_the_watch(state: State, server: FakeServer, client: AdminClient):
    job = state.add_job()
    state.add_events(*script()[:2])

    def lose() -> None:
        state.jobs.clear()
        server.restart()

    with pytest.raises(ServerRefusedError, match="there is no job"):
        Recorder({20: lose}).follow(client, job)


def test_the_board_counts_what_the_events_say():
    board = AttemptTable()
    settled = [attempt for event in script() if (attempt := board.add(event)) is not None]
    abandoned, trained, evaluated, running = board.attempts
    assert abandoned.phase == admin_pb2.ATTEMPT_PHASE_ABANDONED
    assert abandoned.reason == "3 of 8 clients came"
    assert (trained.round, trained.attempt, trained.assigned) == (1, 2, 4)
    assert (trained.reported, trained.late, trained.failed, trained.rejected) == (2, 1, 1, 0)
    assert trained.update_bytes == 2048
    assert dict(trained.client_metrics) == {"loss": 0.5}
    assert dict(trained.server_metrics) == {"accuracy": 0.75}
    assert evaluated.kind == admin_pb2.ATTEMPT_KIND_EVALUATE
    assert dict(evaluated.client_metrics) == {"accuracy": 0.7}
    assert running.phase == admin_pb2.ATTEMPT_PHASE_COLLECTING
    assert settled == [abandoned, trained, trained, evaluated]
    assert board.committed_rounds == 1
    assert board.job_status == "RUNNING"
    assert not board.has_ended
    board.add(ending("FAILED"))
    assert board.has_ended


def test_an_update_counts_where_it_was_merged():
    """The second round merges an update of a client that began in the first."""

    def event(entity: str, round_: int, to_state: str, client: str = "", update_bytes: int = 0) -> None:
        board.add(
            admin_pb2.JobEvent(
                entity=entity,
                round=round_,
                attempt=1,
                client_id=client,
                to_state=to_state,
                update_bytes=update_bytes,
                kind=admin_pb2.ATTEMPT_KIND_TRAIN if entity == "attempt" else admin_pb2.ATTEMPT_KIND_UNSPECIFIED,
            )
        )

    board = AttemptTable()
    event("attempt", 1, "COLLECTING")
    event("assignment", 1, "REPORTED", "a", 10)
    event("attempt", 1, "COMMITTING")
    event("assignment", 1, "REPORTED", "b", 20)
    event("assignment", 1, "MERGED", "a", 10)
    event("attempt", 1, "COMMITTED")
    event("attempt", 2, "COLLECTING")
    event("assignment", 1, "MERGED", "b", 20)
    event("attempt", 2, "COMMITTED")
    assert [(one.reported, one.update_bytes) for one in board.attempts] == [(1, 10), (1, 20)]


def test_the_board_measures_time_on_the_servers_clock():
    board = AttemptTable()
    for moment, to_state in ((100.0, "SELECTING"), (101.0, "COLLECTING"), (104.5, "COMMITTING"), (105.0, "COMMITTED")):
        board.add(admin_pb2.JobEvent(entity="attempt", round=1, attempt=1, unix_s=moment, to_state=to_state))
        assert board.attempts[0].seconds == moment - 100.0
    board.add(admin_pb2.JobEvent(entity="assignment", round=1, attempt=1, unix_s=200.0, to_state="TRAINING"))
    assert board.attempts[0].seconds == 5.0


def test_the_board_bears_events_of_a_newer_server():
    board = AttemptTable()
    board.add(admin_pb2.JobEvent(entity="weather", to_state="RAIN"))
    board.add(admin_pb2.JobEvent(entity="attempt", round=1, attempt=1, to_state="PONDERING"))
    board.add(admin_pb2.JobEvent(entity="version", round=5, attempt=1, from_state="4", to_state="4", metrics={"x": 1}))
    assert len(board.attempts) == 1
    assert board.committed_rounds == 5


def test_lines_tell_attempts_scores_and_states():
    printed: list[str] = []
    show = watch.lines(printed.append, admin_pb2.Job(name="digits", num_rounds=3))
    for i, event in enumerate([*script(), ending()]):
        event.unix_s = 100.0 + i
        show(event)
    assert printed == [
        "job digits is RUNNING",
        "round 1/3  abandoned  assigned 0  reported 0  late 0  failed 0  rejected 0  1.0 s  3 of 8 clients came",
        "round 1/3 attempt 2  committed  assigned 4  reported 2  late 1  failed 1  rejected 0  "
        "received 2.0 KiB  14.0 s  loss 0.5",
        "round 1/3  scored by the server  accuracy 0.75",
        "round 1/3 attempt 3  evaluation committed  assigned 1  reported 1  late 0  failed 0  rejected 0  5.0 s  "
        "accuracy 0.7",
    ]


def test_a_job_whose_number_of_rounds_is_not_known():
    printed: list[str] = []
    job, board = admin_pb2.Job(name="app"), AttemptTable()
    show = watch.lines(printed.append, job)
    for event in script():
        show(event)
        board.add(event)
    assert printed[1].startswith("round 1  abandoned")
    console = Console(file=io.StringIO(), width=100)
    console.print(watch.picture(board, job, 24))
    assert isinstance(console.file, io.StringIO)
    assert "1 round " in console.file.getvalue()


def test_a_warm_start_has_no_clients_and_no_round():
    printed: list[str] = []
    show = watch.lines(printed.append, admin_pb2.Job(name="digits", num_rounds=3))
    board = AttemptTable()
    kind = admin_pb2.ATTEMPT_KIND_WARM_START
    for at, state, metrics in ((1.0, "COMMITTING", {}), (4.0, "COMMITTED", {"loss": 0.5})):
        event = admin_pb2.JobEvent(entity="attempt", attempt=1, to_state=state, unix_s=at, kind=kind, metrics=metrics)
        show(event)
        board.add(event)
    assert printed == ["warm start  committed  3.0 s  loss 0.5"]
    of_app = watch.lines(printed.append, admin_pb2.Job(name="digits"))  # an app decides how many rounds there are
    of_app(admin_pb2.JobEvent(entity="attempt", attempt=1, to_state="COMMITTED", unix_s=4.0, kind=kind))
    of_app(
        admin_pb2.JobEvent(
            entity="attempt", round=5, attempt=1, to_state="COMMITTED", unix_s=5.0, metrics={"server-round": 3.0}
        )
    )
    assert printed[1].startswith("app start  committed")
    assert printed[2].startswith("round 5 (server-round 3)  committed")
    (attempt,) = board.latest(1)
    columns = {
        column.name: column.cell(attempt) for column in job_lists.round_layout(admin_pb2.Job(num_rounds=3)).columns
    }
    assert (columns["#ROUND"], columns["KIND"], columns["PHASE"]) == ("0", "warm start", "warm start committed")
    columns = {column.name: column.cell(attempt) for column in job_lists.round_layout(admin_pb2.Job()).columns}
    assert (columns["KIND"], columns["PHASE"]) == ("app start", "app start committed")
    console = Console(file=io.StringIO(), width=100)
    console.print(watch.picture(board, admin_pb2.Job(num_rounds=3), 24))
    assert isinstance(console.file, io.StringIO)
    assert "warm start" in console.file.getvalue()


def test_the_picture_shows_the_latest_attempts_that_fit():
    board = AttemptTable()
    job = admin_pb2.Job(name="digits [bold]", num_rounds=3, status=S.JOB_STATUS_RUNNING)
    console = Console(file=io.StringIO(), width=100, markup=False)
    console.print(watch.picture(board, job, 24))
    for event in script():
        board.add(event)
    for height in (24, 6):
        console.print(watch.picture(board, job, height))
    text = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    empty, full, small = text.split("ROUND")[1:]
    assert "digits [bold]" in empty
    assert "0/3 rounds  RUNNING" in empty
    assert "1 try 2  committed          4         2     1       1" in full
    assert "server: accuracy 0.75; cl" in full
    assert "evaluated" in full
    assert "1/3 rounds  RUNNING" in full
    assert "committed" not in small
    assert "collecting" in small


def test_on_a_terminal_the_table_is_live(state: State, server: FakeServer, client: AdminClient):
    job = state.add_job()
    state.add_events(*script(), ending())
    output = Output(as_json=False)
    screen = io.StringIO()
    output.screen = Console(file=screen, force_terminal=True, width=100, height=30)
    with watch.view_for(output, job) as view:
        view.tell("a sentence about the [bold]watch[/bold]\x1b[2J")
        assert watch.follow(client, job.job_id, view).status == S.JOB_STATUS_COMPLETED
    assert "a sentence about the [bold]watch[/bold]\\x1b[2J" in screen.getvalue()
    assert "evaluated" in screen.getvalue()
    assert "COMPLETED" in screen.getvalue()


def test_an_assignment_that_changes_is_counted_in_its_last_state() -> None:
    """Also the report of a client that was revoked before the attempt ended."""
    table = AttemptTable()
    for before, after in (("", "TRAINING"), ("TRAINING", "UPLOADING"), ("UPLOADING", "REPORTED")):
        table.add(admin_pb2.JobEvent(entity="assignment", round=1, attempt=1, from_state=before, to_state=after))
    assert (table.attempts[0].assigned, table.attempts[0].reported, table.attempts[0].dropped) == (1, 1, 0)
    table.add(admin_pb2.JobEvent(entity="assignment", round=1, attempt=1, from_state="REPORTED", to_state="DROPPED"))
    assert (table.attempts[0].assigned, table.attempts[0].reported, table.attempts[0].dropped) == (1, 0, 1)
