"""`fedplat-client once`, and external trainers by the command line, with a scripted server and real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client.commands import main
from support.fake_fleet import FakeFleet
from support.polling import until
from support.process_logs import open_log

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
RETURN = """
cp model.safetensors update.safetensors; echo '{"num_examples": 2, "metrics": {"loss": 0.5}}' > result.json
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_program(text: str) -> str:
    path = Path("program")
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o700)
    return f"digits=exec:{path.resolve()}"


def arguments(fleet: FakeFleet, *trainers: str) -> list[str]:
    Path("ticket").write_text(fleet.ticket.to_text())
    given = [part for each in trainers for part in ("--trainer", each)]
    return ["once", "--ticket-file", "ticket", "--data-dir", "data", *given]


def run(command: Sequence[str]) -> Result:
    return CliRunner().invoke(main, command)


def is_running(number: str) -> bool:
    """Whether a process is there, and no zombie, whose new parent has not waited for it."""
    path = Path(f"/proc/{number}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def give_again(fleet: FakeFleet, assignment: fleet_pb2.Assignment) -> None:
    """As the server does for a client that has an open assignment and checks in: with another token."""
    again = fleet_pb2.Assignment()
    again.CopyFrom(assignment)
    again.token = f"{len(fleet.requests['CheckIn'])} times {assignment.token}"
    fleet.plan(fleet_pb2.CheckInResponse(assignment=again))


def test_a_program_does_one_task(fleet: FakeFleet, model: model_pb2.ModelRef, base: Parameters) -> None:
    fleet.assign(model)
    fleet.assign(model)
    result = run(arguments(fleet, write_program(RETURN)))
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (0, "once: done"), result.output
    report = fleet.requests["Report"][0]
    assert (report.num_examples, dict(report.metrics)) == (2, {"loss": 0.5})
    assert Parameters.from_bytes(report.update) == base
    assert (len(fleet.requests["Report"]), len(fleet.work)) == (1, 1)  # no second task, also not with the report
    assert not report.HasField("check_in")
    assert list(Path("data").rglob("fedplat-task-*")) == []


def test_no_work_and_no_server(fleet: FakeFleet) -> None:
    trainer = write_program(RETURN)
    assert run([*arguments(fleet, trainer), "--wait", "0"]).exit_code == 3
    assert fleet.requests["CheckIn"][0].wait_s == 0.0
    fleet.failures["CheckIn"] = [UNAVAILABLE]
    assert run([*arguments(fleet, trainer), "--wait", "0"]).exit_code == 5
    fleet.failures["CheckIn"] = [UNAVAILABLE]
    fleet.plan(fleet_pb2.CheckInResponse(refusal=fleet_pb2.Refusal(retry=model_pb2.RetryWindow(min_s=900, max_s=900))))
    assert run([*arguments(fleet, trainer), "--wait", "60"]).exit_code == 3


@pytest.mark.slow
def test_a_failure_is_told(fleet: FakeFleet, model: model_pb2.ModelRef) -> None:
    fleet.assign(model)
    result = run(arguments(fleet, write_program("echo secret of a patient; exit 3")))
    assert result.exit_code == 4
    told = fleet.requests["Fail"][0]
    assert told.text == "ExternalTaskError: the program ended with status 3"  # and not its log, which is the owner's
    assert next(Path("data").rglob("failed.log")).read_text() == "secret of a patient\n"


@pytest.mark.slow
def test_an_evaluator_is_a_program_too(fleet: FakeFleet, model: model_pb2.ModelRef) -> None:
    fleet.assign(model, task=fleet_pb2.TASK_EVALUATE)
    program = write_program('echo \'{"num_examples": 2, "metrics": {"accuracy": 1}}\' > result.json')
    result = run([*arguments(fleet), "--evaluator", program])
    assert result.exit_code == 0, result.output
    assert dict(fleet.requests["Report"][0].metrics) == {"accuracy": 1.0}


@pytest.mark.slow
def test_never_two_at_a_time_and_a_stop_gives_the_task_back(fleet: FakeFleet, model: model_pb2.ModelRef) -> None:
    fleet.assign(model)
    program = write_program("touch ../ready; trap 'exit 1' TERM; while :; do sleep 0.01; done")
    command = [*arguments(fleet, program, "more=exec:/bin/true"), "--stop-grace", "0.1"]
    with open_log(Path("client.log")) as log:
        first = subprocess.Popen(
            [sys.executable, "-m", "fedplat_client", *command], stdout=log, stderr=log, env=os.environ
        )
    until(lambda: any(Path("data").rglob("ready")), "the program")
    second = run(command)
    assert second.exit_code == 6
    assert "is in use by another client" in second.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 8
    assert fleet.requests["Fail"][0].reason == model_pb2.REASON_CLIENT_STOPPED


@pytest.mark.slow
def test_a_client_that_was_killed_uses_what_its_program_has_done(
    fleet: FakeFleet, model: model_pb2.ModelRef, base: Parameters
) -> None:
    """It dies in the training, and then while it reports; its program does not run on, and not a third time."""
    first = fleet.assign(model)
    program = write_program(
        f"echo $$ >> {Path('runs').resolve()}; [ -e {Path('go').resolve()} ] || sleep 1000\n{RETURN}"
    )
    command = [sys.executable, "-m", "fedplat_client", *arguments(fleet, program)]

    def start() -> subprocess.Popen[bytes]:
        with open_log(Path("client.log")) as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)

    killed = start()
    until(Path("runs").exists, "the program")
    killed.kill()
    killed.wait()
    (number,) = Path("runs").read_text().split()
    assert is_running(number)
    Path("go").touch()
    fleet.failures["Report"] = [UNAVAILABLE] * 1000
    give_again(fleet, first)
    killed = start()
    fleet.wait_for("Report")
    assert not is_running(number)
    killed.kill()
    killed.wait()
    fleet.failures["Report"] = []
    give_again(fleet, first)
    assert start().wait(60) == 0
    assert len(Path("runs").read_text().split()) == 2
    assert Parameters.from_bytes(fleet.requests["Report"][-1].update) == base


def test_a_folder_for_someone_else_is_left_and_reported_later(
    fleet: FakeFleet, model: model_pb2.ModelRef, base: Parameters
) -> None:
    """The same assignment comes again; another one ends the wait for it."""
    first = fleet.assign(model)
    command = [*arguments(fleet, "digits=folder:"), "--detach", "--task-root", "shared"]
    assert run(command).exit_code == 7
    (folder,) = Path("shared").glob("fedplat-task-*")
    assert Parameters.open(folder / "model.safetensors") == base
    assert list(fleet.requests["CheckIn"][0].features) == []
    assert not fleet.requests["Fail"]
    give_again(fleet, first)
    assert run(command).exit_code == 7
    values = {name: np.ones_like(array) for name, array in base.items()}
    (folder / "update.safetensors").write_bytes(Parameters.from_arrays(values).to_bytes())
    (folder / "result.json").write_text('{"num_examples": 5}')
    give_again(fleet, first)
    assert run(command).exit_code == 0
    assert fleet.requests["Report"][0].num_examples == 5
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ("exec:true", "'exec:true' has no name; expected NAME=exec:true"),
        ("digits=exec:nothing-there", "the program 'nothing-there' is not found"),
        ("digits=folder:x", "folder: has no command"),
        ("digits=exec:true --trainer digits=exec:true", "a trainer 'digits' exists already"),
    ],
)
def test_a_wrong_trainer_is_refused(fleet: FakeFleet, trainer: str, message: str) -> None:
    result = run(arguments(fleet, *trainer.split(" --trainer ")))
    assert result.exit_code == 2
    assert message in result.stderr
