"""Noise that clients add costs less than a point of accuracy, compared with noise of the server at the same epsilon.

On MNIST, divided among 3,383 users, of whom 300 take part in each round; all sums have Skellam noise.
"""

from __future__ import annotations

import statistics

import distributed_noise as experiment
import pytest
from reproduction import read_logs

from fedplat.errors import DataError
from fedplat.simulation import Run, SimulationFile, simulate

EPSILON, MAX_LOSS = 8.0, 1.0
KINDS = (experiment.CLIENTS, experiment.DROP_OUTS)


def test_the_kept_logs_are_within_a_point_of_the_server_s_noise() -> None:
    logs = read_logs(experiment.PAPER)
    settings = {cell.name: cell.settings for cell in experiment.PAPER.cells}
    assert {log.cell for log in logs} == settings.keys()
    for log in logs:
        assert log.about["settings"] == settings[log.cell], "the log is of other settings: run the program --again"
        assert len(log.accuracies) == experiment.ROUNDS
    seeds = {kind: [log.seed for log in logs if log.cell == experiment.cell_name(kind, EPSILON)] for kind in KINDS}
    central = experiment.accuracies(logs, experiment.SERVER, EPSILON)
    for kind in KINDS:
        assert len(seeds[kind]) == len(central) >= 2
        assert statistics.mean(central) - statistics.mean(experiment.accuracies(logs, kind, EPSILON)) <= MAX_LOSS


def small(kind: str) -> SimulationFile:
    """The same with a model that trains in seconds, whose accuracy hardly depends on the draws."""
    changes = ("model.initial=fedplat.pytorch.models:logistic_regression", "simulation.engine=vmap")
    return experiment.make_cell(kind, EPSILON).file(*changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_model_is_within_a_point_of_the_server_s_noise() -> None:
    found: dict[str, Run] = {}
    for kind in experiment.KINDS:
        try:
            found[kind] = simulate(small(kind))
        except DataError as exc:
            pytest.skip(str(exc))
    accuracies = {kind: 100.0 * run.result.rounds[-1].evaluation["accuracy"] for kind, run in found.items()}
    assert accuracies[experiment.SERVER] > 80.0
    for kind in KINDS:
        assert accuracies[experiment.SERVER] - accuracies[kind] <= MAX_LOSS
    for run in found.values():
        assert run.privacy is not None
        assert 0.9 * EPSILON < run.privacy.epsilon <= EPSILON
    survivors = [record.num_updates for record in found[experiment.DROP_OUTS].result.rounds]
    assert all(270 <= count < 300 for count in survivors)
