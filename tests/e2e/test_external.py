"""Jobs whose clients are calls of `fedplat-client once`, as cron makes them, end with the model that NumPy computes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import deployment, process_logs, processes, slurm
from support.jobs import write_job
from support.processes import until

pytestmark = pytest.mark.slow
SOURCE = processes.ROOT / "examples" / "external" / "linear.cpp"
EPOCHS, RATE, ROUNDS = 5, 0.05, 3
MAX_CALLS = 60
LEFT, NO_WORK = 7, 3


def compute(data: np.ndarray) -> np.ndarray:
    """Weight and bias after all rounds of one client."""
    inputs, target = data[:, :-1], data[:, -1]
    weight, bias = np.zeros(3, np.float32), np.float32(0)
    for _ in range(ROUNDS):
        exact, offset = weight.astype(float), float(bias)
        for _ in range(EPOCHS):
            error = inputs @ exact + offset - target
            exact = exact - RATE * 2 * inputs.T @ error / len(target)
            offset -= RATE * 2 * float(np.mean(error))
        weight, bias = exact.astype(np.float32), np.float32(offset)
    return np.append(weight, bias)


@pytest.mark.parametrize("kind", ["exec", "slurm"])
def test_a_cron_loop_trains_with_a_program_in_cpp(
    server: processes.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: apt-get install --no-install-recommends g++")
    program = tmp_path / "linear"
    subprocess.run([compiler, "-O2", "-std=c++17", "-o", str(program), str(SOURCE)], check=True)
    data = np.random.default_rng(0).normal(size=(50, 4))
    np.savetxt(tmp_path / "data.csv", data, delimiter=",", fmt="%.17g")
    trainer = f"linear={kind}:{program} {tmp_path / 'data.csv'}"
    (tmp_path / "ticket").write_text(server.ticket(f"external-{kind}"))
    command = [str(processes.BIN / "fedplat-client"), "once", "--ticket-file", str(tmp_path / "ticket")]
    command += ["--data-dir", str(tmp_path / "data"), "--trainer", trainer, "--detach"]
    keys = {"epochs": EPOCHS, "learning_rate": RATE}
    text = write_job(f"external-{kind}", population=f"external-{kind}", trainer="linear", rounds=ROUNDS, config=keys)
    model = Parameters.from_arrays({"weight": np.zeros(3, "f4"), "bias": np.array(0, "f4")})
    with server.admin() as admin, contextlib.ExitStack() as stack:
        if kind == "slurm":
            place = tmp_path / "slurm"
            place.mkdir()
            monkeypatch.setenv("SLURM_CONF", str(stack.enter_context(slurm.cluster(place))))
        job = deployment.submit(admin, text, model)
        statuses: list[int] = []
        while statuses.count(0) < ROUNDS and len(statuses) < MAX_CALLS:
            with process_logs.open_log(tmp_path / "client.log") as log:
                statuses.append(subprocess.run(command, stdout=log, stderr=log).returncode)
        assert {*statuses} <= {0, NO_WORK, LEFT}
        assert (LEFT in statuses) == (kind == "slurm")
        until(lambda: admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED, "the job")
        trained = deployment.exported(admin, job, tmp_path)
    np.testing.assert_allclose(np.append(trained["weight"], trained["bias"]), compute(data), rtol=1e-5)
