"""The command `fedplat-client`."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedplat_client
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import client
from fedplat_client._state.model_cache import ModelCache
from fedplat_client.commands import _find_rest, main  # pyright: ignore[reportPrivateUsage]
from fedplat_client.log import FieldFormatter, JsonFormatter, LogHandler
from support.fake_fleet import FakeFleet

TRAINERS = """
from fedplat_client import EvaluateResult, TrainResult

def digits(task):
    task.progress(1.0)
    return TrainResult(parameters=task.parameters, num_examples=2)

def wait(task):
    task.control.signal.wait(60)
    task.progress(1.0)

class Both:
    def __call__(self, task):
        return digits(task)
    def evaluate(self, task):
        return EvaluateResult(num_examples=3, metrics={"accuracy": 1.0})

both = Both()
number = 5
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of trainers in the current directory, under a name that no other test imported."""
    name = f"trainers_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(TRAINERS)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def arguments(fleet: FakeFleet, *more: str) -> list[str]:
    Path("ticket").write_text(fleet.ticket.to_text())
    return ["run", "--ticket-file", "ticket", "--data-dir", "data", *more]


def test_a_ticket_that_is_an_argument_is_warned_of(
    fleet: FakeFleet, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users of a host see the arguments of its processes; a file or the environment are silent."""
    text = fleet.ticket.to_text()
    more = ["--data-dir", "data", "--trainer", f"{module}:missing"]
    for given, warnings in ((["--ticket", text], 1), (arguments(fleet)[1:3], 0), ([], 0)):
        monkeypatch.setenv("FEDPLAT_TICKET", "" if given else text)
        result = CliRunner().invoke(main, ["run", *given, *more])
        assert result.exit_code == 2
        assert result.stderr.count("--ticket shows the ticket to all users of this host") == warnings
        assert text not in result.output


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert fedplat_client.__version__ in result.output


def test_it_works_for_a_server(fleet: FakeFleet, model: model_pb2.ModelRef, module: str) -> None:
    fleet.assign(model)
    fleet.assign(model, trainer="both")
    fleet.assign(model, trainer="scores", task=fleet_pb2.TASK_EVALUATE)
    more = ["--trainer", f"{module}:digits", "--trainer", f"both={module}:both", "--evaluator", f"scores={module}:both"]
    labels = ["--label", "region=eu", "--label", "note=a=b"]
    result = CliRunner().invoke(main, arguments(fleet, *more, *labels, "--max-tasks", "3"))
    assert result.exit_code == 0, result.output
    assert fleet.calls.count("Report") == 3
    check_in = fleet.requests["CheckIn"][0]
    assert (check_in.trainers, check_in.evaluators) == (["both", "digits"], ["scores"])
    assert dict(check_in.labels) == {"region": "eu", "note": "a=b"}


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("5000", 5000), ("500MB", 500_000_000), ("1.5GiB", 3 * 2**29), ("2g", 2 * 10**9), (None, 2 * 2**30)],
)
def test_the_cache_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet, module: str, size: str | None, num_bytes: int
) -> None:
    given: list[int] = []

    def make(folder: Path, limit_bytes: int) -> ModelCache:
        given.append(limit_bytes)
        return ModelCache(folder, limit_bytes)

    monkeypatch.setattr(client, "ModelCache", make)
    if size is not None:
        monkeypatch.setenv("FEDPLAT_CACHE_LIMIT", size)
    result = CliRunner().invoke(main, arguments(fleet, "--trainer", f"{module}:digits", "--max-tasks", "0"))
    assert (result.exit_code, given) == (0, [num_bytes]), result.output


def test_a_size_that_is_none_is_refused(fleet: FakeFleet, module: str) -> None:
    result = CliRunner().invoke(main, arguments(fleet, "--trainer", f"{module}:digits", "--cache-limit", "much"))
    assert result.exit_code == 2
    assert "'much' is not a size; expected a number of bytes, such as 500MB or 2GiB" in result.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "give at least one --trainer or --evaluator"),
        (("--trainer", "nonsense"), "--trainer 'nonsense': 'nonsense' cannot be read; expected module:name"),
        (("--trainer", "no_such_module:f"), "there is no module 'no_such_module' in"),
        (("--trainer", "broken:f"), "No module named 'nothing_of_that_name'"),
        (("--trainer", "{module}:missing"), "has no 'missing'"),
        (("--trainer", "{module}:number"), "'number' is a int; expected a function"),
        (("--trainer", "{module}:digits", "--label", "eu"), "--label 'eu' cannot be read; expected KEY=VALUE"),
        (("--trainer", "{module}:digits", "--trainer", "digits={module}:wait"), "a trainer 'digits' exists already"),
    ],
)
def test_a_wrong_argument_gives_one_clear_line(
    fleet: FakeFleet, module: str, more: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(main, arguments(fleet, *(part.format(module=module) for part in more)))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert isinstance(result.exception, SystemExit)
    assert fleet.calls == []


def test_an_error_of_the_client_gives_one_clear_line(fleet: FakeFleet, module: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / fleet.address.replace(":", "%3A")).write_text("a file, not a folder")
    result = CliRunner().invoke(main, arguments(fleet, "--trainer", f"{module}:digits"))
    assert result.exit_code == 1
    assert "cannot be used" in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_a_server_says_cannot_write_to_the_terminal() -> None:
    record = logging.makeLogRecord(
        {"levelname": "INFO", "msg": "refused: \x1b]0;owned\x07\r\nall is well \u202e", "job": "a\x1b[2Jb"}
    )
    try:
        raise ValueError("\x1b[31mred\nnext")
    except ValueError:
        record.exc_info = sys.exc_info()
    written = FieldFormatter("%(levelname)s %(message)s").format(record)
    assert [char for char in written if not char.isprintable() and char != "\n"] == []
    assert written.startswith(r"INFO refused: \x1b]0;owned\x07\r\nall is well \u202e job=a\x1b[2Jb")
    assert r"ValueError: \x1b[31mred" in written
    long = FieldFormatter("%(message)s").format(logging.makeLogRecord({"msg": "x" * 1_000_000}))
    assert len(long) < 5000
    assert long.endswith("more characters)")


def test_lines_of_json_have_the_fields_of_text() -> None:
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "refused: \x1b]0;\r\n", "job": "a\x1b", "name": "n"})
    try:
        raise ValueError("\x1b[31mred\nnext" + "x" * 1_000_000)
    except ValueError:
        record.exc_info = sys.exc_info()
    text = JsonFormatter().format(record)
    written = json.loads(text)
    assert (text.isprintable(), len(text) < 10_000) == (True, True)
    assert (written["event"], written["level"], written["job"]) == ("refused: \x1b]0;\r\n", "info", "a\x1b")
    assert written["exception"].startswith("Traceback")


def test_what_a_command_says_is_in_its_log_of_json(
    fleet: FakeFleet, module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = arguments(fleet, "--trainer", f"{module}:digits", "--json-log", "--max-tasks", "0")
    with caplog.at_level("INFO"):
        assert CliRunner().invoke(main, words).output == ""
    assert caplog.messages[-1] == "stopped"
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / fleet.address.replace(":", "%3A")).write_text("a file, not a folder")
    failed = CliRunner().invoke(main, words)
    assert (failed.exit_code, failed.output, caplog.records[-1].levelname) == (1, "", "ERROR")
    assert "cannot be used" in caplog.messages[-1]


def test_a_trainer_that_closes_the_log_ends_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    handler = LogHandler()
    sys.stderr.close()
    handler.handle(logging.makeLogRecord({"msg": "The task started."}))


def test_what_keeps_a_stopped_client_is_named() -> None:
    end, before = threading.Event(), threading.enumerate()
    thread = threading.Thread(target=end.wait, name="writer of checkpoints")
    thread.start()
    try:
        assert "writer of checkpoints" in _find_rest(before)
    finally:
        end.set()
        thread.join()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly(
    fleet: FakeFleet, model: model_pb2.ModelRef, module: str, number: signal.Signals
) -> None:
    fleet.assign(model, trainer="wait")
    command = [sys.executable, "-m", "fedplat_client", *arguments(fleet, "--trainer", f"{module}:wait")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ, text=True) as process:
        fleet.wait_for("Heartbeat")
        process.send_signal(number)
        _, output = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.endswith("stopped\n")
    assert "Traceback" not in output
    assert "The task started: training with wait in round 1 of the job digits. job=job-1 round=1" in output
    assert f"The client is connected to {fleet.address} as client-1 of the population demo, offers wait and" in output
    assert [fail.reason for fail in fleet.requests["Fail"]] == [model_pb2.REASON_CLIENT_STOPPED]


def test_ctrl_c_while_a_trainer_is_imported_ends_the_command(fleet: FakeFleet) -> None:
    """The import of PyTorch alone takes seconds."""
    Path("slow.py").write_text("raise KeyboardInterrupt")
    result = CliRunner().invoke(main, arguments(fleet, "--trainer", "slow:train"))
    assert (result.exit_code, result.output) == (130, "interrupted\n")


TORCH = """
from torch import nn, ones
from torch.utils.data import TensorDataset
from fedplat.parallel import Parallel
from fedplat_client.trainers.torch import TorchTrainer

own = TorchTrainer(model=lambda: nn.Linear(2, 2), data=TensorDataset(ones(4, 2), ones(4)), parallel=Parallel(shard=4))

def function(task): ...
"""


@pytest.mark.parametrize(
    ("trainer", "given", "message"),
    [
        ("own", None, "= 4 ranks; there are 1. Start one process for each rank, such as: torchrun --standalone"),
        ("own", "shard=2,tensor=2", "1 data × 2 shard × 2 tensor × 1 pipeline = 4 ranks; there are 1"),
        ("own", "shard", "--parallel 'shard': expected NAME=VALUE, each name once, such as shard=2,tensor=2; or use"),
        ("own", "shards=2", "unknown field `shards`; the names are data, shard, tensor, pipeline"),
        ("own", "pipeline=2,schedule=fast", "Invalid enum value 'fast'"),
        (
            "function",
            "data",
            "--parallel is for trainers that are a TorchTrainer; --trainer 'TORCH:function' is a func",
        ),
    ],
)
def test_a_wrong_layout_gives_one_clear_line(
    fleet: FakeFleet, module: str, trainer: str, given: str | None, message: str
) -> None:
    Path(f"{module}.py").write_text(TORCH)
    more = [] if given is None else ["--parallel", given]
    result = CliRunner().invoke(main, arguments(fleet, "--trainer", f"{module}:{trainer}", *more))
    assert result.exit_code == 2
    assert message.replace("TORCH", module) in result.output
    assert result.output.count("\n") == 1


def test_the_layout_of_the_command_line_replaces_that_of_the_trainer(fleet: FakeFleet, module: str) -> None:
    Path(f"{module}.py").write_text(TORCH)
    given = ("--trainer", f"{module}:own", "--parallel", "none", "--max-tasks", "0")
    result = CliRunner().invoke(main, arguments(fleet, *given))
    assert (result.exit_code, result.output) == (0, "stopped\n")
