"""docs/extending.md: its files run together in one simulation, and it names every kind of plugin."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.cli.app import app
from fedplat.config.plugins import Kind, kinds
from fedplat.errors import JobFileError
from fedplat.simulation.api import simulate
from support.cli.runner import CliRunner

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "extending.md").read_text("utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL))

ENTRY_POINTS = {
    "rules": "lion:Lion",
    "policies": "turns:Turns",
    "codecs": "signs:Signs",
    "partitions": "similar:Similar",
    "algorithms": "moon:Moon",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_its_plugins_learn_to_read_digits(folder: Path) -> None:
    assert all(len(text.splitlines()) <= 60 for text in FILES.values())
    run = simulate(folder / "digits.toml")
    assert run.result.status == "COMPLETED"
    assert run.summary.best is not None
    assert run.summary.best.value > 0.7  # by chance 0.1
    merged = run.result.participation.merged
    assert merged.sum() == 20 * 10
    assert merged.max() - merged.min() <= 1  # clients take turns


def test_an_installed_package_gives_its_plugins_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"rounds": 1, "simulation.engine": "loop"}
    by_path = simulate(folder / "digits.toml", changes)
    package = folder / "package"
    (package / "own-1.0.dist-info").mkdir(parents=True)
    (package / "own-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    text, points = FILES["digits.toml"], ""
    for kind, reference in ENTRY_POINTS.items():
        module, _, name = reference.partition(":")
        assert f'"{module}.py:{name}"' in text
        (folder / f"{module}.py").rename(package / f"{module}.py")
        text = text.replace(f'"{module}.py:{name}"', f'"{module}"')
        points += f"[fedplat.{kind}]\n{module} = {reference}\n"
    (package / "own-1.0.dist-info/entry_points.txt").write_text(points)
    (folder / "digits.toml").write_text(text)
    monkeypatch.syspath_prepend(str(package))
    try:
        by_name = simulate(folder / "digits.toml", changes)
    finally:
        for reference in ENTRY_POINTS.values():
            sys.modules.pop(reference.partition(":")[0], None)
    assert by_path.model is not None
    assert by_name.model == by_path.model


@pytest.mark.parametrize("engine", ["loop", "processes", "auto"])
def test_its_learner_finds_the_means_of_all_data(folder: Path, engine: str) -> None:
    run = simulate(folder / "centroids.toml", {"simulation.engine": engine})
    assert run.result.status == "COMPLETED"
    assert run.model is not None
    assert run.federation is not None
    inputs, targets = run.federation.inputs.reshape(-1, 64), run.federation.targets
    means = np.stack([inputs[targets == label].mean(0) for label in range(10)])
    np.testing.assert_allclose(run.model["sums"] / run.model["counts"][:, None], means, atol=1e-5)
    assert run.summary.best is not None
    assert run.summary.best.value > 0.85


def test_its_fleet_is_online_in_shifts_and_has_its_metrics(folder: Path) -> None:
    run = simulate(folder / "shifts.toml", {"simulation.engine": "loop"})
    assert run.result.status == "COMPLETED"
    assert run.summary.best is not None
    assert run.summary.best.value > 0.7
    assert max(run.result.staleness) > 0
    calibration = run.series("calibration_error").values
    assert calibration.shape == run.series("f1").values.shape == (50,)
    assert (calibration > 0.0).all()
    begin, end = run.file.simulation.fleet.availability.build(30, np.random.default_rng(0)).spells(
        np.arange(30), np.zeros(30)
    )
    assert {*(end - begin)} == {8 * 3600.0}


def test_its_plugins_pass_the_checks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    found: dict[str, Any] = {}
    try:
        exec(compile(FILES["test_own.py"], "test_own.py", "exec"), found)
        found["test_own_algorithms"]()
    finally:
        for name in FILES:
            sys.modules.pop(name.removesuffix(".py"), None)


def test_its_two_halves_go_together(folder: Path) -> None:
    changes = [
        "rounds=2",
        'aggregation={ rule = "halves.py:MeanOfPulled" }',
        'updates={ weighting = "uniform" }',
        'config.algorithm="halves.py:Pull"',
    ]
    assert simulate(folder / "digits.toml", changes).result.status == "COMPLETED"
    with pytest.raises(JobFileError, match=r"algorithm = a name of the class Pull"):
        simulate(folder / "digits.toml", changes[:-1])


def test_its_message_is_the_one_that_is_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = ["simulate", "digits.toml", "--set", "aggregation.learning_rat=0.01"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.output.strip() in PAGE


@pytest.mark.parametrize("kind", kinds().values(), ids=lambda kind: kind.name)
def test_it_has_a_row_for_each_kind(kind: Kind) -> None:
    rows = [line for line in PAGE.splitlines() if f"| `{kind.name}` |" in line]
    assert len(rows) == 1
    if kind.adapt is not None:
        return  # users write a class of another library, and name it by another key
    assert f"| `{kind.key}` |" in rows[0]
    assert all(f"{method}(" in rows[0] for method in kind.methods)
