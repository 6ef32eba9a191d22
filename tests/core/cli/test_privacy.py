"""`fedplat privacy show` and `fedplat privacy budget`."""

from __future__ import annotations

import math

import pytest

from fedplat.privacy import Mechanism, options
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run, parsed
from support.cli.fake_state import S, State

MECHANISM = Mechanism("poisson", 1.2, 0.04)


def job(**more: object) -> admin_pb2.JobPrivacy:
    made = admin_pb2.JobPrivacy(
        job_id="j-1",
        name="digits",
        population="phones",
        status=S.JOB_STATUS_PAUSED,
        is_private=True,
        participation=options.describe_participation(MECHANISM),
        adjacency=options.adjacency(MECHANISM),
        sampling=options.describe_sampling(MECHANISM),
        delta=1e-6,
        epsilon=2.0,
        noise_multiplier=1.2,
        model_noise_multiplier=1.2,
        clip_norm=0.5,
        released=admin_pb2.PrivacyCost(releases=1, epsilon=0.41237, epsilon_rdp=0.5),
        planned=admin_pb2.PrivacyCost(releases=20, epsilon=1.98765, epsilon_rdp=2.25),
        not_covered=["this", "that"],
    )
    made.MergeFrom(admin_pb2.JobPrivacy(**more))  # type: ignore[arg-type]
    return made


def population(**more: float) -> admin_pb2.PopulationPrivacy:
    cost = admin_pb2.PrivacyCost(releases=20, epsilon=1.9, epsilon_rdp=2.0)
    return admin_pb2.PopulationPrivacy(population="phones", num_private=1, num_others=2, committed=cost, **more)


def test_the_noise_of_clients_as_people_read_it(run: Run, state: State):
    """There is no PLD of it, and a release need not be a version."""
    state.privacy = admin_pb2.ShowPrivacyResponse(jobs=[job(trust="none")], populations=[population()])
    shown = run("privacy", "show", "digits").stdout
    assert "released           epsilon 0.4124 by RDP, 1 release\n" in shown
    assert "noise              each client adds its part; each attempt with unmasked sums is a release" in shown


def test_a_job_as_people_read_it(run: Run, state: State):
    state.privacy = admin_pb2.ShowPrivacyResponse(jobs=[job()], populations=[population(epsilon=3.0, delta=1e-6)])
    result = run("privacy", "show", "digits")
    assert result.exit_code == 0
    assert result.stdout == (
        "job                j-1 (digits), PAUSED\n"
        "released           epsilon 0.4124 by PLD (0.5 by RDP), 1 release\n"
        "planned            epsilon 1.988 by PLD (2.25 by RDP), 20 releases\n"
        "delta              1e-06\n"
        "adjacency          add-or-remove: one client more or less\n"
        "participation      poisson: each client takes part in each round with probability 0.04, by a secret trial "
        "of its own\n"
        "noise multiplier   1.2\n"
        "clip norm          0.5\n"
        "budget of the job  epsilon 2\n"
        "population         population phones has the budget epsilon 3 at delta 1e-06, of which 1.9 is released or "
        "planned: 1 private job, 2 without noise, which no budget covers\n"
        "not covered        this; that\n"
        "more               docs/privacy.md\n"
    )


def test_metrics_and_adaptive_clips_are_told(run: Run, state: State):
    found = job(model_noise_multiplier=1.5, adaptive_clip=True)
    found.ClearField("epsilon")
    state.privacy = admin_pb2.ShowPrivacyResponse(jobs=[found], populations=[population()])
    lines = dict(line.split("  ", 1) for line in run("privacy", "show", "digits").stdout.splitlines())
    assert lines["noise multiplier"].strip() == "1.2 per round (1.5 for the model, the rest for metrics)"
    assert lines["clip norm"].strip() == "0.5 at first, then adaptive"
    assert lines["budget of the job"].strip() == "none except its rounds"
    assert lines["population"].strip().startswith("population phones has no budget: 1 private job,")


def test_a_job_that_is_not_private_is_one_line(run: Run, state: State):
    plain = admin_pb2.JobPrivacy(job_id="j-1", name="digits", population="phones")
    state.privacy = admin_pb2.ShowPrivacyResponse(jobs=[plain])
    result = run("privacy", "show", "digits")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "job j-1 (digits) is not private: its job file has no [privacy]\n"


def test_all_jobs_and_budgets(run: Run, state: State):
    endless = admin_pb2.PrivacyCost(releases=3, epsilon=math.inf, epsilon_rdp=math.inf)
    state.privacy = admin_pb2.ShowPrivacyResponse(
        jobs=[job(), job(job_id="j-2", released=endless)], populations=[population(epsilon=3.0, delta=1e-6)]
    )
    header, first, second, budget = run("privacy", "show", "-o", "wide").stdout.splitlines()
    assert header.split() == ["JOB", "NAME", "POPULATION", "STATUS", "RELEASES", "EPSILON", "(RDP)", "PLANNED", "DELTA"]
    assert first.split() == ["j-1", "digits", "phones", "PAUSED", "1", "of", "20", "0.4124", "0.5", "1.988", "1e-06"]
    assert second.split()[4:9] == ["3", "of", "20", "infinite", "infinite"]
    assert budget.startswith("population phones has the budget")
    state.privacy = admin_pb2.ShowPrivacyResponse()
    assert run("privacy", "show").stderr == "there are no private jobs\n"


def test_json(run: Run, state: State):
    endless = admin_pb2.PrivacyCost(releases=3, epsilon=math.inf, epsilon_rdp=math.inf)
    state.privacy = admin_pb2.ShowPrivacyResponse(jobs=[job(released=endless)], populations=[population()])
    record = parsed(run("privacy", "show", "--json"))
    assert record["jobs"][0]["released"] == {"releases": 3, "epsilon": None, "epsilon_rdp": None}
    assert record["jobs"][0]["adjacency"] == "add-or-remove"
    assert record["populations"][0]["epsilon"] is None


def test_budgets(run: Run, state: State):
    result = run("privacy", "budget", "phones", "--epsilon", "2", "--delta", "1e-6")
    assert result.stdout == (
        "population phones has the budget epsilon 2 at delta 1e-06, of which 0.25 is released or planned: "
        "2 private jobs\n"
    )
    assert state.budgets == {"phones": (2.0, 1e-6)}
    assert parsed(run("privacy", "budget", "phones", "--epsilon", "3", "--delta", "1e-6", "--json"))["epsilon"] == 3.0
    assert run("privacy", "budget", "phones", "--remove").stderr == "population phones has no privacy budget now\n"
    assert state.budgets == {}


@pytest.mark.parametrize("options", [[], ["--epsilon", "1"], ["--delta", "1"], ["--remove", "--delta", "1"]])
def test_half_a_budget_is_refused(run: Run, options: list[str]):
    result = run("privacy", "budget", "phones", *options)
    assert (result.exit_code, result.stderr) == (2, "error: expected --epsilon and --delta, or --remove\n")


def test_what_fixed_and_separated_participation_take_for_granted():
    assert (
        options.describe_sampling(Mechanism("fixed", 1.0))
        == "a client takes part in any round; the participants may be known"
    )
    assert options.describe_sampling(Mechanism("tree", 1.0, separation=4, max_participations=2)) == (
        "a client takes part in one of any 4 consecutive rounds at most, 2 times in all; the participants may be known"
    )
    assert options.adjacency(Mechanism("tree", 1.0)) == "zero-out"
