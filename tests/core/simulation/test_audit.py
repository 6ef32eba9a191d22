from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedplat.cli.app import app
from fedplat.errors import JobFileError
from fedplat.job import calibrate
from fedplat.model import Parameters
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.privacy_audit import Audit, add_canaries, choose_canaries, run_audit
from fedplat.simulation.run import Simulation
from fedplat.simulation.scenario import file as files
from fedplat.simulation.setup import RunSetup
from support.cli.runner import CliRunner
from support.simulation.runs import DIGITS

NUM_CLIENTS = 200
JOB = """
name = "audited"
population = "demo"
trainer = "none"
rounds = {rounds}
[model]
initial = "nothing.safetensors"
[selection]
goal = 100
over_selection = 1.0
close = "deadline"
{selection}
[updates]
weighting = "{weighting}"
max_examples = 50.0
{clip}
[privacy]
delta = 1e-6
participation = "{participation}"
{privacy}
[simulation]
seed = {seed}
"""
SELECTIONS = {
    "poisson": 'sampling = { policy = "poisson", rate = 0.5 }\nwait_for = 200',
    "fixed": "wait_for = 200",
    "min_separation": "wait_for = 100\nmin_separation = 1",
}


class Idle:
    """Clients who have nothing to say about a model of 3,000 entries and a counter."""

    num_clients = NUM_CLIENTS

    def __init__(self) -> None:
        self.initial = Parameters.from_arrays({"weight": np.zeros(3000, np.float32), "steps": np.zeros(1, np.int64)})
        self.dropped = 0

    def num_examples(self, client: int) -> int:
        return 10

    def publish(self, version: int, model: Parameters) -> None: ...

    def retire(self, version: int) -> None: ...

    def begin(self, tasks: Sequence[ClientTask]) -> None: ...

    def result(self, task: ClientTask) -> LocalUpdate:
        return LocalUpdate(Parameters.zeros(self.initial.schema), 10.0)

    def drop(self, task: ClientTask) -> None:
        self.dropped += 1

    def client_states(self) -> Mapping[int, Mapping[str, Parameters]]:
        return {}

    def set_client_states(self, client_states: Mapping[int, Mapping[str, Parameters]]) -> None: ...

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


def job(
    participation: str, privacy: str, *, rounds: int = 6, seed: int = 0, clip: str = "", weighting: str = "uniform"
) -> str:
    return JOB.format(
        rounds=rounds,
        selection=SELECTIONS[participation],
        participation=participation,
        privacy=privacy,
        seed=seed,
        clip=clip or "clip_norm = 0.5",
        weighting=weighting,
    )


def run(text: str, num_canaries: int = NUM_CLIENTS) -> Audit:
    file = files.parse(text, Path())
    engine = Idle()
    seed = file.simulation.seed
    fleet = build_fleet(FleetOptions(num_clients=NUM_CLIENTS), seed)
    simulation = Simulation(spec=calibrate(file.job), fleet=fleet, engine=engine, initial=engine.initial, seed=seed)
    return run_audit(file, RunSetup(simulation, None, "loop", 1), num_canaries=num_canaries)


@pytest.mark.slow
@pytest.mark.parametrize("participation", ["poisson", "fixed", "min_separation"])
def test_with_hardly_any_noise_the_canaries_are_found(participation: str) -> None:
    found = run(job(participation, "noise_multiplier = 0.02"))
    assert found.holds
    assert found.bound.epsilon > 2.0
    assert found.bound.best.canaries == found.num_clients == NUM_CLIENTS
    assert found.merged == pytest.approx(3.0, abs=0.4)
    # The same run of a job that claims what it does not keep.
    lied = dataclasses.replace(found, claimed=run(job(participation, "epsilon = 1.0")).claimed)
    assert not lied.holds


@pytest.mark.slow
@pytest.mark.parametrize("participation", ["poisson", "fixed", "min_separation"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_the_noise_that_is_claimed_nothing_contradicts(participation: str, seed: int) -> None:
    found = run(job(participation, "epsilon = 1.0", seed=seed))
    assert 0.99 < found.claimed.epsilon <= 1.0
    assert found.holds
    assert found.claimed.releases == 6


def test_weights_and_adaptive_clipping_do_not_hide_the_canaries() -> None:
    weighted = run(job("fixed", "noise_multiplier = 0.02", weighting="examples"))
    assert weighted.bound.epsilon > 2.0
    adaptive = run(job("fixed", "noise_multiplier = 0.02", clip="adaptive_clip = { initial_norm = 0.3 }"))
    assert adaptive.bound.epsilon > 2.0


def test_the_other_clients_train_as_ever() -> None:
    engine = Idle()
    spec = files.parse(job("fixed", "noise_multiplier = 1.0"), Path()).job
    canaries, included = add_canaries(spec, engine, 50, seed=3)
    assert len(included) == 50
    assert choose_canaries(NUM_CLIENTS, 50, 3) == included != choose_canaries(NUM_CLIENTS, 50, 4)
    canaries.publish(0, engine.initial)
    other = next(client for client in range(NUM_CLIENTS) if client not in included)
    tasks = [ClientTask(client, 0, 0) for client in (other, *included)]
    canaries.begin(tasks)
    assert canaries.result(tasks[0]).num_examples == 10.0
    for task in tasks[1:]:
        trained = canaries.result(task)
        assert np.linalg.norm(trained.update.to_vector()) == pytest.approx(0.5 * included[task.client], rel=1e-5)
        assert trained.num_examples == 1.0
        assert trained.update["steps"] == 0
    for task in tasks:
        canaries.drop(task)
    assert engine.dropped == 1


def test_what_cannot_be_audited_is_said() -> None:
    spec = files.parse(job("fixed", "noise_multiplier = 1.0"), Path()).job
    for count in (19, 201):
        with pytest.raises(JobFileError, match=f"{count} canaries of 200 clients: expected from 20 to 200"):
            add_canaries(spec, Idle(), count, 0)
    with pytest.raises(JobFileError, match="there is no promise to check"):
        add_canaries(
            files.parse(job("fixed", "noise_multiplier = 1.0").partition("[privacy]")[0], Path()).job, Idle(), 0, 0
        )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        DIGITS.replace("min_fraction = 0.5", 'min_fraction = 0.5\nclose = "deadline"').replace(
            "rounds = 4", "rounds = 2"
        )
        + '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
        + '[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = 0.01\n'
    )
    Path("job.toml").write_text(
        text.replace("goal = 3", "goal = 20").replace("over_selection = 1.5", "over_selection = 1")
    )
    arguments = ["privacy", "audit", "job.toml", "--canaries", "20"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert lines["canaries"].strip().startswith("20 of 20 clients; ")
    assert lines["verdict"].strip().startswith("consistent with the claim")
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["holds"] is True
    assert found["claimed"]["releases"] == 2
    assert f"epsilon {found['bound']['epsilon']:.4g} with 0.95 confidence" in lines["lower bound"]
    wrong = CliRunner().invoke(app, ["privacy", "audit", "job.toml", "--confidence", "1"])
    assert wrong.exit_code == 2
    assert wrong.stderr == "error: --confidence 1: expected from 0.5 to below 1\n"
