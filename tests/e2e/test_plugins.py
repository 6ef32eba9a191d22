"""Plugins in files of an operator and of clients' owners: real processes, from the command line to the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import commands as client_command
from fedplat_server.cli import commands
from support import deployment, plugins, processes
from support.deployment import run_fedplat
from support.jobs import write_job

ROUNDS = 3
TRAINER = """
import numpy as np
from fedplat_client import TrainResult

def add(task):
    task.parameters["weight"] += np.float32(0.1)
    return TrainResult(parameters=task.parameters, num_examples=3)
"""
JOB = write_job(
    "own",
    population="few",
    trainer="add",
    rounds=ROUNDS,
    model={"initial": "zeros.safetensors"},
    selection={"goal": 2, "min_fraction": 1.0, "wait_for": 2, "sampling": {"policy": "labelled"}},
    aggregation={"rule": "scaled", "factor": 3.0},
    compression={"uplink": {"codec": "halves"}},
    retry={"base_s": 0.1},
)


def show(server: processes.Server) -> admin_pb2.Job:
    with server.admin() as admin:
        return admin.show_job("own")


def num_waiting(server: processes.Server) -> int:
    with server.admin() as admin:
        return deployment.num_waiting(admin, "few")


def client(tmp_path: Path, server: processes.Server, name: str, options: Sequence[str]) -> list[str]:
    ticket = tmp_path / f"{name}.ticket"
    ticket.write_text(server.ticket("few"))
    command = [str(processes.BIN / "fedplat-client"), "run", "--ticket-file", str(ticket), *options]
    return [*command, "--trainer", f"add={tmp_path}/trainer.py:add", "--data-dir", str(tmp_path / name)]


def expected() -> float:
    weight = last = 0.0
    for _ in range(ROUNDS):
        last += 3.0 * float(np.float16(0.1))
        weight += last
    return weight


@pytest.mark.slow
def test_plugins_on_a_server_and_its_clients(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "own.toml").write_text(JOB)
    zeros = Parameters.from_arrays({"weight": np.zeros(5, np.float32)})
    (tmp_path / "zeros.safetensors").write_bytes(zeros.to_bytes())
    file = plugins.write_file(tmp_path)
    codec = plugins.options(file, "codecs.halves")
    with processes.server(tmp_path / "server", *plugins.options(file)) as server:
        plain = list(server.command)
        assert run_fedplat(server, "status").count("sha256 ") == 3
        with processes.processes([client(tmp_path, server, "without", [])], tmp_path / "without.log"):
            run_fedplat(server, "job", "submit", str(tmp_path / "own.toml"))
            with processes.processes([client(tmp_path, server, "first", codec)], tmp_path / "first.log"):
                processes.until(lambda: num_waiting(server) == 2, "two clients that wait")
                phase = show(server).current.phase
                assert phase == admin_pb2.ATTEMPT_PHASE_SELECTING, "one client has the codec, and two are needed"
        server.stop()

        server.command = [part for part in plain if part != "--plugin" and "own.py" not in part]
        server.start()
        missing = run_fedplat(server, "job", "show", "own")
        assert "PAUSED (the server has no plugin codecs.halves (the job has sha256 " in missing
        assert "cannot resume: the server has no plugin" in run_fedplat(server, "job", "resume", "own", status=1)
        assert "the server has no plugin" in server.log_text()
        server.stop()

        plugins.write_file(tmp_path, "# another version\n")
        server.command = plain
        server.start()
        before = show(server)
        assert "resume it now to continue with the other code" in before.reason
        run_fedplat(server, "job", "resume", "own")
        assert {plugin.digest for plugin in show(server).plugins}.isdisjoint(plugin.digest for plugin in before.plugins)
        both = [client(tmp_path, server, name, codec) for name in ("second", "third")]
        with processes.processes(both, tmp_path / "clients.log"), server.admin() as admin:
            assert [event.to_state for event in admin.watch_job("own")][-1] == "COMPLETED"
        run_fedplat(server, "model", "export", "own", "--to", str(tmp_path / "out.safetensors"))
        model = Parameters.open(tmp_path / "out.safetensors")
        np.testing.assert_allclose(model["weight"], expected(), rtol=1e-5)
        deployment.run(commands.app, "verify", "--live", "--data-dir", str(tmp_path / "server"))


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        ("codecs.halves=gone.py:Halves", "there is no file"),
        ("codecs.halves=own.py:Scaled2", "has no 'Scaled2'"),
        ("rules.scaled=own.py:Scaled", "the kind is 'rules'; expected one of codecs"),
        ("codecs.bf16=own.py:Halves", "bf16 is a built-in name"),
    ],
)
def test_a_wrong_plugin_of_a_client(
    tmp_path: Path, plugin: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    plugins.write_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["fedplat-client", "run", "--trainer", "trainer.py:add", "--plugin", plugin]
    common = ["--server", "127.0.0.1:1", "--population", "few", "--data-dir", str(tmp_path / "client")]
    monkeypatch.setattr(sys, "argv", [*command, *common])
    with pytest.raises(SystemExit) as caught:
        client_command.main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("Error: --plugin ")
    assert error.count("\n") == 1
    assert text in error
