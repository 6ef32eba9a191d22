"""Plugins in files of an operator and of clients' owners: real processes, from the command line to the model."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import plugins, processes
from support.jobs import write_job

pytestmark = pytest.mark.slow
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


def run(server: processes.Server, *arguments: str, status: int = 0) -> str:
    """What a command of the operator says."""
    command = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def show(server: processes.Server) -> admin_pb2.Job:
    with server.admin() as admin:
        return admin.show_job("own")


def num_waiting(server: processes.Server) -> int:
    with server.admin() as admin:
        return admin.status().num_waiting


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


def test_plugins_on_a_server_and_its_clients(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "own.toml").write_text(JOB)
    zeros = Parameters.from_arrays({"weight": np.zeros(5, np.float32)})
    (tmp_path / "zeros.safetensors").write_bytes(zeros.to_bytes())
    file = plugins.write_file(tmp_path)
    codec = plugins.options(file, "codecs.halves")
    with processes.server(tmp_path / "server", *plugins.options(file)) as server:
        plain = list(server.command)
        assert run(server, "status").count("sha256 ") == 3
        with processes.processes([client(tmp_path, server, "without", [])], tmp_path / "without.log"):
            run(server, "job", "submit", str(tmp_path / "own.toml"))
            with processes.processes([client(tmp_path, server, "first", codec)], tmp_path / "first.log"):
                processes.until(lambda: num_waiting(server) == 2, "two clients that wait")
                phase = show(server).current.phase
                assert phase == admin_pb2.ATTEMPT_PHASE_SELECTING, "one client has the codec, and two are needed"
        server.stop()

        server.command = [part for part in plain if part != "--plugin" and "own.py" not in part]
        server.start()
        missing = run(server, "job", "show", "own")
        assert "PAUSED (the server has no plugin codecs.halves (the job has sha256 " in missing
        assert "cannot resume: the server has no plugin" in run(server, "job", "resume", "own", status=1)
        assert "the server has no plugin" in server.log_text()
        server.stop()

        plugins.write_file(tmp_path, "# another version\n")
        server.command = plain
        server.start()
        before = show(server)
        assert "resume it now to continue with the other code" in before.reason
        run(server, "job", "resume", "own")
        assert {plugin.digest for plugin in show(server).plugins}.isdisjoint(plugin.digest for plugin in before.plugins)
        both = [client(tmp_path, server, name, codec) for name in ("second", "third")]
        with processes.processes(both, tmp_path / "clients.log"), server.admin() as admin:
            assert [event.to_state for event in admin.watch_job("own")][-1] == "COMPLETED"
        run(server, "model", "export", "own", "--output", str(tmp_path / "out.safetensors"))
        model = Parameters.open(tmp_path / "out.safetensors")
        np.testing.assert_allclose(model["weight"], expected(), rtol=1e-5)
        verify = [str(processes.BIN / "fedplat-server"), "verify", "--live", "--data-dir", str(tmp_path / "server")]
        subprocess.run(verify, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        ("codecs.halves=gone.py:Halves", "there is no file"),
        ("codecs.halves=own.py:Scaled2", "has no 'Scaled2'"),
        ("rules.scaled=own.py:Scaled", "the kind is 'rules'; expected one of codecs"),
        ("codecs.bf16=own.py:Halves", "bf16 is a built-in name"),
    ],
)
def test_a_wrong_plugin_of_a_client(tmp_path: Path, plugin: str, text: str) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    plugins.write_file(tmp_path)
    command = [str(processes.BIN / "fedplat-client"), "run", "--trainer", "trainer.py:add", "--plugin", plugin]
    common = ["--server", "127.0.0.1:1", "--population", "few", "--data-dir", str(tmp_path / "client")]
    done = subprocess.run([*command, *common], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --plugin ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr
