"""`describe`: what a job, a round or a client does, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedplat.admin import descriptions
from fedplat.admin.descriptions import funnel_stages, largest_loss
from fedplat.cli import clients, formats, round_description
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, parsed
from support.cli.fake_state import T0, S, State

JOB = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 3
model.initial = "model.safetensors"
selection = {goal = 8, where = "region == 'eu'", min_separation = 2}
"""
COMMITTED, ABANDONED = admin_pb2.ATTEMPT_PHASE_COMMITTED, admin_pb2.ATTEMPT_PHASE_ABANDONED
COLLECTING, SELECTING = admin_pb2.ATTEMPT_PHASE_COLLECTING, admin_pb2.ATTEMPT_PHASE_SELECTING
EXCHANGING = admin_pb2.ATTEMPT_PHASE_EXCHANGING


def attempt(phase: admin_pb2.AttemptPhase.ValueType = COMMITTED, /, **numbers: Any) -> admin_pb2.Round:
    """Ten of forty clients are selected, six of them train, and five reports are merged."""
    known: dict[str, Any] = {
        "round": 2,
        "attempt": 1,
        "kind": admin_pb2.ATTEMPT_KIND_TRAIN,
        "goal": 8,
        "minimum": 5,
        "target": 10,
        "checked_in": 40,
        "eligible": 20,
        "assigned": 10,
        "downloaded": 9,
        "trained": 6,
        "reported": 6,
        "merged": 5,
    }
    return admin_pb2.Round(phase=phase, **(known | numbers))


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({}, "the largest loss: 3 of 9 clients received the model but did not complete the training"),
        ({"downloaded": 4, "trained": 4, "reported": 4}, "the largest loss: 6 of 10 clients did not receive the model"),
        (
            {"trained": 9, "reported": 5},
            "the largest loss: 4 of 9 clients completed the training, but their update was not accepted",
        ),
        (
            {"downloaded": 10, "trained": 10, "reported": 10},
            "the largest loss: 5 of 10 clients reported, but the version was made without them",
        ),
        (
            {"eligible": 6, "assigned": 6},
            "10 clients were wanted, but only 6 of the 40 that had checked in were eligible",
        ),
        ({"surplus": 3}, "no loss: 3 clients more than needed, since the goal was reached"),
        ({"downloaded": 10, "trained": 10, "reported": 10, "merged": 10}, ""),
    ],
)
def test_the_largest_loss_of_an_ended_attempt(numbers: dict[str, int], sentence: str):
    assert largest_loss(attempt(COMMITTED, **numbers)) == sentence


def test_an_abandoned_attempt_merged_nothing_and_that_is_no_loss():
    given = attempt(ABANDONED, merged=0)
    assert largest_loss(given).startswith("the largest loss: 3 of 9 clients received the model")
    assert [(step.name, step.count) for step in funnel_stages(given)][-2:] == [("reported", 6), ("merged", None)]


def test_an_open_attempt_has_no_loss_yet():
    assert largest_loss(attempt(COLLECTING, reported=2, busy=7, late=1)) == (
        "2 of 8 reports are there, 7 of 10 clients are at work, 1 were lost"
    )
    assert largest_loss(attempt(SELECTING, assigned=0)) == "it waits for 10 eligible clients"


def test_numbers_that_an_older_server_did_not_count_are_not_losses():
    given = attempt(checked_in=0, eligible=0, downloaded=0, trained=0)
    assert [step.count for step in funnel_stages(given)] == [None, None, 10, None, None, 6, 5]
    assert largest_loss(given) == ("the largest loss: 4 of 10 clients did not come to the stage 'reported'")
    rows = round_description.funnel_rows(given)
    assert [row[1:3] for row in rows] == [
        *([("-", "")] * 2),
        ("10", ""),
        *([("-", "")] * 2),
        ("6", "-4"),
        ("5", "-1"),
    ]


def test_an_evaluation_merges_nothing():
    given = attempt(kind=admin_pb2.ATTEMPT_KIND_EVALUATE, merged=0)
    assert [step.name for step in funnel_stages(given)][-1] == "reported"


@pytest.fixture
def job(state: State) -> admin_pb2.Job:
    """A job whose round 2 was abandoned."""
    running = state.add_job()
    running.job_file = JOB
    running.reason = "retrying in 30 s"
    failed = attempt(ABANDONED, reported=3, merged=0, reason="3 of at least 5 reports")
    state.rounds = [attempt(round=1), failed]
    running.current.CopyFrom(failed)
    reasons = [
        admin_pb2.ReasonCount(
            state="FAILED", reason="TRAINER_ERROR", count=4, text="the trainer raised an error", example="no\x1b[2J"
        )
    ]
    labels = [admin_pb2.LabelCount(name="region", value="eu", assigned=10, reported=3)]
    state.details[2, 1] = admin_pb2.RoundDetails(round=failed, reasons=reasons, labels=labels, num_attempts=1)
    for number, each in enumerate(("FAILED", "MERGED", "LATE")):
        state.assignments.append(
            admin_pb2.AssignmentDetails(
                job_id=running.job_id, job_name="digits", round=2, attempt=1, client_id=f"c-{number}", state=each
            )
        )
    state.assignments[0].reason = "TRAINER_ERROR"
    for number, region in enumerate(("us", "eu", "eu")):
        state.clients.append(
            admin_pb2.Client(
                client_id=f"c-{number}", population="demo", state="waiting" if number else "away", last_seen_unix_s=T0
            )
        )
        state.clients[-1].labels["region"] = region
    state.alerts = [
        admin_pb2.Alert(
            name="job_stalled",
            severity=admin_pb2.ALERT_SEVERITY_CRITICAL,
            text="No commit.",
            remedy="Add clients.",
            job_id=running.job_id,
        ),
        admin_pb2.Alert(name="low", severity=admin_pb2.ALERT_SEVERITY_WARNING, text="Few wait.", population="demo"),
        admin_pb2.Alert(name="disk_full", severity=admin_pb2.ALERT_SEVERITY_CRITICAL, text="The disk is full."),
        admin_pb2.Alert(
            name="job_stalled", severity=admin_pb2.ALERT_SEVERITY_CRITICAL, text="Another.", job_id="j-other"
        ),
    ]
    return running


def test_a_job_that_waits_is_described_with_the_why(run: Run, job: admin_pb2.Job):
    shown = run("job", "describe", "digits")
    assert (shown.exit_code, shown.stderr) == (0, "")
    for text in (
        "now         round 2/3 waits for clients: retrying in 30 s. Of 3 clients of population demo, 2 wait and 0 are "
        "busy; 10 must be eligible and wait. Eligible are clients with region == 'eu'. A client rests for 2 rounds "
        "after each of its own\n",
        "\nAlerts\ncritical: No commit. Add clients.\nwarning: Few wait.\n",
        "\nRound 2, attempt 1: from checked in to merged\n",
        "the largest loss: 3 of 9 clients received the model but did not complete the training\n",
        "4  FAILED  TRAINER_ERROR  the trainer raised an error; a client wrote: no\\x1b[2J\n",
        "region  eu           10         3       0\n",
        "\nLast rounds\n",
        "\nLast assignments\n",
    ):
        assert text in shown.stdout
    assert "disk" not in shown.stdout
    assert "Another" not in shown.stdout


def test_an_app_that_may_wait_for_clients_is_no_commit(run: Run, state: State, job: admin_pb2.Job):
    more = 'rounds = 1_000_000\nselection = {goal = 1, over_selection = 1.0}\nflower.app = "app"\n'
    job.job_file = JOB.partition("rounds")[0] + more + 'model.initial = "model.safetensors"\n'
    start = attempt(admin_pb2.ATTEMPT_PHASE_COMMITTING, round=0, kind=admin_pb2.ATTEMPT_KIND_WARM_START)
    state.details[0, 1] = admin_pb2.RoundDetails(round=start, num_attempts=1)
    job.current.CopyFrom(start)
    assert "now         the ServerApp starts, and may wait until" in run("job", "describe", "digits").stdout


def test_the_bottleneck_of_a_warm_start_is_described(run: Run, state: State, job: admin_pb2.Job):
    profile = {"step_s": 0.42, "step_compute": 0.3, "step_communication": 0.61, "step_bubble": 0.04, "step_input": 0.05}
    metrics = {"loss": 0.25, **profile, "step_slowest_rank": 1.0}
    warm_start = admin_pb2.Round(kind=admin_pb2.ATTEMPT_KIND_WARM_START, phase=COMMITTED, client_metrics=metrics)
    state.rounds.insert(0, warm_start)
    line = (
        "the bottleneck is communication: 61 % of 0.42 s for a step (compute 30 %, bubble 4 %, input 5 %); "
        "slowest rank 1"
    )
    assert "the bottleneck is" not in run("job", "describe", "digits").stdout.partition("Last rounds")[0]
    assert parsed(run("job", "describe", "digits", "--json"))["bottleneck"] is None
    job.job_file += "warm_start = {trainer = 't', batch_size = 8, learning_rate = 0.1, profile = true}\n"
    assert f"\nwarm start  {line}\n" in run("job", "describe", "digits").stdout
    assert parsed(run("job", "describe", "digits", "--json"))["bottleneck"] == line
    assert formats.metrics(metrics, {}) == f"loss 0.25; {line}"
    assert formats.metrics(metrics, {"loss": 0.2}) == f"server: loss 0.2; clients: loss 0.25; {line}"
    assert formats.metrics({"step_s": 0.42, "step_input": 1.0}, {}) == "step_input 1, step_s 0.42"  # a client's own
    assert formats.metrics(metrics | {"step_s": math.nan}, {}).endswith(", step_s nan, step_slowest_rank 1")


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (S.JOB_STATUS_DRAFT, "it was not started yet. Start it with: fedplat job start "),
        (S.JOB_STATUS_PAUSED, "it was paused: retrying in 30 s. Continue it with: fedplat job resume "),
        (S.JOB_STATUS_COMPLETED, "all its rounds are committed"),
        (S.JOB_STATUS_FAILED, "it failed: retrying in 30 s. Its models are kept"),
        (S.JOB_STATUS_CANCELLED, "it was cancelled: retrying in 30 s."),
    ],
)
def test_each_status_is_explained(status: admin_pb2.JobStatus.ValueType, text: str, run: Run, job: admin_pb2.Job):
    job.status = status
    assert f"now         {text}" in run("job", "describe", "digits").stdout


def test_an_open_attempt_is_explained(run: Run, state: State, job: admin_pb2.Job):
    state.details[2, 1].round.CopyFrom(attempt(COLLECTING, reported=3, busy=4))
    text = "round 2/3 collects reports: 3 of 8 are there, 4 clients at work: retrying in 30 s\n"
    assert text in run("job", "describe", "digits").stdout
    state.details[2, 1].round.CopyFrom(attempt(admin_pb2.ATTEMPT_PHASE_COMMITTING))
    assert "round 2/3 is being committed" in run("job", "describe", "digits").stdout
    shown = state.details[2, 1].round
    for phase, verb in ((admin_pb2.ATTEMPT_PHASE_SHARING, "aggregates securely"), (EXCHANGING, "exchanges models")):
        shown.progress.step.CopyFrom(admin_pb2.StepProgress(phase=phase, num_done=2, num_wanted=8))
        assert f"round 2/3 {verb}: 2 of 8 clients have" in run("job", "describe", "digits").stdout


@pytest.mark.usefixtures("job")
def test_descriptions_as_json(run: Run):
    described = parsed(run("job", "describe", "digits", "--json"))
    assert described["job"]["name"] == "digits"
    assert [alert["name"] for alert in described["alerts"]] == ["job_stalled", "low"]
    assert described["population"]["num_waiting"] == 2
    assert described["round"]["reasons"][0]["count"] == 4
    round_ = parsed(run("round", "describe", "digits", "2", "-o", "json"))
    assert [one["state"] for one in round_["assignments"]] == ["FAILED", "LATE"]
    client = parsed(run("client", "describe", "c-0", "--json"))
    assert (client["client"]["state"], len(client["assignments"])) == ("away", 1)
    assert run("client", "describe", "c-0", "-o", "name").stdout == "c-0\n"


def test_a_job_without_a_round(run: Run, state: State):
    state.add_job(status=S.JOB_STATUS_DRAFT)
    shown = run("job", "describe", "digits")
    assert shown.exit_code == 0
    assert "Round" not in shown.stdout


@pytest.mark.usefixtures("job")
def test_a_round_is_described(run: Run):
    shown = run("round", "describe", "digits", "2")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "round     2/3, attempt 1 of 1, train from version 0\n" in shown.stdout
    assert "phase     abandoned: 3 of at least 5 reports\n" in shown.stdout
    assert "wanted    10 clients and 8 reports; at least 5 reports\n" in shown.stdout
    lost = shown.stdout.partition("Assignments that were lost\n")[2].splitlines()
    assert [line.split()[:2] for line in lost[1:]] == [["c-0", "FAILED"], ["c-2", "LATE"]]
    missing = run("round", "describe", "digits", "7")
    assert (missing.exit_code, missing.stderr) == (1, "error: the job has no such attempt at round 7\n")
    assert run("round", "describe", "digits", "0").exit_code == 2


@pytest.mark.usefixtures("job")
def test_a_client_is_described_with_why_it_is_not_selected(run: Run):
    shown = run("client", "describe", "c-0").stdout
    assert "now          it is not connected; it was seen " in shown
    assert "assignments  1 FAILED; most often because of TRAINER_ERROR\n" in shown
    assert "never: the job selects clients with region == 'eu', and its labels do not match\n" in shown
    eligible = run("client", "describe", "c-1").stdout
    assert "now          it is connected and waits for work\n" in eligible
    assert "eligible by its labels if it has the trainer digits; a round takes 11, and a client rests for" in eligible


def test_a_client_without_the_trainer_of_a_job_is_not_eligible(state: State, job: admin_pb2.Job):
    client = admin_pb2.Client(client_id="c", labels={"region": "eu"}, trainers=["linear", "trees"])
    explained = clients.explain_selection(client, job)
    assert explained == "never: it does not have the trainer digits, but linear, trees"
    client.trainers.append("digits")
    assert clients.explain_selection(client, job).startswith("eligible by its labels; a round takes 11")
    assert clients.describe_fields(client)["trainers"] == "linear, trees, digits"
    assert clients.describe_fields(admin_pb2.Client())["trainers"].startswith("not known")


def test_a_busy_client_that_sends_nothing_is_silent():
    client = admin_pb2.Client(client_id="c", last_seen_unix_s=T0, job_id="j-1", state="busy")
    assert clients.describe_silence(client, T0 + 44.0) == ""
    assert clients.describe_silence(client, T0 + 75.0) == ", silent for 1 min 15 s"
    assert "was last seen 1 min 15 s ago: it may have stopped" in clients.explain(client, T0 + 75.0)
    client.state = "away"
    assert clients.describe_silence(client, T0 + 75.0) == ""


def test_what_a_client_does():
    client = admin_pb2.Client(client_id="c", last_seen_unix_s=T0, job_id="j-1", state="busy")
    assert clients.explain(client, T0 + 15.0) == "it works for job j-1; it was seen 15.0 s ago"
    client.state = "revoked"
    assert "it must enroll as another client, with a new ticket and another data directory" in clients.explain(client)
    client.state = "away"
    hangs = clients.explain(client, T0 + 2.0)
    assert hangs.startswith("its trainer has not returned from a task of job j-1 that has ended"), hangs
    client.job_id, client.last_seen_unix_s = "", 0.0
    assert "was not seen since the server started" in clients.explain(client)
    newer = admin_pb2.Job(job_file="unknown = 1")
    assert clients.explain_selection(client, newer).startswith("unknown: ")


@pytest.mark.parametrize(("kind", "expected"), [("ring", "0.0176"), ("neighbours", "0.0176 (tolerance 0.01)")])
def test_only_an_exchange_between_neighbours_has_a_tolerance(kind: str, expected: str) -> None:
    """A ring computes the mean, whatever the distance of its members from it."""
    done = admin_pb2.Exchange(kind=kind, topology="ring", num_silos=4, relative_distance=0.0176, tolerance=0.01)
    assert descriptions.describe_exchange(done).endswith(f"4 silos; distance from the mean {expected}")
