"""Plugins of a server, as the command line shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, parsed
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State

JOB = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 3
model = { initial = "model.safetensors" }
selection = { goal = 8 }
"""


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(Parameters.from_arrays({"w": np.ones(2, np.float32)}).to_bytes())
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


PLUGINS = [
    admin_pb2.Plugin(kind="codecs", name="signs", digest="0123456789abcdef" * 4),
    admin_pb2.Plugin(kind="rules", name="lion", version="1.2", digest="fedcba9876543210" * 4),
]
"""Plugins of a server, whose code is not on this machine."""
SHOWN_PLUGINS = "codecs.signs (sha256 0123456789ab), rules.lion (1.2 sha256 fedcba987654)\n"


def test_plugins_of_a_server_and_of_a_job(run: Run, server: FakeServer, state: State):
    server.state.leader = {"plugins": PLUGINS}
    assert f"plugins      {SHOWN_PLUGINS}" in run("status").stdout
    assert parsed(run("status", "--json"))["plugins"][0]["digest"] == PLUGINS[0].digest
    job = state.add_job()
    job.plugins.extend(PLUGINS)
    job.job_file = JOB + '[aggregation]\nrule = "lion"\nbeta = 0.5\n[compression]\nuplink = { codec = "signs" }\n'
    shown = run("job", "show", job.job_id).stdout
    assert f"plugins     {SHOWN_PLUGINS}" in shown
    assert 'updates     compressed with {"codec":"signs"}\n' in shown


def test_a_job_that_names_plugins_of_the_server_only_is_submitted(run: Run, state: State, job_file: str):
    text = JOB + '[aggregation]\nrule = "lion"\nbeta = 0.5\n'
    Path(job_file).write_text(text)
    without = run("job", "submit", job_file)
    assert without.exit_code == 2
    assert "aggregation.rule = 'lion': expected one of fedavg" in without.stderr
    state.leader = {"plugins": PLUGINS}
    assert run("job", "submit", job_file).exit_code == 0
    (job,) = state.jobs.values()
    assert job.job_file == text
    Path(job_file).write_text(text.replace("lion", "lions"))
    other = run("job", "submit", job_file)
    assert other.exit_code == 2
    assert "did you mean lion?" in other.stderr
