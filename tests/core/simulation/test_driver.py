"""The driver of simulations: the production coordinator in virtual time, with and without training."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.rounds import Proposal
from fedplat.rounds.commands import Assign
from fedplat.simulation.clients import idle
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.federated import training
from fedplat.simulation.federated.interface import UpdateRetention
from fedplat.simulation.recording.result import AttemptResult, Result
from fedplat.simulation.run import Hooks, Simulation, run
from support.simulation.cases import BAD, job, make_fleet
from support.simulation.least_squares import NUM_WEIGHTS, LeastSquares, initial

EXACT = {"outlier_factor": 0.0, "max_weight_factor": 0.0}
"""Only the rule limits the influence of one client."""


class Alike(LeastSquares):
    """Clients that have the same amount of work, and so report at the same moment."""

    def num_examples(self, client: int) -> int:
        return 5


def schedule(seed: int = 1, until_s: float = 1e6, **fleet: Any) -> Result:
    return run(Simulation(spec=job(), fleet=make_fleet(**(BAD | fleet)), seed=seed, until_s=until_s))


def learn(engine: LeastSquares, seed: int = 1, num_clients: int = 40, **sections: Any) -> Result:
    fleet = make_fleet(num_clients, **BAD)
    return run(Simulation(spec=job(**sections), fleet=fleet, engine=engine, initial=initial(), seed=seed))


def test_equal_simulations_give_equal_results() -> None:
    one, two, other = schedule(), schedule(), schedule(seed=2)
    assert one.to_dict(clients=True) == two.to_dict(clients=True)
    assert one.to_dict() != other.to_dict()


def test_check_ins_that_are_not_kept_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = schedule().to_dict(clients=True)
    monkeypatch.setattr(idle, "_KEPT_CHECK_INS", 2)
    assert schedule().to_dict(clients=True) == expected


def test_counts_add_up() -> None:
    result = schedule()
    assert result.status == "COMPLETED"
    assert len(result.rounds) == 6
    totals = result.totals
    assert sum(totals.counts.values()) == totals.assigned == result.participation.assigned.sum()
    assert totals.counts["MERGED"] >= 6 * 4
    assert {"LATE", "FAILED", "SURPLUS"} <= set(totals.counts)
    for name in ("merged", "late", "failed"):
        assert getattr(result.participation, name).sum() == totals.counts[name.upper()]
    assert sum(record.bytes_down for record in result.attempts) <= totals.bytes_down
    assert sum(result.staleness.values()) == totals.counts["MERGED"]
    shares = [group.share_of_merged for group in result.groups if group.name.startswith("speed")]
    assert sum(shares) == pytest.approx(1.0)
    assert {group.name for group in result.groups} >= {"speed 1/10", "region=eu"}


def test_a_run_ends_when_its_time_is_over() -> None:
    result = schedule(until_s=30.0)
    assert result.status == "RUNNING"
    assert result.totals.duration_s <= 30.0


def test_observers_are_told_of_each_attempt_in_order() -> None:
    heard: list[AttemptResult] = []
    result = run(Simulation(spec=job(), fleet=make_fleet(**BAD), seed=1), Hooks(observe=heard.append))
    assert tuple(heard) == result.attempts
    ended = [record.ended_at for record in heard]
    assert ended == sorted(ended)


def test_a_fleet_without_available_clients_fails_the_job() -> None:
    spec = job(retry={"max_attempts": 3}, selection={"where": "region == 'mars'"})
    result = run(Simulation(spec=spec, fleet=make_fleet(**BAD), seed=1))
    assert result.status == "FAILED"
    assert [record.phase for record in result.attempts] == ["ABANDONED"] * 3
    assert result.totals.assigned == 0


# --- training ---


def test_training_converges_and_results_do_not_depend_on_when_it_is_computed() -> None:
    lazy, eager = learn(LeastSquares(40)), learn(LeastSquares(40, eager=True))
    assert lazy.status == "COMPLETED"
    assert lazy.to_dict(clients=True) == eager.to_dict(clients=True)
    assert lazy.model is not None
    assert eager.model is not None
    assert lazy.model.buffer.tobytes() == eager.model.buffer.tobytes()
    distances = [record.evaluation["distance"] for record in lazy.rounds]
    assert distances[-1] < 0.7 * distances[0]


def test_the_engine_is_asked_for_what_matters_only() -> None:
    engine = LeastSquares(40)
    result = learn(engine)
    counts = result.totals.counts
    assert engine.calls["results"] == counts["MERGED"] + counts.get("DROPPED", 0)
    assert engine.calls["begun"] < result.totals.assigned
    assert engine.widest == 8
    assert not engine.under_way
    assert engine.published == [result.attempts[-1].version]
    assert engine.calls["evaluations"] == len(result.rounds)


def test_an_update_that_is_not_finite_is_rejected() -> None:
    result = learn(LeastSquares(10, diverges=3), num_clients=10, goal=6, selection={"wait_for": 5})
    assert result.status == "COMPLETED"
    assert result.totals.counts["REJECTED"] > 0
    assert result.participation.merged[3] == 0
    assert result.model is not None
    assert np.isfinite(result.model["weight"]).all()


@pytest.mark.parametrize("codec", ["bf16", "topk", "quantize"])
def test_updates_are_compressed_as_the_job_says(codec: str) -> None:
    plain, encoded = learn(LeastSquares(40)), learn(LeastSquares(40), compression={"uplink": {"codec": codec}})
    assert plain.model is not None
    assert encoded.model is not None
    assert plain.model != encoded.model
    assert encoded.rounds[-1].evaluation["distance"] < encoded.rounds[0].evaluation["distance"]


def test_an_attempt_whose_updates_are_too_large_is_tried_again() -> None:
    engine = LeastSquares(40)
    engine.scale = 1e38
    result = learn(engine, retry={"max_attempts": 2})
    assert (result.status, len(result.rounds)) == ("FAILED", 0)
    assert [record.phase for record in result.attempts] == ["ABANDONED"] * 2
    assert "rejected" in result.attempts[0].reason
    assert engine.client_states() == {}  # nothing was merged, so no client stored a state


class Attacked(LeastSquares):
    """Client 5 sends updates that are far too large, and client 27 claims far too many examples."""

    def result(self, task: ClientTask) -> LocalUpdate:
        trained = super().result(task)
        if task.client == 5:
            huge = Parameters.from_arrays({"weight": trained.update["weight"] * np.float32(1e6)})
            return dataclasses.replace(trained, update=huge)
        return dataclasses.replace(trained, num_examples=1e12) if task.client == 27 else trained


@pytest.mark.fault("F43")
@pytest.mark.fault("F44")
@pytest.mark.parametrize("mode", [{"kind": "sync"}, {"kind": "buffered", "concurrency": 15}])
def test_one_client_neither_stops_nor_owns_a_simulated_job(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play() -> tuple[Attacked, Result]:
        engine = Attacked(40)
        return engine, learn(engine, mode=mode)

    engine, result = play()
    assert result.status == "COMPLETED"
    assert result.totals.counts["REJECTED"] > 0
    assert result.participation.merged[5] == 0
    assert result.participation.merged[27] > 0
    assert all(record.total_weight < 1e4 for record in result.rounds)
    assert result.rounds[-1].evaluation["distance"] < result.rounds[0].evaluation["distance"]
    assert 5 not in engine.client_states(), "the client of a dropped update must not keep a state"
    monkeypatch.setattr(training, "UpdateRetention", functools.partial(UpdateRetention, budget=0))
    _, from_files = play()
    assert from_files.model == result.model


@pytest.mark.parametrize("rule", [{"name": "median"}, {"name": "krum"}])
def test_rules_that_gather_updates_work_as_those_that_stream(rule: dict[str, Any]) -> None:
    result = learn(LeastSquares(40), robust={"byzantine": 1, "rule": rule}, selection={"min_fraction": 0.8})
    assert result.status == "COMPLETED"
    assert result.rounds[-1].evaluation["distance"] < result.rounds[0].evaluation["distance"]


def test_partial_work_counts_if_the_job_allows_it() -> None:
    fleet = make_fleet(20, stragglers=0.9)
    runs = [
        run(
            Simulation(
                spec=job(selection={"min_fraction": 0.1}, config={"partial_work": partial}),
                fleet=fleet,
                engine=LeastSquares(20),
                initial=initial(),
            )
        )
        for partial in (False, True)
    ]
    dropped, kept = (each.totals.counts for each in runs)
    assert dropped["LATE"] > dropped["MERGED"]
    assert "LATE" not in kept
    assert 0.0 < runs[1].rounds[0].metrics["fraction"] < 1.0


def test_what_a_rule_remembers_goes_from_round_to_round() -> None:
    """A bound that stayed at its first value would let the model move only by 6 x 0.001."""
    clip = {"initial_norm": 0.001, "learning_rate": 10.0}
    result = learn(LeastSquares(40), updates={"adaptive_clip": clip})
    assert result.model is not None
    assert np.linalg.norm(result.model["weight"]) > 0.1


def test_reports_that_lack_what_the_rule_needs_are_rejected() -> None:
    result = learn(LeastSquares(40), aggregation={"rule": "fednova"}, retry={"max_attempts": 1})
    assert result.status == "FAILED"
    assert result.totals.counts["REJECTED"] > 0


class Poisoned(LeastSquares):
    """Two of forty clients send garbage."""

    def result(self, task: ClientTask) -> LocalUpdate:
        trained = super().result(task)
        if task.client not in (5, 27):  # these clients take part four times each
            return trained
        return dataclasses.replace(
            trained, update=Parameters.from_arrays({"weight": np.full(NUM_WEIGHTS, 1e6, np.float32)})
        )


def test_a_robust_rule_holds_out_against_garbage() -> None:
    robust = {"byzantine": 1, "rule": {"name": "centered-clipping", "radius": 1.0}}
    models = [
        learn(LeastSquares(40)).model,
        learn(Poisoned(40), robust=robust).model,
        learn(Poisoned(40), updates=EXACT).model,
    ]
    honest, robustly, mean = (np.linalg.norm(model["weight"]) for model in models if model is not None)
    assert mean > 1e3
    assert robustly < 2 * honest
    assert robustly > 0.1


def test_a_buffered_job_merges_stale_updates_and_converges() -> None:
    mode = {"kind": "buffered", "concurrency": 20, "max_staleness": 4}
    result = learn(LeastSquares(40), goal=5, rounds=20, mode=mode)
    assert result.status == "COMPLETED"
    assert sum(result.staleness.values()) == 20 * 5
    assert max(result.staleness) > 0
    assert max(result.staleness) <= 4
    distances = [record.evaluation["distance"] for record in result.rounds]
    assert distances[-1] < 0.5 * distances[0]
    again = learn(LeastSquares(40, eager=True), goal=5, rounds=20, mode=mode)
    assert again.to_dict(clients=True) == result.to_dict(clients=True)


RETURNING: dict[str, dict[str, Any]] = {
    "buffered": {"goal": 2, "mode": {"kind": "buffered", "concurrency": 8}},
    "fedasync": {
        "goal": 1,
        "mode": {"kind": "buffered", "concurrency": 8},
        "aggregation": {"rule": "fedasync"},
        "updates": {"outlier_factor": 0.0, "weighting": "uniform"},
    },
    "ssp": {"goal": 1, "mode": {"kind": "ssp", "concurrency": 8, "slack": 3}},
}


@pytest.mark.parametrize("name", RETURNING)
def test_a_client_that_returns_trains_from_the_version_of_its_assignment(name: str) -> None:
    """As on a server, a base version is kept while an assignment is open; all others but the latest are retired."""
    sections: dict[str, Any] = {"selection": {"over_selection": 1.0, "min_fraction": 1.0}} | RETURNING[name]
    engine = LeastSquares(20)
    fleet = make_fleet(20, vanishes=0.3, away_s=20.0, noise=0.3, speed={"kind": "constant", "value": 1.0})
    simulation = Simulation(spec=job(rounds=60, **sections), fleet=fleet, engine=engine, initial=initial(), seed=1)
    batches: list[Proposal] = []
    result = run(simulation, Hooks(trace=lambda events, now, proposal: batches.append(proposal)))
    assert result.status == "COMPLETED"
    latest, num_reclaimed_late = 0, 0
    for command in (command for proposal in batches for command in proposal.commands if isinstance(command, Assign)):
        latest = max(latest, command.base_version)
        num_reclaimed_late += command.base_version < latest
    assert num_reclaimed_late > 3
    assert set(engine.published) == {60}


def test_updates_that_grew_too_old_while_they_waited_are_forgotten() -> None:
    alike: dict[str, Any] = {
        "speed": {"kind": "constant", "value": 5.0},
        "examples": {"kind": "constant", "value": 5.0},
    }
    mode = {"kind": "buffered", "concurrency": 20, "max_staleness": 0}
    engine = Alike(40)
    spec = job(goal=5, rounds=4, mode=mode)
    result = run(Simulation(spec=spec, fleet=make_fleet(40, **alike), engine=engine, initial=initial(), seed=1))
    assert result.totals.counts["DROPPED"] > 0
    assert result.staleness == {0: 4 * 5}
    assert set(engine.published) - {4} <= {task.version for task in engine.under_way}
    assert engine.calls["dropped"] >= result.totals.counts["DROPPED"]


def test_a_buffered_job_holds_out_against_garbage_with_a_robust_rule() -> None:
    mode = {"kind": "buffered", "concurrency": 20, "max_staleness": 4}
    robust = {"byzantine": 1, "rule": {"name": "centered-clipping", "radius": 1.0}}
    settings: dict[str, Any] = {"goal": 5, "rounds": 20, "mode": mode}
    honest = learn(LeastSquares(40), **settings)
    robustly = learn(Poisoned(40), robust=robust, **settings)
    mean = learn(Poisoned(40), updates=EXACT, **settings)
    assert honest.model is not None
    assert robustly.model is not None
    assert mean.model is not None
    assert max(robustly.staleness) > 0
    assert np.linalg.norm(mean.model["weight"]) > 1e3
    assert 0.1 < np.linalg.norm(robustly.model["weight"]) < 2 * np.linalg.norm(honest.model["weight"])


@pytest.mark.parametrize(
    "participation",
    ["fixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("poisson", "min_separation"))],
)
def test_a_private_job_learns_though_everything_that_is_released_has_noise(participation: str) -> None:
    selections: dict[str, dict[str, Any]] = {
        "poisson": {"sampling": {"policy": "poisson", "rate": 0.5}, "wait_for": 30},
        "fixed": {},
        "min_separation": {"min_separation": 1},
    }
    settings: dict[str, Any] = {
        "goal": 10,
        "rounds": 12,
        "selection": {"close": "deadline", **selections[participation]},
        "updates": {"weighting": "uniform", "clip_norm": 2.0},
    }
    options = {"participation": participation, "delta": 1e-6, "noise_multiplier": 0.05}
    results = [learn(LeastSquares(40), privacy=options, **settings) for _ in range(2)]
    assert results[0].status == "COMPLETED"
    assert all(record.metrics == {} for record in results[0].attempts)
    assert results[0].rounds[-1].evaluation["distance"] < results[0].rounds[0].evaluation["distance"] / 2
    assert results[0].model == results[1].model  # both have the same seed
    noisier = learn(LeastSquares(40), privacy={**options, "noise_multiplier": 50.0}, **settings)
    assert noisier.rounds[-1].evaluation["distance"] > 10 * results[0].rounds[-1].evaluation["distance"]


def test_a_private_job_that_has_spent_its_budget_ends_its_simulation() -> None:
    options = {"participation": "fixed", "delta": 1e-6, "noise_multiplier": 1.0, "max_releases": 2}
    settings: dict[str, Any] = {
        "selection": {"close": "deadline"},
        "updates": {"weighting": "uniform", "clip_norm": 1.0},
    }
    result = learn(LeastSquares(40), privacy=options, **settings)
    assert (result.status, len(result.rounds)) == ("PAUSED", 2)
    assert "budget (max_releases, delta = 1e-06) is spent" in result.reason
