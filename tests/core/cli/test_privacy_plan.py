from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from opacus.accountants import RDPAccountant
from rich.console import Console

from fedplat.cli.app import app
from fedplat.cli.output import Output
from fedplat.job import find_mechanism, parse_job, planning
from fedplat.privacy import Charge, Mechanism
from fedplat.privacy.accounting import epsilon, epsilon_rdp
from support.cli.runner import CliRunner
from support.simulation.runs import DIGITS

JOB = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 40
[model]
initial = "fedplat.pytorch.models:digits_2nn"
[selection]
goal = 120
close = "deadline"
{selection}
[updates]
weighting = "uniform"
clip_norm = 0.5
[privacy]
delta = 1e-5
{privacy}
"""
POISSON = JOB.format(
    selection='sampling = { policy = "poisson", rate = 0.0355 }\nwait_for = 3000',
    privacy='participation = "poisson"\nnoise_multiplier = 1.2',
)
FIXED = JOB.format(selection="", privacy='participation = "fixed"\nepsilon = 8')
TREE = JOB.format(selection="min_separation = 20", privacy='participation = "min_separation"\nepsilon = 8')


EXAMPLES = JOB.format(selection="", privacy="").partition("[updates]")[0] + (
    '[config]\nepochs = 2\nbatch_size = 20\nlearning_rate = 0.1\ndp = "flat"\ndp_noise_multiplier = 1.1\n'
    "dp_max_grad_norm = 1.0\ndp_delta = 1e-5\n"
)


def test_a_job_with_example_level_privacy_has_a_plan_too() -> None:
    found = planned(EXAMPLES, "--examples", "200", "--examples", "2000", "--clients", "480")
    assert [(row["examples"], row["rounds"]) for row in found["rows"]] == [
        (count, rounds) for count in (200, 2000) for rounds in (4, 10, 20, 40)
    ]
    last = found["rows"][3]
    assert (last["probability"], last["steps"]) == (0.1, 20)
    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.1, 20 * 40)]
    assert last["epsilon"] == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=0.01)
    shown = run(EXAMPLES).stdout
    assert 'by [config] dp = "flat"; adjacency: one example more or less' in " ".join(shown.split())
    refused = run(EXAMPLES, "--noise", "2")
    assert (refused.exit_code, "expected a job with a table [privacy]" in refused.stderr) == (2, True)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text: str, *arguments: str) -> Result:
    Path("job.toml").write_text(text)
    result = CliRunner().invoke(app, ["privacy", "plan", "job.toml", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def planned(text: str, *arguments: str) -> dict[str, Any]:
    done = run(text, *arguments, "--json")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return json.loads(done.stdout)


def refused(text: str, *arguments: str) -> str:
    done = run(text, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    return done.stderr


@pytest.mark.slow
def test_a_plan_is_what_the_accountant_says() -> None:
    found = planned(POISSON, "--noise", "1.2", "--noise", "2.5")
    mechanism = find_mechanism(parse_job(POISSON))
    assert mechanism is not None
    assert (found["rounds"], found["max_rounds"], found["adjacency"]) == (40, 40, "one client more or less")
    assert found["num_clients"] == 3380  # goal / rate
    assert found["deviation"] == pytest.approx(1.2 / 120)
    for row in found["by_rounds"]:
        charges = [Charge(mechanism, row["rounds"])]
        assert row["epsilon"] == epsilon(charges, 1e-5)
        assert row["epsilon_rdp"] == epsilon_rdp(charges, 1e-5)
    assert [row["rounds"] for row in found["by_rounds"]] == [4, 10, 20, 40, 80, 160]
    own, louder = found["by_noise"]
    assert own["epsilon"] == found["budget"] == found["by_rounds"][3]["epsilon"]
    assert own["max_rounds"] == 40
    assert louder["max_rounds"] > 160
    for row in found["by_cohort"]:
        needed = Mechanism("poisson", row["noise_multiplier"], row["sampling_probability"])
        assert row["sampling_probability"] == pytest.approx(row["expected_reports"] / 3380)
        assert epsilon([Charge(needed, 40)], 1e-5) == pytest.approx(found["budget"], rel=2e-3)


@pytest.mark.slow
def test_calibrated_noise_is_enough_for_the_jobs_own_rounds() -> None:
    found = planned(POISSON.replace("noise_multiplier = 1.2", "epsilon = 2.0"))
    own = next(row for row in found["by_noise"] if row["noise_multiplier"] == found["noise_multiplier"])
    assert own["max_rounds"] == found["rounds"] == 40
    assert own["epsilon"] <= found["budget"] == 2.0


def test_a_plan_reports_its_progress() -> None:
    told: list[tuple[int, int]] = []
    found = planning.plan(parse_job(FIXED), 3383, (), lambda done, total: told.append((done, total)))
    total = len(found.by_rounds) + len(found.by_cohort) + len(found.by_noise)
    assert told == [(done, total) for done in range(total + 1)]


def test_progress_is_shown_on_a_terminal_and_nowhere_else() -> None:
    for as_json, is_terminal in ((False, True), (False, False), (True, True)):
        output = Output(as_json)
        shown = io.StringIO()
        output.messages = Console(file=shown, force_terminal=is_terminal, width=80)
        with output.steps("computing") as progress:
            progress(3, 7)
        assert ("computing" in shown.getvalue() and "3/7" in shown.getvalue()) == (is_terminal and not as_json)
        assert not shown.getvalue() or is_terminal


def test_a_plan_for_people() -> None:
    done = run(FIXED, "--clients", "3383")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "job            digits, of population demo (3,383 clients)"
    promise, adjacency = lines[1].split("; ")
    assert promise == "promise        epsilon 8.00 at delta 1e-05 after 40 rounds"
    assert adjacency == "adjacency: one client's reports replaced by zeros"
    assert lines[2] == "participation  a client may take part in every round; 120 expected reports"
    assert lines[3].startswith(
        "noise          multiplier 3.797 (calibrated for epsilon 8); 0.0316 clip norms in each entry of a"
    )
    assert lines[4] == "budget         enough for 40 rounds"
    assert "    40     8.00      8.60  this job" in lines
    assert [line for line in lines if line.endswith("this job")][1].split()[:5] == [
        "120",
        "1",
        "round",
        "3.797",
        "0.0316",
    ]


@pytest.mark.slow
def test_a_larger_population_takes_longer_turns() -> None:
    found = planned(TREE, "--clients", "6552")
    assert found["adjacency"] == "one client's reports replaced by zeros"
    assert found["mechanism"]["separation"] == 21
    by_cohort = {row["expected_reports"]: row for row in found["by_cohort"]}
    assert by_cohort[120]["separation"] == 42  # 156 are assigned in a round
    assert by_cohort[60]["separation"] == 84
    assert by_cohort[60]["noise_multiplier"] == by_cohort[120]["noise_multiplier"] < found["noise_multiplier"]
    assert "3,000 clients are too few: with selection.min_separation = 20" in run(TREE, "--clients", "3000").stderr
    assert (
        "17.8 of 500 clients are drawn per round"
        in run(POISSON, "--clients", "500", "--noise", "2", "--set", "rounds=1").stderr
    )


def test_a_budget_that_is_not_enough_is_said() -> None:
    done = run(FIXED, "--set", "privacy.noise_multiplier=3.0")
    assert "budget         enough for 24 rounds: the job pauses before the next" in done.stdout


@pytest.mark.slow
def test_the_simulator_adds_what_each_noise_does_to_the_model(here: Path) -> None:
    private = (
        DIGITS.replace("min_fraction = 0.5", 'min_fraction = 0.5\nclose = "deadline"').replace(
            "rounds = 4", "rounds = 2"
        )
        + '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
        + '[privacy]\nparticipation = "fixed"\ndelta = 1e-3\nnoise_multiplier = 0.5\n'
    )
    arguments = ("--simulate", "--noise", "0.5", "--noise", "500")
    found = planned(private, *arguments)
    assert found["num_clients"] == 20
    assert found["metric"] == "accuracy"
    assert [row["noise_multiplier"] for row in found["by_noise"]] == [0.5, 500]
    assert 0.0 < found["by_noise"][1]["value"] < 0.3
    done = run(private, *arguments[:3], "--plot", "plan.png")
    assert "simulation 2 of 2: noise multiplier 0.5" in done.stderr
    assert "2/2 rounds" in done.stderr
    own = next(line for line in done.stdout.splitlines() if line.strip().startswith("0.5 "))
    assert own.split()[-3:] == [f"{found['by_noise'][0]['value']:.4f}", "this", "job"]
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_said_in_a_line() -> None:
    plain = FIXED.partition("[privacy]")[0]
    assert refused(plain) == (
        "error: privacy: the job has no such table, so its clients have no guarantee; expected [privacy] with "
        "participation, delta and epsilon or noise_multiplier, or [config] dp for the privacy of single examples\n"
    )
    assert refused(FIXED, "--simulate").startswith("error: simulation: missing; --simulate requires a table")
    untrained = FIXED + "[simulation]\ntraining = false\n"
    assert "simulation.training = false: expected true with --simulate" in refused(untrained, "--simulate")
    assert "selection.goal = 120: expected at most the 5 clients" in refused(FIXED, "--clients", "5")
    assert "--noise 0: expected a number above 0" in refused(FIXED, "--noise", "0")
    assert "--plot a.svg: expected a name that ends in .png" in refused(FIXED, "--plot", "a.svg")
    assert "job.toml: privacy.delta = 2: expected a number < 1.0" in refused(FIXED, "--set", "privacy.delta=2")
    impossible = refused(FIXED, "--set", "privacy.delta=1e-9", "--set", "privacy.epsilon=1e-9")
    assert impossible.startswith("error: privacy: no noise multiplier up to 1e+06 keeps 40 releases within epsilon")
