"""The progress of clients, as `fedplat job show`, `job rounds`, `job watch` and `client list` show it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from fedplat.admin import AdminClient, descriptions
from fedplat.cli import watch
from fedplat.cli.output import Output
from fedplat.cli.watch import AttemptTable
from fedplat.rounds.protocols.flower_app import FLOWER_APP
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, parsed
from support.cli.fake_state import S, State
from support.cli.story import script


def test_job_show_and_rounds_have_the_progress_of_clients(run: Run, state: State):
    job = state.add_job()
    job.current.CopyFrom(admin_pb2.Round(round=2, attempt=1, phase=admin_pb2.ATTEMPT_PHASE_COLLECTING))
    assert parsed(run("job", "show", "digits", "--json"))["current"]["progress"] is None
    job.current.progress.num_training = 12
    assert "progress    12 at work (progress not known yet)\n" in run("job", "show", "digits").stdout
    job.current.progress.MergeFrom(
        admin_pb2.AttemptProgress(num_uploading=2, num_known=9, median=0.4, minimum=0.1, slowest_client_id="c-7")
    )
    shown = "progress    12 at work (9 known: median 40%, slowest 10%: c-7), 2 uploading\n"
    assert shown in run("job", "show", "digits").stdout
    assert parsed(run("job", "show", "digits", "--json"))["current"]["progress"] == {
        "num_training": 12,
        "num_uploading": 2,
        "num_known": 9,
        "median": 0.4,
        "minimum": 0.1,
        "slowest_client_id": "c-7",
        "step": None,
    }
    job.current.progress.num_known = 12
    state.rounds = [job.current]
    row = run("job", "rounds", "digits").stdout.splitlines()[-1]
    assert row.endswith("12 at work (median 40%, slowest 10%: c-7), 2 uploading")


@pytest.mark.parametrize(
    ("phase", "done"),
    [
        ("ADVERTISING", "have trained and sent their keys"),
        ("SHARING", "have sent the shares of their secrets"),
        ("COLLECTING", "have sent their masked update"),
        ("CONFIRMING", "have confirmed whose updates are in the sum"),
        ("UNMASKING", "have sent the shares that remove the masks"),
    ],
)
def test_each_step_of_a_secure_aggregation_has_a_sentence(run: Run, state: State, phase: str, done: str):
    job = state.add_job()
    value = admin_pb2.AttemptPhase.Value(f"ATTEMPT_PHASE_{phase}")
    step = admin_pb2.StepProgress(phase=value, num_done=8, num_wanted=10)
    job.current.CopyFrom(admin_pb2.Round(round=2, attempt=1, phase=value, assigned=12, busy=3))
    job.current.progress.CopyFrom(admin_pb2.AttemptProgress(step=step))
    sentence = f"8 of 10 clients {done}"
    assert f"progress    {sentence}\n" in run("job", "show", "digits").stdout
    state.rounds = [job.current]
    assert run("job", "rounds", "digits").stdout.splitlines()[-1].endswith(sentence)
    assert descriptions.largest_loss(job.current) == f"{sentence}, 3 of 12 clients are at work"


def test_client_list_has_the_progress_of_each_client(run: Run, state: State):
    state.clients = [
        admin_pb2.Client(client_id="c1", population="demo", state="busy", job_id="j", progress=0.4),
        admin_pb2.Client(client_id="c2", population="demo", state="busy", job_id="j"),
    ]
    rows = run("client", "list", "-o", "wide").stdout.splitlines()[1:]
    assert [row.split()[:5] for row in rows] == [["c1", "demo", "busy", "40%", "j"], ["c2", "demo", "busy", "j", "-"]]
    assert [client["progress"] for client in parsed(run("client", "list", "--json"))] == [0.4, None]


def progress_event(at: float, **fields: Any) -> admin_pb2.JobEvent:
    """About the attempt that the story ends with."""
    progress = admin_pb2.AttemptProgress(num_training=1, **fields)
    return admin_pb2.JobEvent(entity="progress", round=2, attempt=1, sequence=1, unix_s=at, progress=progress)


def test_the_board_has_the_progress_of_an_attempt_that_collects():
    board = AttemptTable()
    for event in script():
        board.add(event)
    assert board.add(progress_event(7.0, num_known=1, median=0.5, minimum=0.5)) is None
    running = board.attempts[-1]
    assert (running.progress.median, running.seconds) == (0.5, 7.0)
    board.add(admin_pb2.JobEvent(entity="attempt", round=2, attempt=1, to_state="COMMITTING"))
    assert not running.HasField("progress")


def test_lines_and_the_picture_have_the_progress():
    printed: list[str] = []
    job = admin_pb2.Job(name="digits", num_rounds=3)
    show, board = watch.lines(printed.append, job), AttemptTable()
    for event in (*script(), progress_event(7.0)):
        show(event)
        board.add(event)
    assert printed[-1] == "round 2/3  1 at work (progress not known yet)"
    console = Console(file=io.StringIO(), width=120)
    console.print(watch.picture(board, job, 24))
    assert isinstance(console.file, io.StringIO)
    assert "1 at work (progress not known yet)" in console.file.getvalue()


def test_a_line_states_why_an_attempt_waits():
    printed: list[str] = []
    show = watch.lines(printed.append, admin_pb2.Job(name="digits", num_rounds=3))
    reason = "waits for clients: 0 of 2 can be drawn now; 2 more do not have the trainer digits, but linear"
    show(admin_pb2.JobEvent(entity="progress", round=1, attempt=1, reason=reason))
    assert printed == [f"round 1/3  {reason}"]
    start = FLOWER_APP.describe_start(1)
    watch.lines(printed.append, admin_pb2.Job(name="digits"))(
        admin_pb2.JobEvent(entity="progress", attempt=1, kind=admin_pb2.ATTEMPT_KIND_WARM_START, reason=start)
    )
    assert printed[1:] == [
        "app start  the ServerApp starts, and may wait until it has the clients that it needs: it has 1 client so far"
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_watch_asks_for_the_progress(state: State, client: AdminClient, as_json: bool):
    job = state.add_job(status=S.JOB_STATUS_COMPLETED)
    with watch.view_for(Output(as_json=as_json), job) as view:
        watch.follow(client, job.job_id, view)
    wanted = watch.JSON_PROGRESS_EVERY_S if as_json else watch.LINE_PROGRESS_EVERY_S
    assert set(state.progress_every_s) == {wanted}
