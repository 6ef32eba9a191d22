"""`fedplat job logs` and `fedplat job wait`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from fedplat.admin import AdminClient
from fedplat.admin.patience import Patience
from fedplat.cli import following, formats
from fedplat.cli.output import Output
from fedplat.cli.session import CommandSession
from fedplat.errors import ServerUnreachableError
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, start
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import T0, S, State
from support.cli.story import ending, script

LINES = [
    "job digits is RUNNING",
    "round 1/3  abandoned  assigned 0  reported 0  late 0  failed 0  rejected 0  1.0 s  3 of 8 clients came",
    "round 1/3 attempt 2  client client-2 failed: TRAINER_ERROR: out of memory",
    "round 1/3 attempt 2  client client-3 late",
    "round 1/3 attempt 2  committed  assigned 4  reported 2  late 1  failed 1  rejected 0  received 2.0 KiB  14.0 s  "
    "loss 0.5",
    "round 1/3  version 1 committed",
    "round 1/3  scored by the server  accuracy 0.75",
    "round 1/3 attempt 3  evaluation committed  assigned 1  reported 1  late 0  failed 0  rejected 0  5.0 s  "
    "accuracy 0.7",
]


@pytest.fixture
def job(state: State) -> admin_pb2.Job:
    running = state.add_job()
    events = script()
    for event in events:
        if event.to_state == "FAILED":
            event.reason = "TRAINER_ERROR: out of memory"
    state.add_events(*events)
    return running


@pytest.mark.usefixtures("job")
def test_the_history_ends_with_what_is_stored(run: Run, state: State):
    shown = run("job", "logs", "digits")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert [line[21:] for line in shown.stdout.splitlines()] == LINES
    assert shown.stdout.startswith(formats.moment(T0))
    assert [line[21:] for line in run("job", "logs", "digits", "--tail", "2").stdout.splitlines()] == LINES[-2:]
    assert run("job", "logs", "digits", "--tail", "0").stdout == ""
    assert run("job", "logs", "digits", "--since", "1h").stdout == ""
    events = [json.loads(line) for line in run("job", "logs", "digits", "--json").stdout.splitlines()]
    assert [event["sequence"] for event in events] == [event.sequence for event in state.events]
    assert len(run("job", "logs", "digits", "--json", "--tail", "3").stdout.splitlines()) == 3


def test_since_keeps_what_earlier_events_explain(state: State, client: AdminClient, job: admin_pb2.Job):
    """A line after that time counts the assignments before it."""
    printed: list[str] = []
    output = Output()
    output.line = printed.append  # type: ignore[method-assign]
    log = following.JobLog(output, job, since_s=T0 + 17.0)
    log.read(CommandSession(client, output, Patience(0.0, printed.append)))
    assert [line[21:] for line in printed] == LINES[4:]


@pytest.mark.slow
def test_follow_survives_a_restart_and_ends_with_the_job(state: State, server: FakeServer, job: admin_pb2.Job):
    with start(server, "job", "logs", "digits", "--follow", "--tail", "1") as process:
        assert process.stdout is not None
        assert process.stdout.readline()[21:].rstrip() == LINES[-1]
        state.wait_for_watches(2)  # of the history so far, and of what comes: only the second is to be interrupted
        server.restart()
        state.add_events(
            admin_pb2.JobEvent(entity="assignment", round=2, attempt=1, client_id="client-1", to_state="LATE"),
            ending("FAILED", "nobody came"),
        )
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [line[21:] for line in output.splitlines()] == [
        "round 2/3  client client-1 late",
        "job digits is FAILED: nobody came",
    ]
    (line,) = errors.splitlines()
    assert line.startswith(f"waiting for {server.address}: ")


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_ctrl_c_ends_following(state: State, server: FakeServer):
    with start(server, "job", "logs", "digits", "-f") as process:
        assert process.stdout is not None
        for _ in LINES:
            process.stdout.readline()
        state.wait_for_watches(2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "")


@pytest.mark.parametrize(
    ("status", "goal", "code"),
    [
        (S.JOB_STATUS_COMPLETED, "completed", 0),
        (S.JOB_STATUS_FAILED, "completed", 1),
        (S.JOB_STATUS_CANCELLED, "round=2", 1),
        (S.JOB_STATUS_CANCELLED, "round=1", 0),
        (S.JOB_STATUS_RUNNING, "round=1", 0),
        (S.JOB_STATUS_RUNNING, "round=2", 3),
        (S.JOB_STATUS_RUNNING, "completed", 3),
        (S.JOB_STATUS_PAUSED, "completed", 3),
    ],
)
def test_the_exit_status_of_a_wait(status: admin_pb2.JobStatus.ValueType, goal: str, code: int, run: Run, state: State):
    job = state.add_job(status=status)
    result = run("job", "wait", "digits", "--for", goal, "--timeout", "0")
    assert result.exit_code == code
    assert result.stdout == f"job digits ({job.job_id}) is {S.Name(status)[11:]}\n"
    late = f"error: {goal} was not reached within 0 s: 1 committed round so far\n"
    assert result.stderr == (late if code == 3 else "")


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ("ever", "--for 'ever': expected completed, or round=N such as round=10"),
        ("round=0", "expected completed, or round=N"),
        ("round=4", "--for round=4: the job has 3 rounds"),
    ],
)
def test_goals_that_cannot_be_reached(goal: str, message: str, run: Run, state: State):
    state.add_job()
    result = run("job", "wait", "digits", "--for", goal)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


class Clock:
    """A clock that only pauses move; each pause runs the next action."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self._actions = list(actions)

    def now(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        if self._actions:
            self._actions.pop(0)()


def test_a_wait_looks_every_second_until_it_is_reached(state: State, client: AdminClient):
    job = state.add_job()

    def commit() -> None:
        job.round += 1

    clock = Clock(commit, lambda: None, commit)
    command = CommandSession(client, Output(), Patience(0.0, print))
    found, reached = following.wait(command, "digits", 3, 10.0, pause=clock.pause, now=clock.now)
    assert (found.round, reached, clock.pauses) == (3, True, [1.0, 1.0, 1.0])
    found, reached = following.wait(command, "digits", None, 2.5, pause=clock.pause, now=clock.now)
    assert (reached, clock.pauses[3:]) == (False, [1.0, 1.0, 0.5])


def test_a_wait_ends_in_time_while_the_server_is_away(state: State, client: AdminClient, server: FakeServer):
    state.add_job()
    clock = Clock(server.stop)
    told: list[str] = []
    command = CommandSession(client, Output(), Patience(60.0, told.append))
    with pytest.raises(ServerUnreachableError):
        following.wait(command, "digits", None, 4.0, pause=clock.pause, now=clock.now)
    assert clock.now_s == pytest.approx(4.0)
