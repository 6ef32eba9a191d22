"""`fedplat job check` and the server judge a job and its initial model alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.cli.app import app
from fedplat.cli.job_files import load
from fedplat.errors import JobFileError
from fedplat.model import Parameters
from fedplat.submission_checks import MAX_JOB_FILE_BYTES
from fedplat_server.coordination import job_checks
from fedplat_server.errors import RefusedError
from support.cli.runner import CliRunner
from support.jobs import job_file
from support.private_jobs import private

GOSSIP = '[mode]\nkind = "gossip"\n[updates]\nweighting = "uniform"\n'
GOOD = {"weight": np.zeros(3, np.float32)}


def job_of(folder: Path, text: str, model: dict[str, np.ndarray]) -> Path:
    """Write a job file, and the model that `job_file` names."""
    (folder / "unused.safetensors").write_bytes(Parameters.from_arrays(model).to_bytes())
    path = folder / "job.toml"
    path.write_text(text)
    return path


def judge(path: Path) -> int:
    """What the server does with both: it returns the size of the model."""
    spec = job_checks.parse_submitted(path.read_text(), MAX_JOB_FILE_BYTES)
    return job_checks.check_initial_model(path.with_name("unused.safetensors"), spec)


@pytest.mark.parametrize(
    ("text", "model", "mistake"),
    [
        (job_file(), {"n": np.ones(3, np.int64)}, "no floating-point tensor to train"),
        (job_file(), {"weight": np.zeros((0, 3), np.float32)}, "no floating-point tensor to train"),
        (job_file(more='[config]\nalgorithm = "mine.py:Mine"\n'), GOOD, "a job cannot name code of a client"),
        (job_file(goal=201, more=GOSSIP).replace("over_selection = 1.0\n", ""), GOOD, "at most 200 silos"),
        (job_file() + "#" * MAX_JOB_FILE_BYTES, GOOD, f"more than {MAX_JOB_FILE_BYTES} bytes"),
    ],
    ids=["integers", "empty", "algorithm", "silos", "large"],
)
def test_both_refuse_a_job(tmp_path: Path, text: str, model: dict[str, np.ndarray], mistake: str) -> None:
    path = job_of(tmp_path, text, model)
    with pytest.raises(JobFileError, match=mistake):
        load(path)
    with pytest.raises(RefusedError, match=mistake):
        judge(path)


def test_both_accept_a_job(tmp_path: Path) -> None:
    path = job_of(tmp_path, job_file(), GOOD)
    assert load(path).text == path.read_text()
    assert judge(path) > 0


def test_a_budget_without_a_release_is_found_without_a_server(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    text = private("epsilon = 0.001\nnoise_multiplier = 0.5")
    result = CliRunner().invoke(app, ["job", "check", str(job_of(tmp_path, text, GOOD))])
    assert result.exit_code != 0
    assert "not even one release" in result.output
