"""A procedure in the simulator has the bytes of one in a notebook, with any drop-outs; a lost site pauses the job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from fedplat.errors import JobFileError, NoProgressError
from fedplat.job import JobSpec, parse_job
from fedplat.procedures import Means, run
from fedplat.simulation import SimulationOptions, simulate
from fedplat.simulation.clients import FleetOptions
from fedplat.simulation.run_folder import RunFolderOptions

JOB = """
name = "means"
population = "hospitals"
trainer = "patients"
rounds = 1
[selection]
goal = 5
[procedure]
kind = "means"
columns = { age = { low = 0, high = 120, resolution = 1 }, crp = { low = 0, high = 500, resolution = 0.1 } }
"""


def make_frames(num_sites: int = 5) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return {
        f"site-{number}": {
            "age": rng.integers(0, 100, 30 + number),
            "crp": np.round(rng.gamma(1.0, 20.0, 30 + number), 1),
        }
        for number in range(num_sites)
    }


def read_job(**changes: object) -> JobSpec:
    return structs.replace(parse_job(JOB), **changes)


def test_the_result_has_the_bytes_of_run(tmp_path: Path) -> None:
    spec, frames = read_job(), make_frames()
    assert isinstance(spec.procedure, Means)
    expected = run(spec.procedure, frames)
    found = simulate(spec, tables=frames, run_folder=RunFolderOptions(tmp_path / "run"), progress=False)
    assert found.outcome == expected
    assert (tmp_path / "run/procedure.json").read_bytes() == expected.to_json()
    pooled = np.concatenate([frame["age"] for frame in frames.values()])
    assert found.outcome.result["columns"]["age"]["mean"] == pytest.approx(pooled.mean(), rel=1e-15)  # type: ignore


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sites_that_fail_and_vanish_change_no_bit(seed: int) -> None:
    spec, frames = read_job(retry=structs.replace(read_job().retry, pause_after=0)), make_frames()
    assert isinstance(spec.procedure, Means)
    fleet = FleetOptions(vanishes=0.2, away_s=30.0)
    found = simulate(spec, SimulationOptions(seed=seed, fleet=fleet), tables=frames, progress=False)
    assert found.outcome == run(spec.procedure, frames)


def test_a_site_with_a_wrong_table_pauses_the_job_and_nothing_is_released() -> None:
    frames = make_frames()
    frames["site-2"]["age"][4] = 150
    with pytest.raises(NoProgressError, match="'site-2': 1 of 32 rows have values of column 'age' outside") as raised:
        simulate(read_job(), tables=frames, progress=False)
    assert "PAUSED" in str(raised.value)
    assert "150" not in str(raised.value)


def test_what_only_a_procedure_needs() -> None:
    with pytest.raises(JobFileError, match="a procedure reads the table of each site; expected tables"):
        simulate(read_job(), progress=False)
    with pytest.raises(JobFileError, match="only a job with the table"):
        simulate("digits", tables=make_frames(), progress=False)
    with pytest.raises(JobFileError, match=r"selection\.goal = 5: expected at most the 4 clients"):
        simulate(read_job(), tables=make_frames(4), progress=False)


def test_a_file_names_the_function_that_returns_the_tables(tmp_path: Path) -> None:
    (tmp_path / "sites.py").write_text(
        "def load():\n    return {f's{k}': {'age': [k, 50], 'crp': [1, k]} for k in range(5)}\n"
    )
    (tmp_path / "job.toml").write_text(JOB + '[simulation]\ntables = "sites:load"\n')
    found = simulate(tmp_path / "job.toml", progress=False).outcome
    assert found is not None
    assert found.result["columns"]["age"]["mean"] == 26.0  # type: ignore[index]

    with pytest.raises(JobFileError, match=r"simulation\.training = false: how many steps"):
        simulate(read_job(), SimulationOptions(training=False), progress=False)
