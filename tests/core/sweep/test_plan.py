"""The configurations of a sweep file, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedplat import sweep
from fedplat.errors import JobFileError
from fedplat.sweep import plan
from fedplat.sweep.plan import SweepOptions
from support.sweeps import BASE, GRID, HALVING, SEARCH, write_sweep


def options(**tables: Any) -> SweepOptions:
    return SweepOptions(base="base.toml", **tables)


def test_a_grid_has_all_combinations() -> None:
    made = plan.expand(options(grid={"config.mu": [0.0, 0.1], "rounds": [1, 2, 3]}))
    assert [(each.number, tuple(each.values.values())) for each in made] == [
        *((1, (0.0, 1)), (2, (0.0, 2)), (3, (0.0, 3))),
        *((4, (0.1, 1)), (5, (0.1, 2)), (6, (0.1, 3))),
    ]


def test_points_and_lists_belong_together_and_are_combined_with_the_grid() -> None:
    given = options(
        points=[{"aggregation.rule": "fedavg"}, {"aggregation.rule": "fedadam"}],
        zip={"config.epochs": [1, 2], "config.batch_size": [10, 20]},
        grid={"rounds": [5, 6]},
    )
    made = [tuple(each.values.values()) for each in plan.expand(given)]
    assert made == [
        *(("fedavg", 1, 10, 5), ("fedavg", 1, 10, 6), ("fedavg", 2, 20, 5), ("fedavg", 2, 20, 6)),
        *(("fedadam", 1, 10, 5), ("fedadam", 1, 10, 6), ("fedadam", 2, 20, 5), ("fedadam", 2, 20, 6)),
    ]
    assert plan.num_configurations(given) == len(made)
    assert plan.keys(given) == ["aggregation.rule", "config.epochs", "config.batch_size", "rounds"]


def test_changes_are_arguments_of_set_and_names_are_short() -> None:
    values = {"config.learning_rate": 1e-05, "simulation.fleet.speed": {"kind": "constant", "value": 5.0}}
    made = plan.Configuration(1, values)
    assert made.changes == [
        "config.learning_rate=1e-05",
        'simulation.fleet.speed={ kind = "constant", value = 5.0 }',
    ]
    assert plan.describe({"a.x": True, "b.x": 1, "c.y": "z"}, plan.short_names(["a.x", "b.x", "c.y"])) == (
        'a.x=true, b.x=1, y="z"'
    )


def test_a_local_algorithm_from_a_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "local.py").write_text(
        "import msgspec\nfrom fedplat.aggregate import LocalAlgorithm\n\n\n"
        "class Plain(msgspec.Struct, frozen=True):\n    def build(self):\n        return LocalAlgorithm()\n"
    )
    base = BASE.replace("epochs = 1\n", 'epochs = 1\nalgorithm = "local.py:Plain"\n')
    assert len(sweep.read(write_sweep(tmp_path, GRID, base)).configurations) == 4


def test_a_learner_without_batches_is_accepted(tmp_path: Path) -> None:
    base = BASE.replace("batch_size = 32\n", "") + (
        '\n[simulation.model]\nlearner = "sklearn"\nestimator = "sklearn.linear_model:SGDClassifier"\n'
        "features = 64\nclasses = 10\n"
    )
    assert len(sweep.read(write_sweep(tmp_path, GRID, base)).configurations) == 4


def test_a_file_and_its_defaults(tmp_path: Path) -> None:
    file = sweep.read(write_sweep(tmp_path))
    assert (file.num_runs, file.seeds, len(file.configurations)) == (8, [0, 1], 4)
    assert (file.objective.metric, file.objective.maximize, file.objective.target) == ("accuracy", True, 0.3)
    # The engine "auto" chooses by measured time, so it would not be reproducible.
    changes = file.changes(file.configurations[1], 7)
    assert changes == ["config.learning_rate=0.003", "config.epochs=3", "simulation.seed=7", "simulation.engine=loop"]
    loss = sweep.read(write_sweep(tmp_path, 'metric = "loss"\n' + GRID))
    assert (loss.objective.maximize, loss.objective.target) == (False, 0.0)
    error = sweep.read(write_sweep(tmp_path, 'metric = "calibration_error"\n' + GRID))
    assert not error.objective.maximize
    named = sweep.read(write_sweep(tmp_path, GRID, BASE.replace("target = 0.3", 'engine = "vmap"')))
    assert named.changes(named.configurations[0])[-1] == "simulation.seed=0"
    search = sweep.read(write_sweep(tmp_path, SEARCH))
    assert (search.num_runs, search.seeds, search.configurations) == (6, [0], [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = 'base.toml'", "sweep.toml: grid: missing; expected a table [grid], [zip] or [search], or tables"),
        ("base = 'base.toml'\n[grid]\nrounds = []", "sweep.toml: grid.rounds = […]: expected"),
        ("base = 'other.toml'\n[grid]\nrounds = [1]", "other.toml: the file cannot be read: No such file"),
        ("base = [", "sweep.toml: the sweep file is not valid TOML"),
        (BASE, 'sweep.toml: this is a job file; expected a sweep file, which names it (base = "sweep.toml")'),
        (GRID + "[gird]", "sweep.toml: gird = {…}: there is no such key; did you mean grid?"),
        (GRID + '"config.learning_rat" = [1.0]', "configuration 1 (learning_rate=0.003, epochs=1, learning_rat=1.0): "),
        (GRID + '"config.learning_rat" = [1.0]', "neither the base file nor local training has this key; did you mean"),
        (GRID + '"selection.gaol" = [1]', "selection.gaol = 1: there is no such key; did you mean goal?"),
        (GRID + '"rounds" = [5, 0]', "configuration 2 (learning_rate=0.003, epochs=1, rounds=0): rounds = 0: expected"),
        (GRID + '"selection.goal" = [5000]', "selection.goal = 5,000: expected at most the"),
        (GRID + '"config.momentum" = [2.0]', "config.momentum = 2.0: expected a number < 1"),
        (GRID + '"simulation.seed" = [1]', 'grid: "simulation.seed": expected the seeds in the list `seeds`'),
        (GRID + '"simulation.engine" = ["ray"]', "expected an engine of one machine; the option --ray"),
        (GRID + '[zip]\nrounds = [1, 2]\n"config.mu" = [0.0]', 'of equal length; "rounds" has 2, "config.mu" has 1'),
        (GRID + '[zip]\n"config.epochs" = [1]', 'grid: "config.epochs" is also in another table'),
        (GRID + "[[points]]\nrounds = 1\n[[points]]\nname = 'a'", "points: expected the same keys in each point"),
        (GRID + '"rounds" = [1, 1]', "configuration 2 (learning_rate=0.003, epochs=1, rounds=1) occurs twice"),
        ("seeds = [1, 1]\n" + GRID.replace("seeds = [0, 1]", ""), "seeds: expected each seed once"),
        ("max_runs = 7\n" + GRID, "8 runs (4 configurations, 2 seeds); expected at most max_runs = 7: use fewer"),
        ("direction = 'up'\n" + GRID, "direction = 'up': expected one of"),
        (GRID + HALVING.replace("[2, 4]", "[4, 2]"), "rounds = [4, 2]: expected rounds in ascending order"),
        (GRID + HALVING.replace("[2, 4]", "[2, 6]"), "stopping.rounds = [2, 6]: expected rounds before the last one"),
        (GRID + HALVING.replace("halving", "half"), "stopping.rule = 'half': expected one of median, halving"),
        (GRID + SEARCH.partition("\n\n")[2], "search: expected no grid, zip or points beside it"),
        (SEARCH.replace("log", "logarithm"), "kind = 'logarithm': expected one of float, log, int, categorical"),
        (SEARCH.replace("high = 1.0", "high = 1e-5"), "low = 0.0001: expected a number below high = 1e-05"),
        (SEARCH.replace("low = 1e-4", "low = 0.0"), "low = 0.0: expected a number > 0"),
        (SEARCH.replace("config.learning_rate", "config.rate"), "config.rate: neither the base file nor"),
        (
            SEARCH.replace('{ kind = "log", low = 1e-4, high = 1.0 }', '{ kind = "int", low = 1, high = 2, step = 5 }'),
            "step = 5: expected at most high - low",
        ),
        (GRID + '"simulation.training" = [true, false]', '"simulation.training": expected the same value'),
    ],
)
def test_mistakes_are_named_before_anything_runs(tmp_path: Path, text: str, words: str) -> None:
    path = write_sweep(tmp_path, text)
    with pytest.raises(JobFileError, match=re.escape(words)) as caught:
        sweep.read(path)
    assert all(line.startswith(str(tmp_path)) for line in str(caught.value).splitlines())


def test_a_schedule_without_training_has_no_metric_but_time(tmp_path: Path) -> None:
    base = BASE.replace("target = 0.3", "training = false")
    grid = 'base = "base.toml"\n[grid]\n"selection.goal" = [2, 5]\n'
    with pytest.raises(JobFileError, match='metric = "accuracy": the base file has training = false'):
        sweep.read(write_sweep(tmp_path, grid, base))
    file = sweep.read(write_sweep(tmp_path, 'metric = "virtual_s"\n' + grid, base))
    assert not file.objective.maximize
