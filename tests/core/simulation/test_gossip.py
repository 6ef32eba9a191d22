"""Decentralised jobs in the simulator: with training, and mixing alone."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat.errors import JobFileError
from fedplat.gossip import Gossip, draw_edges, metropolis, mix_all, push_all, push_sum
from fedplat.gossip.messages import CommitRow
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.clients.distributions import Constant
from fedplat.simulation.clients.fleet import Cut, LinkOptions, Outage
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.federated.training import training_seed
from fedplat.simulation.gossip.silos import SiloModels
from fedplat.simulation.recording.result import GossipExchange, Result
from fedplat.simulation.run import Simulation, run
from support.simulation.least_squares import LeastSquares, initial

SILOS = 8
FAULTS = LinkOptions(loss=0.3, cuts=(Cut((0, 1), 2, 5), Cut((4, 5), 2, 5)), dead=(Outage(3, 4, 6),))


def make_job(mode: str = "", rounds: int = 6, count: int = SILOS, more: str = "updates.weighting = 'uniform'\n") -> Any:
    return parse_job(
        f"name = 'g'\npopulation = 'p'\ntrainer = 't'\nrounds = {rounds}\nmodel.initial = 'm:f'\n"
        f"selection = {{ goal = {count}, min_fraction = 0.5 }}\nmode = {{ kind = 'gossip'{mode} }}\n{more}"
    )


def simulate(mode: str = "", rounds: int = 6, more: str = "updates.weighting = 'uniform'\n", **options: Any) -> Result:
    fleet = build_fleet(options.pop("fleet", FleetOptions()), 1, SILOS)
    engine = options.pop("engine", None) or LeastSquares(SILOS)
    spec = make_job(mode, rounds, more=more)
    return run(Simulation(spec=spec, fleet=fleet, engine=engine, initial=initial(), seed=1, **options))


def mix(count: int, mode: str = "", rounds: int = 20, **options: Any) -> Result:
    fleet = build_fleet(FleetOptions(num_clients=count), 1)
    return run(Simulation(spec=make_job(mode, rounds, count), fleet=fleet, seed=1, **options))


def exchanges(result: Result) -> list[GossipExchange]:
    return [each.exchange for each in result.attempts if each.exchange is not None]


@pytest.mark.parametrize("mode", ["", ', exchange = "push-sum", topology = "exponential"'])
def test_training_follows_the_recurrence_of_the_paper(mode: str) -> None:
    """D-PSGD and SGP in the order of this platform: X ← W (X + U(X)), with the updates U of the same engine."""
    result = simulate(f"{mode}, tolerance = 1.0, settle_rounds = 0", rounds=5)
    spec, engine = make_job(mode), LeastSquares(SILOS)
    x, weights = np.zeros((SILOS, 8)), np.ones((SILOS, 1))
    names = [str(silo) for silo in range(SILOS)]
    distances: list[float] = []
    for number in range(1, 6):
        for silo in range(SILOS):
            model = initial()
            model["weight"][:] = x[silo] / weights[silo]
            version = number * SILOS + silo
            engine.publish(version, model)
            task = ClientTask(silo, version, training_seed(1, silo, number), round_number=number)
            engine.begin([task])
            x[silo] += engine.result(task).update.to_vector()
        edges = draw_edges(spec.gossip, names, number)
        if spec.gossip.is_directed:
            links = push_sum(SILOS, edges)
            x, weights = push_all(links, x), push_all(links, weights)
        else:
            x = mix_all(metropolis(SILOS, edges), x)
        away = x / weights - (x / weights).mean(axis=0)
        distances.append(math.sqrt(np.sum(away**2) / SILOS))
    assert [each.distance for each in exchanges(result)] == pytest.approx(distances, rel=1e-4)
    assert result.status == "COMPLETED"
    assert result.model is not None
    np.testing.assert_allclose(result.model["weight"], x.sum(axis=0) / weights.sum(), atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("", ""),
        (', topology = "pairs"', ""),
        (', exchange = "push-sum", topology = "exponential"', ""),
        (", gamma = 0.8", "compression.uplink.codec = 'quantize'\n"),
    ],
    ids=["ring", "pairs", "push-sum", "choco"],
)
def test_silos_agree_in_spite_of_lost_messages_cut_links_and_a_dead_silo(mode: str, more: str) -> None:
    more += "updates.weighting = 'uniform'\n"
    result, again = (simulate(f"{mode}, tolerance = 0.01", links=FAULTS, more=more) for _ in range(2))
    assert result.status == "COMPLETED", result.reason
    assert result.model is not None
    first, clean = result.attempts[0], simulate(mode, more=more)
    assert result.attempts[-1].evaluation["distance"] < 0.8 * first.evaluation["distance"]
    assert again.to_dict(clients=True) == result.to_dict(clients=True)
    found = exchanges(result)
    assert sum(each.confirmed for each in found) < sum(each.edges for each in found)
    assert [each.silos for each in found[:7]] == [8, 8, 8, 8, 7, 7, 8]
    assert all(each.confirmed == each.edges for each in exchanges(clean))
    assert result.participation.merged.tolist() == [len(found) - 2 * (silo == 3) for silo in range(SILOS)]


def test_compressed_gossip_makes_no_variance_negative() -> None:
    spec = make_job(", gamma = 0.5", more="compression.uplink.codec = 'quantize'\nupdates.weighting = 'uniform'\n")
    shapes = {"norm.running_var": 2, "weight": 2}
    model = Parameters.from_arrays({name: np.full(size, 0.25, np.float32) for name, size in shapes.items()})
    silos = SiloModels(spec, LeastSquares(2), model, seed=1)
    silos.publish(0, 1)
    silos.copies[1][:] = -5.0
    silos.store(0, 1)
    silos.mix(CommitRow(1, "0", 0.6, (("1", 0.4),)))
    away = 0.25 + 0.5 * 0.4 * (-5.0 - 0.25)
    np.testing.assert_allclose(silos.values[0], [0.0, 0.0, away, away], rtol=1e-6)


LINE = ", ".join(f'["{silo}", "{silo + 1}"]' for silo in range(SILOS - 1))
WRONG_EDGES = {
    '["north", "south"]': "there is no silo 'north', 'south'; expected the indices of silos in a simulation",
    f'{LINE}, ["7", "8"]': "there is no silo '8'",
    '["0", "1"]': "mode.edges name 2 silos, and 8 take part",
    ", ".join(f'["{silo}", "{silo + 1}"]' for silo in range(0, SILOS, 2)): "no way from the silo 0 to 2",
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("edges", WRONG_EDGES)
def test_edges_that_cannot_work_are_refused_before_the_start(edges: str, trains: bool) -> None:
    mode = f', topology = "edges", edges = [{edges}]'
    with pytest.raises(JobFileError) as caught:
        simulate(mode) if trains else mix(SILOS, mode)
    assert WRONG_EDGES[edges] in str(caught.value)


def test_silos_have_the_same_names_with_and_without_training() -> None:
    trained, mixed = (run(f', topology = "edges", edges = [{LINE}], tolerance = 1.0') for run in (simulate, _mix))
    assert [each.confirmed for each in exchanges(trained)] == [SILOS - 1] * len(trained.attempts)
    assert [each.confirmed for each in exchanges(mixed)] == [SILOS - 1] * len(mixed.attempts)


def _mix(mode: str) -> Result:
    return mix(SILOS, mode)


class Recording(LeastSquares):
    """Adds up the updates of all silos, which mixing does not change."""

    def __init__(self) -> None:
        super().__init__(SILOS)
        self.total = np.zeros(8)

    def result(self, task: ClientTask) -> LocalUpdate:
        found = super().result(task)
        self.total += found.update.to_vector()
        return found


@pytest.mark.parametrize("mode", ["", ', exchange = "push-sum"', ', exchange = "push-sum", topology = "exponential"'])
def test_lost_messages_do_not_change_the_exported_mean(mode: str) -> None:
    """Models that are far apart differ from it: in push-sum by their weights, too."""
    engine = Recording()
    result = simulate(f"{mode}, tolerance = 0.2", engine=engine, links=LinkOptions(loss=0.3))
    assert result.model is not None
    assert exchanges(result)[-1].distance > 1e-3
    np.testing.assert_allclose(result.model["weight"], engine.total / SILOS, atol=1e-6)


def test_rounds_without_training_keep_the_mean() -> None:
    """Until the silos agree, only rounding changes the mean, also while messages are lost."""
    result = simulate(", tolerance = 1e-4", links=LinkOptions(loss=0.3))
    scores = [each.evaluation["distance"] for each in result.attempts if each.round >= 6]
    assert len(scores) > 10
    assert np.ptp(scores) < 1e-6


def test_silos_that_do_not_agree_export_nothing() -> None:
    result = simulate(", tolerance = 1e-6, settle_rounds = 3", rounds=3)
    assert (result.status, len(result.attempts), result.model) == ("FAILED", 6, None)
    assert "the silos do not agree after 3 rounds without training" in result.reason
    assert "lost" not in result.reason
    result = simulate(", tolerance = 1e-6, settle_rounds = 3", rounds=3, links=LinkOptions(loss=1.0))
    assert f"expected messages that arrive ({SILOS} of {SILOS} edges were lost in the last round)" in result.reason


def test_a_ring_is_federated_averaging() -> None:
    """All silos have the weighted mean after each round, as with a server."""
    result = simulate(', exchange = "ring"', more="")
    server = parse_job(
        "name = 'g'\npopulation = 'p'\ntrainer = 't'\nrounds = 6\nmodel.initial = 'm:f'\n"
        f"selection = {{ goal = {SILOS}, over_selection = 1.0 }}\nupdates.max_weight_factor = 0\n"
    )
    fleet = build_fleet(FleetOptions(), 1, SILOS)
    other = run(Simulation(spec=server, fleet=fleet, engine=LeastSquares(SILOS), initial=initial(), seed=1))
    ours, theirs = ([each.evaluation["distance"] for each in one.rounds] for one in (result, other))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert [each.distance for each in exchanges(result)] == pytest.approx([0.0] * 6, abs=1e-7)
    assert all(0.0 < each.reported < math.inf for each in exchanges(result))
    assert result.status == "COMPLETED"
    size = initial().schema.file_size_bytes
    assert exchanges(result)[0].busiest_bytes == pytest.approx(2 * 2 * 7 / 8 * size)


def test_a_ring_goes_on_without_a_dead_silo() -> None:
    result = simulate(', exchange = "ring"', links=LinkOptions(dead=(Outage(3, 2, 3),)), more="")
    assert result.status == "COMPLETED"
    assert [each.attempt for each in result.attempts] == [1] * 6  # the ring is repeated within the attempt
    assert [each.silos for each in exchanges(result)] == [8, 8, 7, 8, 8, 8]


def test_a_codec_makes_messages_smaller() -> None:
    plain = simulate(", tolerance = 1.0")
    small = simulate(
        ", tolerance = 1.0, gamma = 0.9", more="updates.weighting = 'uniform'\ncompression.uplink.codec = 'bf16'\n"
    )
    assert small.totals.bytes_up < 0.5 * plain.totals.bytes_up


def test_a_slow_silo_joins_the_next_round() -> None:
    fleet = FleetOptions(noise=1.5, speed=Constant(1.0))
    result = simulate(
        ", tolerance = 1.0", rounds=10, fleet=fleet, more="updates.weighting = 'uniform'\ndeadlines.training_s = 10.0\n"
    )
    silos = [each.silos for each in exchanges(result)]
    assert min(silos) < SILOS
    assert max(silos) > 4
    assert result.status == "COMPLETED"
    late = [each.counts.get("LATE", 0) for each in result.attempts]
    assert sum(late) == result.participation.late.sum() > 0


def test_a_silo_whose_training_diverges_is_left_out() -> None:
    engine = LeastSquares(SILOS, diverges=2)
    result = simulate(", tolerance = 1.0", rounds=3, engine=engine)
    assert sorted(engine.client_states()) == [0, 1, 3, 4, 5, 6, 7]  # that of an update that was not added is restored
    assert [each.silos for each in exchanges(result)][:3] == [7, 7, 7]
    assert result.model is not None
    assert np.isfinite(result.model["weight"]).all()


def test_mixing_alone_contracts_by_the_second_eigenvalue() -> None:
    result = mix(16, ", tolerance = 1e-3, settle_rounds = 0", rounds=60)
    distances = [each.distance for each in exchanges(result)]
    assert distances[-1] / distances[-2] == pytest.approx(1 / 3 + 2 / 3 * math.cos(2 * math.pi / 16), rel=1e-3)
    assert result.status == "FAILED"
    exact = mix(16, ', topology = "one-peer-exponential"', rounds=4)
    assert (exact.status, len(exact.attempts)) == ("COMPLETED", 4)


@pytest.mark.parametrize("mode", [', topology = "pairs"', ', topology = "exponential", exchange = "push-sum"'])
def test_ten_thousand_silos_mix_without_training(mode: str) -> None:
    result = mix(10_000, f"{mode}, tolerance = 0.01", rounds=5, links=LinkOptions(loss=0.1, dead=(Outage(7, 2, 3),)))
    assert result.status == "COMPLETED"
    assert len(result.attempts) < 40
    assert [each.silos for each in exchanges(result)[:4]] == [10_000, 10_000, 9_999, 10_000]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mix(8, ', exchange = "ring"'), "mode.exchange: without training there are no models"),
        (lambda: simulate(links=LinkOptions(dead=(Outage(8, 1, 1),))), "there is no silo 8; expected 0 to 7"),
        (
            lambda: run(Simulation(spec=make_job(), fleet=build_fleet(FleetOptions(num_clients=4), 1))),
            "selection.goal = 8: the simulation has 4 silos, and all take part; expected 4",
        ),
        (
            lambda: run(
                Simulation(
                    spec=msgspec.structs.replace(make_job(), mode=parse_server().mode),
                    fleet=build_fleet(FleetOptions(num_clients=8), 1),
                    links=FAULTS,
                )
            ),
            "simulation.links: clients have no links to each other",
        ),
    ],
    ids=["ring", "silo", "goal", "links"],
)
def test_what_cannot_be_simulated(make: Any, text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        make()


def parse_server() -> Any:
    return parse_job(
        "name = 'g'\npopulation = 'p'\ntrainer = 't'\nrounds = 6\nmodel.initial = 'm:f'\nselection.goal = 8\n"
    )


def test_faults_have_an_order() -> None:
    with pytest.raises(ValueError, match="last = 1: expected at least first, which is 2"):
        Outage(1, 2, 1)
    links = np.array([[0, 1], [1, 0], [1, 2]])
    assert LinkOptions(cuts=(Cut((1, 0), 2, 3),)).is_lost(0, 3, links).tolist() == [True, True, False]
    assert not LinkOptions(cuts=(Cut((1, 0), 2, 3),)).is_lost(0, 4, links).any()
    assert Gossip().weight(3) == 1.0


def test_a_schedule_goes_by_the_round_and_not_by_the_version() -> None:
    assert ClientTask(0, 5, 1).training_round == 6
    assert ClientTask(0, 5, 1, round_number=2).training_round == 2
