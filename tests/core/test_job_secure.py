"""The table `[secure_aggregation]` of a job file, alone and with `privacy.trust = "none"`."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fedplat.aggregate import Contribution
from fedplat.errors import JobFileError, SecureAggregationError
from fedplat.job import (
    JobSpec,
    build_rule,
    build_secure_rule,
    calibrate,
    charges,
    find_mechanism,
    find_mechanism_of,
    parse_job,
    plan_charge,
    planning,
    secure,
    warnings,
)
from fedplat.model import Parameters, VectorBlocks
from fedplat.privacy import Charge, accounting, noise, options
from fedplat.privacy.accounting import cost_of_charges
from fedplat.rounds import JobState, ModelVersion, privacy_rules
from fedplat.rounds.protocols.base import training_of
from fedplat.secure_aggregation.encoding import Decoded

BASE = """
name = "a"
population = "p"
trainer = "t"
rounds = 20
{top}
[model]
initial = "m:f"
[selection]
goal = {goal}
{selection}
[updates]
{updates}
[secure_aggregation]
{secure}
"""
UNIFORM = 'weighting = "uniform"\nclip_norm = 0.5'
PRIVATE = '[privacy]\ntrust = "none"\nparticipation = "fixed"\ndelta = 1e-6\n'
SCAFFOLD = '[aggregation]\nrule = "scaffold"\nnum_clients = 9\n[config]\nalgorithm = "scaffold"\n'
DISTILL = '[server_step]\ntrainer = "l"\nmethod = "distill"\nlearning_rate = 0.1\nbatch_size = 5\nsteps = 5\n'
METRICS = "metrics = { noise_multiplier = 6, bounds = { loss = [0, 10], accuracy = [0, 1] } }\n"


def job(
    more: str = "", goal: int = 40, selection: str = "", updates: str = UNIFORM, secure: str = "", top: str = ""
) -> JobSpec:
    return parse_job(BASE.format(top=top, goal=goal, selection=selection, updates=updates, secure=secure) + more)


def private(more: str = "noise_multiplier = 2", **changes: object) -> JobSpec:
    return job(PRIVATE + more, **changes)  # type: ignore[arg-type]


def refusal(more: str = "", **changes: object) -> str:
    with pytest.raises(JobFileError) as caught:
        job(more, **changes)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("updates.clip_norm = 0", {"updates": 'weighting = "uniform"'}),
        ("updates.adaptive_clip", {"updates": 'weighting = "uniform"\nadaptive_clip = { quantile = 0.5 }'}),
        ("updates.max_examples = 1e+06", {"updates": "clip_norm = 1"}),
        ("updates.max_norm = 3: expected 0", {"updates": UNIFORM + "\nmax_norm = 3"}),
        ("updates.outlier_factor = 9: expected 0", {"updates": UNIFORM + "\noutlier_factor = 9"}),
        (
            "updates.max_weight_factor = 9: expected 0",
            {"updates": "clip_norm = 1\nmax_examples = 50\nmax_weight_factor = 9"},
        ),
        ("masked updates cannot be compressed", {"more": '[compression]\nuplink = { codec = "bf16" }\n'}),
        ('aggregation.rule = "fednova"', {"more": '[aggregation]\nrule = "fednova"\n'}),
        ('aggregation.rule = "scaffold"', {"more": SCAFFOLD}),
        ("compares the updates of single clients", {"more": '[robust]\nbyzantine = 1\nrule = { name = "median" }\n'}),
        ('server_step.method = "distill"', {"more": DISTILL}),
        ('mode.kind = "buffered"', {"more": '[mode]\nkind = "buffered"\nconcurrency = 50\n'}),
        ("evaluation.clients", {"more": '[evaluation.clients]\nevaluator = "e"\ngoal = 2\n'}),
        ('policy = "oort"', {"selection": 'sampling = { policy = "oort", pacer_s = 1.0 }'}),
        ("pool: expected none", {"more": "[pool]\nranks = 2\n"}),
        ("at least 3 clients in each of 1 groups", {"goal": 2}),
        ("at least 3 clients in each of 2 groups", {"goal": 5, "secure": "group = 4"}),
        ("the sum of 40 clients would not fit modulus = 21", {"secure": "bits = 16\nmodulus = 21"}),
        ("flower", {"more": '[flower]\napp = "a"\n'}),
        ("metrics.loss = [1, 0]", {"secure": "metrics = { loss = [1.0, 0.0] }"}),
        ('privacy.trust = "server": expected "none"', {"more": PRIVATE.replace('"none"', '"server"') + "epsilon = 2"}),
        ("expected [privacy.metrics]", {"secure": "metrics = { loss = [0.0, 1.0] }", "more": PRIVATE + "epsilon = 2"}),
    ],
)  # fmt: skip
def test_what_needs_single_updates_is_refused(text: str, changes: dict[str, object]) -> None:
    assert text in refusal(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ('trust = "none": expected [secure_aggregation]', "[secure_aggregation]", ""),
        ('expected "fixed" with trust = "none"', '"fixed"', '"min_separation"'),
        ("max_participations = 3: expected 0", "delta", "max_participations = 3\ndelta"),
        ("the noise of 40 clients does not fit", "[secure_aggregation]", "[secure_aggregation]\nbits = 4\nmodulus = 8"),
        ("deadlines.adaptive", "[privacy]", "[deadlines.adaptive]\npercentile = 80\n[privacy]"),
    ],
)
def test_what_the_noise_of_clients_needs(text: str, old: str, new: str) -> None:
    whole = BASE.format(top="", goal=40, selection="", updates=UNIFORM, secure="") + PRIVATE + "noise_multiplier = 2\n"
    parse_job(whole)
    with pytest.raises(JobFileError) as caught:
        parse_job(whole.replace(old, new))
    assert text in str(caught.value)


def test_all_that_works_with_sums_is_allowed() -> None:
    spec = job(
        '[aggregation]\nrule = "fedadam"\nlearning_rate = 0.1\n[compression]\ndownlink = { codec = "bf16" }\n'
        '[warm_start]\ntrainer = "l"\nlearning_rate = 0.1\nbatch_size = 5\n',
        selection='close = "deadline"\nmin_separation = 2\nsampling = { policy = "stratified", label = "region" }',
        secure="bits = 16\nmodulus = 22\nmetrics = { loss = [0.0, 5.0] }",
        top='durability = "memory"',
    )
    assert spec.outlier_factor == spec.max_weight_factor == 0.0
    assert job(updates="clip_norm = 1\nmax_examples = 50").max_weight_factor == 0.0
    assert warnings(spec) == warnings(job(updates="clip_norm = 1\nmax_examples = 50")) == []


def test_a_clip_norm_that_leaves_nothing_of_an_update_is_warned_of() -> None:
    weights = Parameters.from_arrays({"w": np.full(100, 0.05, np.float32), "b": np.zeros(9, np.float32)})
    for clip_norm, warns in (("5.0", False), ("1e8", True)):
        spec = job(updates=f"clip_norm = {clip_norm}\nmax_examples = 50", secure="bits = 20\nmodulus = 30")
        found = warnings(spec, weights)
        assert bool(found) == warns
        zeros = Parameters.from_arrays({"w": np.zeros(100, np.float32)})
        assert bool(warnings(spec, zeros)) == warns
        if warns:  # 1e8 / (2^19 - 1)
            assert "rounded to multiples of 191, and the model's weights are about 0.05; set a clip_norm" in found[0]


@pytest.mark.fault("S12")
def test_the_sum_of_a_group_may_fill_the_modulus() -> None:
    for group, bits, fits in ((64, 16, True), (65, 16, False)):
        table = f"group = {group}\nbits = {bits}\nmodulus = 22"
        if fits:
            encoding = secure.build_encoding(job(goal=group, secure=table), 10)
            assert encoding.max_clients * encoding.levels < 2**21
        else:
            assert "would not fit" in refusal(goal=group, secure=table)


def test_groups_and_survivors() -> None:
    spec = job(goal=2500)
    assert (secure.num_groups(spec), secure.group_minimum(spec), secure.group_maximum(spec)) == (3, 667, 834)
    assert minimum_of(spec) == 2001
    spec = job(goal=4, selection="min_fraction = 0.3")
    assert secure.group_minimum(spec) == minimum_of(spec) == 3
    spec = private(selection="min_fraction = 0.7")
    assert minimum_of(spec) == 28


def minimum_of(spec: JobSpec) -> int:
    job = JobState("j", spec, version())
    return training_of(job).sizes(job).minimum


def version() -> ModelVersion:
    return ModelVersion(0, 0, 0, "digest", 1)


def test_the_rule_receives_the_mean_alone() -> None:
    spec = job('[aggregation]\nrule = "fedavgm"\nmomentum = 0.5\nlearning_rate = 2.0\n')
    rule = build_secure_rule(spec)
    mean = np.array([1.0, -2.0], np.float32)
    partial = rule.fold(rule.start(2), VectorBlocks(mean), Contribution(1.0))
    step, _ = rule.apply(rule.init(2), partial)
    assert step.tolist() == [2.0, -4.0]
    partial = build_rule(spec).fold(rule.start(2), VectorBlocks(10 * mean), Contribution(1.0))
    assert partial.total.tolist() == [10.0, -20.0]  # it is not clipped again


def test_the_mean_has_a_fixed_divisor_if_the_job_is_private() -> None:
    def decoded(weight: float) -> Decoded:
        return Decoded(np.array([8.0], np.float32), weight, {}, 4)

    assert secure.mean_update(job(), decoded(2.0)).tolist() == [4.0]
    with pytest.raises(SecureAggregationError, match="add up to 0"):
        secure.mean_update(job(), decoded(0.0))
    spec = private("noise_multiplier = 2\nexpected_weight = 0.5")
    assert secure.mean_update(spec, decoded(0.0)).tolist() == [pytest.approx(8.0 / 20.0)]


def test_the_noise_is_that_of_the_fewest_survivors() -> None:
    spec = private("noise_multiplier = 3\n" + METRICS, selection="min_fraction = 0.75")
    for size in (10, 100_000):
        encoding = secure.build_encoding(spec, size)
        noise = encoding.noise
        assert noise is not None
        assert encoding.scale == pytest.approx((2**19 - 1) / 0.5)
        assert math.sqrt(30 * noise.variance) == pytest.approx(3.0 * encoding.sensitivity)
        assert math.sqrt(30 * noise.metrics_variance / 2) == pytest.approx(6.0 * noise.metrics_scale)
        assert encoding.noise_multiplier(30) == pytest.approx((1 / 9 + 1 / 36) ** -0.5)
        assert [name for name, *_ in encoding.metrics] == ["accuracy", "loss"]
    mechanism = find_mechanism(spec)
    assert mechanism is not None
    assert (mechanism.kind, mechanism.separation, mechanism.max_participations) == ("skellam", 1, 0)
    assert mechanism.noise_multiplier == pytest.approx((1 / 9 + 1 / 36) ** -0.5)
    assert 1.0 < mechanism.steps <= encoding.sensitivity
    assert options.describe_participation(mechanism) == "fixed"
    assert options.adjacency(mechanism) == "zero-out"
    assert "work together with the server" in options.describe_not_covered(mechanism)[0]


def test_a_small_modulus_has_larger_steps_and_a_model_that_it_cannot_hold_is_refused() -> None:
    spec = private("noise_multiplier = 8", goal=100, secure="modulus = 16\nbits = 14")
    encoding = secure.build_encoding(spec, 2**20)
    assert encoding.scale * 0.5 == pytest.approx(noise.fit_norm(8191, 2**20, 16, 100, 64 * 100 / 80), rel=1e-12)
    assert 500 < encoding.scale * 0.5 < 1000
    misfit = build_rule(spec).requirements.misfit
    assert misfit(Parameters.from_arrays({"w": np.zeros(10, np.float32)}).schema) == ""
    with pytest.raises(SecureAggregationError, match=r"expected secure_aggregation\.modulus above 16"):
        secure.build_encoding(spec, 2**24)
    coarse = private("epsilon = 2", secure="bits = 6")
    text = build_rule(coarse).requirements.misfit(Parameters.from_arrays({"w": np.zeros(10**5, np.float32)}).schema)
    assert "expected secure_aggregation.bits above 6" in text
    with pytest.raises(SecureAggregationError, match="not calibrated"):
        secure.build_encoding(coarse, 10)


def test_a_model_that_carries_the_largest_integers_is_refused() -> None:
    schema = Parameters.from_arrays({"w": np.zeros(3, np.float32), "n": np.zeros(1, np.int64)}, carry="max").schema
    assert 'carry = "keep"' in build_rule(job()).requirements.misfit(schema)


def test_the_noise_is_calibrated_and_charged_by_survivors() -> None:
    spec = calibrate(private("epsilon = 3.0\n" + METRICS.replace("6", "30")))
    assert spec.privacy is not None
    planned = plan_charge(spec)
    assert planned is not None
    assert planned.releases == 20
    spent = accounting.epsilon([planned], 1e-6)
    assert 2.97 < spent <= 3.0
    assert calibrate(spec) == spec

    survivors = (40, 32, 36, 40)
    found = charges(spec, survivors)
    assert [charge.releases for charge in found] == [1, 1, 2]
    assert [charge.mechanism for charge in found] == [find_mechanism_of(spec, count) for count in (32, 36, 40)]
    multipliers = [charge.mechanism.noise_multiplier / planned.mechanism.noise_multiplier for charge in found]
    assert multipliers == pytest.approx([1.0, math.sqrt(36 / 32), math.sqrt(40 / 32)])
    assert accounting.epsilon(found, 1e-6) < accounting.epsilon([Charge(planned.mechanism, 4)], 1e-6)
    cost = cost_of_charges(spec.privacy, planned.mechanism, found)
    assert (cost.releases, cost.epsilon) == (4, accounting.epsilon(found, 1e-6))
    assert charges(spec, ()) == []
    assert charges(job(), (40,)) == []


def test_attempts_use_up_the_budget_by_survivors() -> None:
    spec = calibrate(private("epsilon = 3.0"))
    planned = plan_charge(spec)
    assert planned is not None
    assert secure.spent_releases(spec, (40, 32, 32)) == Fraction(14, 5)

    def spent(*unmasked: int) -> str:
        return privacy_rules.describe_spent_budget(JobState("j", spec, version(), unmasked=unmasked))

    assert spent(*[32] * 19) == ""
    assert "is spent" in spent(*[32] * 20)
    assert spent(*[32] * 18, 40) == ""
    assert "is spent" in spent(*[32] * 19, 40)
    assert spent(*[40] * 23) == ""  # 23 x 0.8 and one more with the fewest survivors
    assert "is spent" in spent(*[40] * 24)
    for unmasked in ([32] * 20, [40] * 23 + [32], [36] * 21 + [32]):
        assert accounting.epsilon(charges(spec, unmasked), 1e-6) <= 3.0


def test_a_plan_of_noise_that_clients_add() -> None:
    spec = private("epsilon = 3.0")
    found = planning.plan(spec, num_clients=1000)
    calibrated = calibrate(spec).privacy
    assert calibrated is not None
    assert found.noise_multiplier == calibrated.noise_multiplier
    assert found.max_rounds == 20
    assert [each.epsilon for each in found.by_rounds] == [each.epsilon_rdp for each in found.by_rounds]
    assert found.deviation == pytest.approx(found.noise_multiplier * math.sqrt(40 / 32) / 40)
    own = next(each for each in found.by_cohort if each.expected_reports == 40)
    assert (own.noise_multiplier, own.deviation) == (found.noise_multiplier, pytest.approx(found.deviation))
    assert all(each.deviation is not None for each in found.by_cohort)
