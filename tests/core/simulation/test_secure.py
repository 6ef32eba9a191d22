"""Secure aggregation in a simulation: its results, its drop-outs, and what it costs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from fedplat.job import JobSpec, calibrate
from fedplat.rounds import AttemptKey
from fedplat.secure_aggregation.messages import Survivors
from fedplat.secure_aggregation.setup import Graph
from fedplat.simulation.recording.result import Result
from fedplat.simulation.run import Simulation, run
from fedplat.simulation.scenario.options import SecureMode
from fedplat.simulation.secure.groups import UNITS, GroupCosts
from fedplat.simulation.secure.sums import SecureStep, setup_of
from support.simulation.cases import BAD, job, make_fleet
from support.simulation.least_squares import LeastSquares, initial
from support.simulation.secure import UPDATES, ObservedProtocol, observe, secure_job

PRIVATE = {"trust": "none", "participation": "fixed", "noise_multiplier": 0.1, "delta": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "confirmed": {"secure": {"confirm": True}},
    "in groups": {"goal": 12, "secure": {"group": 4, "threshold": 0.6}},
    "few neighbours": {"goal": 16, "secure": {"neighbours": 8, "threshold": 0.6}},
    "small modulus": {"secure": {"bits": 9, "modulus": 13}},
    "private": {"privacy": PRIVATE, "updates": {"weighting": "uniform"}, "secure": {"metrics": {}}},
}
LOSSY: dict[str, Any] = {"fails": 0.05, "vanishes": 0.05, "away_s": 30.0, "drops_out": 0.06}


def simulation(spec: JobSpec, num_clients: int = 40, mode: SecureMode = "real", **fleet: Any) -> Simulation:
    return Simulation(
        spec=calibrate(spec),
        fleet=make_fleet(num_clients, **fleet),
        engine=LeastSquares(num_clients),
        initial=initial(),
        seed=1,
        secure_aggregation=mode,
    )


def play(spec: JobSpec, num_clients: int = 40, mode: SecureMode = "real", **fleet: Any) -> Result:
    return run(simulation(spec, num_clients, mode, **fleet))


@functools.cache
def observed(name: str) -> tuple[ObservedProtocol, list[SecureStep], Result]:
    """Run a case with the real protocol, once for all tests that observe it."""
    with pytest.MonkeyPatch.context() as patch:
        return observe(simulation(secure_job(**CASES[name]), **LOSSY), patch)


@pytest.mark.parametrize("name", CASES)
def test_the_protocol_changes_no_bit_of_a_result(name: str) -> None:
    spec = secure_job(**CASES[name])
    real, modelled = play(spec, **LOSSY), play(spec, mode="model", **LOSSY)
    assert (real.status, len(real.rounds)) == ("COMPLETED", 3)
    assert real.totals.counts["MERGED"] < real.totals.assigned
    assert real.to_dict(clients=True) == modelled.to_dict(clients=True)
    assert real.model is not None
    assert modelled.model is not None
    assert real.model.buffer.tobytes() == modelled.model.buffer.tobytes()
    distances = [record.evaluation["distance"] for record in real.rounds]
    assert distances[-1] < distances[0] or name in ("private", "small modulus")  # those have a lot of noise


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_survivors_inputs_bit_for_bit(name: str) -> None:
    options = secure_job(**CASES[name]).secure_aggregation
    assert options is not None
    modulus = 2**options.modulus
    protocol, _, result = observed(name)
    assert len(protocol.sums) == sum(each.secure.groups for each in result.rounds if each.secure is not None)
    for group, total in protocol.sums:
        survivors = [group.assignments[position].id for position in group.survivors.survivors]
        inputs = np.array([protocol.inputs[each] for each in survivors], np.uint64)
        np.testing.assert_array_equal(total, inputs.sum(axis=0) % modulus)
        assert len(survivors) >= 3
    for assignment, masked in protocol.masked.items():
        assert (masked != protocol.inputs[assignment]).any()


def test_the_model_is_that_of_the_plain_job_but_for_rounding() -> None:
    """Each round has all clients, so that both jobs train with the same ones."""
    same: dict[str, Any] = {"selection": {"over_selection": 1.0}, "goal": 12, "rounds": 4}
    secure, plain = play(secure_job(**same), 12), play(job(updates=UPDATES, **same), 12)
    assert [record.num_updates for record in secure.rounds] == [12] * 4
    assert secure.model is not None
    assert plain.model is not None
    # An entry is rounded by less than a step, and the mean of 12 by as much, over the sum of their weights.
    step = UPDATES["clip_norm"] / (2**23 - 1)
    weights = sum(5 + client % 7 for client in range(12)) / UPDATES["max_examples"]
    np.testing.assert_allclose(secure.model["weight"], plain.model["weight"], rtol=0.0, atol=4 * 12 * step / weights)
    assert (secure.model["weight"] != plain.model["weight"]).any()
    for masked, clear in zip(secure.rounds, plain.rounds, strict=True):
        assert masked.total_weight * UPDATES["max_examples"] == pytest.approx(clear.total_weight, rel=1e-4)
        assert masked.metrics.keys() == {"loss"}  # the others are not sent


@pytest.mark.slow
def test_clients_drop_out_in_each_phase() -> None:
    spec = secure_job(goal=12, rounds=8, secure={"confirm": True}, selection={"min_fraction": 0.25})
    result = play(spec, 60, mode="model", **(BAD | {"drops_out": 0.1}))
    lost: dict[str, int] = {}
    for record in result.attempts:
        assert record.secure is not None
        steps, dropped = record.secure.steps, record.secure.dropped
        if record.committed:
            assert steps["SHARING"] - dropped.get("COLLECTING", 0) == steps["COLLECTING"] == record.num_updates
            assert steps["UNMASKING"] <= record.num_updates
        for phase, count in dropped.items():
            lost[phase] = lost.get(phase, 0) + count
    assert lost.keys() == {"ADVERTISING", "SHARING", "COLLECTING", "CONFIRMING", "UNMASKING"}
    assert result.status == "COMPLETED"


def test_an_attempt_with_too_few_survivors_is_tried_again_with_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = secure_job(selection={"min_fraction": 0.9}, retry={"max_attempts": 50})
    protocol, steps, result = observe(simulation(spec, drops_out=0.1), monkeypatch)
    assert result.status == "COMPLETED"
    abandoned = [record for record in result.attempts if not record.committed]
    assert abandoned
    assert all("needed" in record.reason for record in abandoned)
    assert all(record.secure is not None and record.secure.client_s == 0.0 for record in abandoned)
    assert {record.attempt for record in result.attempts} >= {1, 2}
    assert len({each.tobytes() for each in protocol.masked.values()}) == len(protocol.masked)
    assert len(protocol.sums) == len(result.rounds)  # no mask of an abandoned attempt was removed
    assert {step.task.key.number for step in steps} >= {1, 2}


def test_a_client_whose_update_is_not_finite_drops_out() -> None:
    case = simulation(secure_job(goal=6, selection={"over_selection": 1.0}), 6)
    result = run(Simulation(spec=case.spec, fleet=case.fleet, engine=LeastSquares(6, diverges=3), initial=initial()))
    assert (result.status, result.totals.counts["REJECTED"]) == ("COMPLETED", 3)
    assert result.participation.merged[3] == 0
    assert all(record.secure is not None and record.secure.dropped == {"COLLECTING": 1} for record in result.rounds)
    assert result.model is not None
    assert np.isfinite(result.model["weight"]).all()


# --- costs ---


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_real_messages(name: str) -> None:
    protocol, steps, result = observed(name)
    counted = {(step.task.id, step.phase.value): step.cost[:2] for step in steps}
    assert counted == {key: protocol.sizes[key] for key in counted}
    bytes_up = sum(up for _, up in counted.values())
    assert sum(record.bytes_up for record in result.attempts) <= result.totals.bytes_up == bytes_up
    for record in result.rounds:
        assert record.secure is not None
        assert record.secure.client_s > 0.0
        assert record.secure.server_s > 0.0


def test_clients_pay_for_neighbours() -> None:
    few, many = (
        play(secure_job(goal=30, secure={"neighbours": number}), mode="model").rounds[0].secure for number in (6, 28)
    )
    assert few is not None
    assert many is not None
    assert few.client_s < many.client_s
    assert few.bytes_up < many.bytes_up


def test_the_server_pays_for_drop_outs() -> None:
    setup = setup_of(secure_job(goal=100), AttemptKey("job", 1, 1), 0, 100_000)
    graph = Graph.of(setup.options, 100)
    group = GroupCosts(setup, graph, [])
    none, five = (group.server_s(Survivors((*range(100 - lost),), (*range(100 - lost, 100),))) for lost in (0, 5))
    masks_s = UNITS.mask_entry_s * setup.encoding.length
    # For each of 5 drop-outs the masks that it shares with survivors; but no own masks of the 5, and no additions.
    num_pairs = sum(peer < 95 for position in range(95, 100) for peer in graph.peers(position))
    expected = num_pairs * (masks_s + UNITS.exchange_s) + 5 * UNITS.exchange_s
    expected -= 5 * (masks_s + UNITS.add_entry_s * setup.encoding.length)
    assert five - none == pytest.approx(expected)


def test_a_schedule_without_training_has_the_same_costs() -> None:
    spec = secure_job(secure={"metrics": {}}, selection={"over_selection": 1.0})
    trained = play(spec, 8)
    size = initial().schema.num_floating
    scheduled = run(Simulation(spec=spec, fleet=make_fleet(8), seed=1, model_bytes=4.0 * size))
    assert [record.secure for record in scheduled.rounds] == [record.secure for record in trained.rounds]


@pytest.mark.slow
def test_a_cohort_of_thousands_is_in_groups() -> None:
    spec = secure_job(
        goal=1200, rounds=1, secure={"metrics": {}, "bits": 20, "group": 500}, selection={"over_selection": 1.0}
    )
    result = run(Simulation(spec=spec, fleet=make_fleet(1300, drops_out=0.01), seed=1, model_bytes=4e6))
    [record] = result.rounds
    assert record.secure is not None
    assert record.secure.groups == 3
    assert record.secure.steps["ADVERTISING"] == 1200
    assert record.num_updates == record.secure.steps["COLLECTING"] > 1100
    assert 4e6 < record.secure.bytes_up < 1.1 * 4e6


@pytest.mark.slow
def test_the_real_protocol_in_a_large_group() -> None:
    spec = secure_job(goal=130, rounds=1, secure={"bits": 20})
    play_ = functools.partial(play, spec, 190, drops_out=0.02)
    real, modelled = play_(), play_(mode="model")
    assert real.rounds[0].num_updates > 110
    assert real.to_dict() == modelled.to_dict()


# --- privacy ---


def test_a_private_run_is_charged_for_the_survivors_of_each_attempt() -> None:
    spec = secure_job(**CASES["private"], selection={"min_fraction": 0.5})
    result = play(spec, drops_out=0.1, mode="model")
    costs = [record.secure for record in result.attempts if record.secure is not None]
    # Attempts that fail for lack of answers are releases too, so that the budget ends before the rounds do.
    assert result.unmasked == tuple(each.steps["COLLECTING"] for each in costs if each.groups)
    assert len(result.unmasked) > len(result.rounds)
    assert (result.status, "budget" in result.reason) == ("PAUSED", True)
    assert play(secure_job(rounds=1), mode="model").unmasked == ()
