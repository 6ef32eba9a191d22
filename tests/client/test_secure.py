"""Secure aggregation at the client: the protocol over a socket, with clients, calls and processes that are lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.secure_aggregation.setup import FEATURE, LocalNoise
from fedplat.wire.v1 import model_pb2
from fedplat_client import Task, TrainResult
from fedplat_client._state import released
from fedplat_client._state.data_dir import DataDirectory
from fedplat_client._state.two_phase import ServedAttempts
from fedplat_client.cancellation import StopSignal
from support.fake_fleet import serving
from support.secure_cohort import MakeCohort

STEPS = ("keys", "shares", "none", "confirmation", "answer")
ENDINGS = (
    model_pb2.REASON_SURPLUS,
    model_pb2.REASON_STALE,
    model_pb2.REASON_ATTEMPT_ABANDONED,
    model_pb2.REASON_STEP_TIMEOUT,
)
TRAINER = """
from fedplat_client import TrainResult

def digits(task):
    return TrainResult(parameters=task.parameters, num_examples=1)
"""


@pytest.mark.parametrize(
    ("confirm", "modulus", "noise"),
    [(False, 32, None), (True, 27, None), (False, 30, LocalNoise(1000.0, 4.0, 100, 4.0))],
)
def test_the_server_gets_the_sum_and_no_summand(
    make_cohort: MakeCohort, tmp_path: Path, confirm: bool, modulus: int, noise: LocalNoise | None
) -> None:
    cohort = make_cohort(confirm=confirm, modulus=modulus, noise=noise)
    cohort.run(options_of=lambda number: {"require_local_noise": noise is not None})
    assert cohort.failures == []
    assert len(cohort.check_sum(tmp_path)) == 4
    fleet = cohort.fleet
    assert {tuple(each.features) for each in fleet.requests["CheckIn"]} == {(FEATURE,)}
    assert {(each.num_examples, len(each.metrics)) for each in fleet.requests["Report"]} == {(1, 0)}
    for number, vector in cohort.encoded.items():
        assert np.count_nonzero(fleet.read_masked(f"token-{number:g}", tmp_path) == vector) < 5  # chance: 2^-27 each
    assert {kind for _, kind in fleet.messages} == {*STEPS} - ({"confirmation"} if not confirm else set())
    assert {len(each) for each in fleet.messages.values()} == {1}
    for client in cohort.clients.values():
        (line,) = released.read(client.released)
        assert line.content == "update"
        assert line.digest in {each.digest for each in fleet.requests["Report"]}
        assert line.protection.masked
        assert line.protection.min_clients == 3
        assert (line.protection.noise_multiplier > 0.0) == (noise is not None)
        assert (line.num_examples, line.metrics) == (1.0, {})  # those of the client are masked


@pytest.mark.fault("S1")
@pytest.mark.parametrize("step", ["keys", "shares", "report", "none", "answer"])
def test_a_client_that_is_lost_in_any_step_leaves_an_exact_sum(
    make_cohort: MakeCohort, tmp_path: Path, step: str
) -> None:
    cohort = make_cohort(5)
    cohort.fleet.refusals["token-2", step] = model_pb2.REASON_SURPLUS
    cohort.run()
    assert cohort.failures == []
    assert ("token-2" in cohort.check_sum(tmp_path)) == (step in ("none", "answer"))


@pytest.mark.fault("S8")
@pytest.mark.parametrize("step", ["keys", "shares", "none", "answer"])
def test_the_end_of_an_attempt_is_no_failure_of_its_clients(make_cohort: MakeCohort, step: str) -> None:
    cohort = make_cohort(4)
    for number, reason in enumerate(ENDINGS, 1):
        cohort.fleet.refusals[f"token-{number}", step] = reason
    cohort.run()
    assert cohort.failures == []
    assert cohort.delays_s == []
    assert ("Report" in cohort.fleet.calls) == (step in ("none", "answer"))


def test_a_client_whose_message_is_rejected_backs_off(make_cohort: MakeCohort) -> None:
    cohort = make_cohort(1)
    cohort.assign(trainer="missing", secure_setup=b"")
    cohort.fleet.refusals["token-1", "keys"] = model_pb2.REASON_REJECTED_MESSAGE
    with serving(cohort.fleet):
        cohort.client(1).run(max_tasks=2)
    assert len(cohort.delays_s) == 1
    assert [each.reason for each in cohort.failures] == [model_pb2.REASON_UNKNOWN_TRAINER]


@pytest.mark.fault("S3")
def test_calls_that_break_are_made_again_with_the_same_bytes(make_cohort: MakeCohort, tmp_path: Path) -> None:
    """Before the server has the message, and after it."""
    cohort = make_cohort(confirm=True)
    cohort.fleet.failures["Step"] = [grpc.StatusCode.UNAVAILABLE] * 7
    cohort.fleet.lost_replies["Step"] = 7
    cohort.run()
    assert len(cohort.check_sum(tmp_path)) == 4
    assert {len(set(contents)) for contents in cohort.fleet.messages.values()} == {1}
    assert sum(len(contents) - 1 for contents in cohort.fleet.messages.values()) == 7
    assert len(cohort.delays_s) == 14


@pytest.mark.fault("S2")
def test_a_server_that_is_restarted_in_each_step_gets_the_same_messages(
    make_cohort: MakeCohort, tmp_path: Path
) -> None:
    cohort = make_cohort(confirm=True)
    fleet = cohort.fleet
    patient = {"wait": StopSignal.wait, "first_backoff_s": 0.01, "max_backoff_s": 0.05, "transfer_attempts": 10_000}
    reached = {step: threading.Event() for step in STEPS}
    fleet.on_message = lambda token, kind: reached[kind].set()
    with contextlib.ExitStack() as running:
        with serving(fleet):
            port = fleet.port
            running.enter_context(cohort.running(options_of=lambda number: patient))
            fleet.wait_for_message("keys", 4)  # all have their assignments, which this fleet gives once
        for step in STEPS[1:]:
            fleet.restart()
            with serving(fleet, port):
                assert reached[step].wait(60)
        fleet.restart()
        with serving(fleet, port):
            running.pop_all().close()
    assert cohort.failures == []
    assert len(cohort.check_sum(tmp_path)) == 4
    assert {len(set(contents)) for contents in fleet.messages.values()} == {1}


def test_long_polls_that_end_early_are_repeated_but_not_at_once(make_cohort: MakeCohort, tmp_path: Path) -> None:
    cohort = make_cohort(3)
    cohort.fleet.waiting_s = 0.0
    waits: list[float] = []

    def wait(signal: StopSignal, seconds: float) -> bool:
        waits.append(seconds)
        return signal.wait(0.001)

    cohort.run(options_of=lambda number: {"wait": wait})
    assert cohort.failures == []
    assert len(cohort.check_sum(tmp_path)) == 3
    assert waits
    assert max(waits) <= 0.1


@pytest.mark.parametrize("step", ["keys", "shares", "none", "answer"])
def test_a_server_that_stays_away_is_given_up_at_the_deadline(
    make_cohort: MakeCohort, tmp_path: Path, step: str
) -> None:
    """The clock of each client is moved by its waiting, ten seconds at a time."""
    cohort = make_cohort(4)
    clocks = {number: [0.0] for number in range(1, 5)}

    def options_of(number: int) -> dict[str, object]:
        def wait(signal: StopSignal, seconds: float) -> bool:
            clocks[number][0] += 10.0
            return signal.is_set()

        return {"wait": wait, "clock": lambda: clocks[number][0]}

    cohort.fleet.broken = {("token-1", step)}
    cohort.run(options_of=options_of)
    assert 120 <= clocks[1][0] <= 320
    assert cohort.failures == []
    assert ("token-1" in cohort.check_sum(tmp_path)) == (step in ("none", "answer"))


@pytest.mark.parametrize("step", ["keys", "shares", "none", "answer"])
def test_the_owner_stops_a_client_in_any_step(make_cohort: MakeCohort, tmp_path: Path, step: str) -> None:
    cohort = make_cohort(4)
    fleet = cohort.fleet

    def stop(token: str, kind: str) -> None:
        if (token, kind) == ("token-1", step):
            cohort.clients[1].stop()
            fleet.wait_for("Fail")  # before the server answers

    fleet.on_message = stop
    cohort.run()
    assert [(each.token, each.reason) for each in cohort.failures] == [("token-1", model_pb2.REASON_CLIENT_STOPPED)]
    assert ("token-1" in cohort.check_sum(tmp_path)) == (step in ("none", "answer"))


def test_a_stop_order_ends_the_wait_for_other_clients(make_cohort: MakeCohort) -> None:
    """It comes with a heartbeat while the client waits for the roster."""
    cohort = make_cohort(2)
    with serving(cohort.fleet), cohort.running([1]):
        cohort.fleet.wait_for("Step")
        cohort.fleet.say_stop(model_pb2.REASON_JOB_CANCELLED)
    assert cohort.failures == []
    assert "Report" not in cohort.fleet.calls


@pytest.mark.slow
@pytest.mark.fault("S9")
def test_a_process_that_is_killed_between_steps_has_lost_its_keys(
    make_cohort: MakeCohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not train again if the server gives it the assignment again, perhaps as it has not read the keys."""
    cohort = make_cohort(5)
    fleet = cohort.fleet
    (tmp_path / "edge.py").write_text(TRAINER)
    arguments = ["run", "--data-dir", "data-5", "--label", "number=5", "--trainer", "edge:digits", "--max-tasks", "1"]
    command = [sys.executable, "-m", "fedplat_client", *arguments]
    with serving(fleet), contextlib.ExitStack() as running:
        environment = {**os.environ, "FEDPLAT_TICKET": fleet.ticket.to_text()}
        killed = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
        running.enter_context(cohort.running(range(1, 5)))
        fleet.on_message = lambda token, kind: killed.kill() if (token, kind) == ("token-5", "shares") else None
        killed.wait(60)
        fleet.drop("token-5")
        running.pop_all().close()
        cohort.assign()
        again = subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60, stderr=subprocess.PIPE)
    assert b"reason=KEYS_LOST" in again.stderr
    assert [(each.token, each.reason) for each in cohort.failures] == [("token-5", model_pb2.REASON_KEYS_LOST)]
    assert len(fleet.messages["token-5", "keys"]) == 1
    assert "token-5" not in cohort.check_sum(tmp_path)


def test_an_attempt_is_recorded_before_the_server_has_a_key_of_it(make_cohort: MakeCohort) -> None:
    """However early the process is killed after that, the client takes part once."""
    cohort = make_cohort(4)
    fleet, recorded = cohort.fleet, dict[str, bool]()

    def look(token: str, kind: str) -> None:
        if kind == "keys":
            folder = cohort.folder / f"data-{token.removeprefix('token-')}"
            served = ServedAttempts(DataDirectory(folder, fleet.address, "demo").served)
            recorded[token] = not served.is_new("job-1", 1, 1)

    fleet.on_message = look
    cohort.run()
    assert recorded == {f"token-{number}": True for number in range(1, 5)}


def test_client_state_belongs_to_the_masked_update(make_cohort: MakeCohort) -> None:
    cohort = make_cohort(3)
    seen: list[int] = []

    def train(task: Task) -> TrainResult:
        known = task.client_state.get("count")
        seen.append(0 if known is None else int(known["count"]))
        task.client_state.put("count", Parameters.from_arrays({"count": np.array(seen[-1] + 1)}))
        return TrainResult(parameters=task.parameters, num_examples=1)

    with serving(cohort.fleet):
        with cohort.running(options_of=lambda number: {"trainer": train}):
            pass
        cohort.assign(secure_setup=b"")
        cohort.client(1, train).run(max_tasks=1)
    first, again, _ = (each for each in cohort.fleet.requests["Report"] if each.token == "token-1")
    assert first.digest == again.digest
    assert hashlib.sha256(cohort.fleet.uploads[first.digest]).hexdigest() == first.digest
    assert seen == [0, 0, 0, 1]


def test_memory_is_one_vector_while_others_train_and_none_after_the_report(make_cohort: MakeCohort) -> None:
    """Besides the model, which is a file, and the files that the server of the test has received."""
    size = 2**20
    cohort = make_cohort(3, Parameters.from_arrays({"weight": np.zeros(size, np.float32)}), metrics={})
    cohort.is_recording = False
    used: dict[str, int] = {}

    def measure(token: str, kind: str) -> None:
        used[kind] = tracemalloc.get_traced_memory()[0]  # the last of the three clients remains

    def train(task: Task) -> TrainResult:
        task.parameters["weight"] += np.float32(1e-4)
        return TrainResult(parameters=task.parameters, num_examples=1)

    cohort.fleet.on_message = measure
    tracemalloc.start()
    try:
        cohort.run(options_of=lambda number: {"trainer": train})
    finally:
        tracemalloc.stop()
    assert cohort.failures == []
    vectors = {kind: used[kind] / (4 * size) for kind in ("keys", "none")}
    assert 3.0 <= vectors["keys"] <= 3.5  # one in each client
    assert 3.0 <= vectors["none"] <= 3.5  # those that the server has received
