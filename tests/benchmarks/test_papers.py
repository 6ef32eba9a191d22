"""Programs that run the tables of papers: how they count, what they keep, and their page."""

from __future__ import annotations

import dataclasses
import importlib
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import reproduction
import reproductions_page
import workers
from reproduction import Log, Observe, Paper, format_gains, read_log, rounds_to, run_cell
from workers import Workers

from fedplat.simulation import RunFolderOptions
from fedplat.simulation.data import sources
from fedplat.simulation.data.sources import SourcePaths
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.scenario.file import SimulationFile

PAPERS: list[Paper] = [importlib.import_module(name).PAPER for name in reproductions_page.PAPERS]
every_paper = pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data in the shape of MNIST: ten pictures with some noise."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (10, 28, 28))
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
    for part, count in (("train", 1000), ("test", 100)):
        labels = rng.integers(0, 10, count)
        arrays[f"x_{part}"] = (0.8 * pictures[labels] + rng.integers(0, 50, (count, 28, 28))).astype(np.uint8)
        arrays[f"y_{part}"] = labels.astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", **arrays)  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("accuracies", "rounds"),
    [
        ([50.0, 80.0, 100.0], 2.5),
        ([50.0, 90.0], 2.0),
        ([80.0, 40.0, 100.0], 2.5),  # the maximum so far counts, not the last value
        ([95.0], 1.0),
        ([89.9, 10.0], None),
        ([], None),
    ],
)
def test_rounds_to_a_target_are_interpolated_on_the_running_maximum(accuracies: Sequence[float], rounds: float | None):
    assert rounds_to(accuracies, 90.0) == rounds


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({0: 61.0, 1: 73.0}, "+2.00 ± 1.41"),
        ({1: 71.5}, "+1.50"),  # beside the run with the same seed, not the mean of both
        ({0: 59.5}, "-0.50"),
        ({2: 65.0}, "not run"),
        ({}, "not run"),
    ],
)
def test_gains_are_those_over_runs_with_the_same_seed(values: dict[int, float], text: str):
    assert format_gains(values, {0: 60.0, 1: 70.0}) == text


@every_paper
def test_every_cell_is_a_simulation_file(paper: Paper):
    assert len({cell.name for cell in paper.cells}) == len(paper.cells)
    for cell in paper.cells:
        assert cell.file("simulation.seed=3").simulation.seed == 3
        assert cell.file(quick=True).job.rounds <= 3


@every_paper
def test_tables_have_a_row_for_what_was_run_and_what_was_not(paper: Paper):
    counts = {"merged": 2, "bytes_up": 200.0}
    lines = [{"round": number, "accuracy": number / 200, "loss": 2.0, **counts} for number in range(1, 200)]
    evaluations = [{"evaluation": 199, "clients": 2, "metrics": {"loss": 2.0}}]
    about = {"date": "2026-01-02"}
    logs = [
        Log(cell=cell.name, seed=0, about=about, rounds=lines, done=True, evaluations=evaluations)
        for cell in paper.cells
    ]
    empty, full = paper.rows([]), paper.rows(logs)
    assert len(empty) == len(full) > 0
    assert all(len(row) == len(paper.columns) for row in (*empty, *full))
    assert all("not run" in row for row in empty)
    assert not any("not run" in row for row in full)
    assert reproduction.table(paper, logs).date == "2026-01-02"


@pytest.mark.parametrize("page", reproductions_page.PAGES, ids=lambda page: page.name)
def test_the_pages_show_the_kept_logs(page: Path):
    text = page.read_text("utf-8")
    assert reproductions_page.filled(text) == text, "run make papers-page"
    assert all(f"<!-- paper: {name} -->" in text for name in reproductions_page.PAGES[page])


def test_a_cell_leaves_a_whole_log_and_is_not_run_again(mnist: Path, capsys: pytest.CaptureFixture[str]):
    paper = PAPERS[0]
    cell = paper.cells[0]
    path = mnist / "results" / paper.name / f"{cell.name}-seed0.jsonl"
    assert run_cell(paper, cell, 0, path, True) == ""
    log = read_log(path)
    assert (log.cell, log.done, len(log.accuracies)) == (cell.name, True, 2)
    assert [line["merged"] for line in log.rounds] == [2, 2]
    assert not list((mnist / "runs").rglob("*.json*")), "what only a stopped run needs is gone"
    assert reproduction.main(paper, ["--only", cell.name, "--results", str(mnist / "results")]) == 0
    assert "never" in capsys.readouterr().out
    whole = path.read_bytes()
    path.write_text(path.read_text("utf-8").rstrip("\n").rpartition("\n")[0] + '\n{"rou', encoding="utf-8")
    assert not read_log(path).done, "it was stopped, in the middle of a line"
    assert run_cell(paper, cell, 0, path, True) == ""
    assert path.read_bytes() == whole


def test_who_has_no_data_is_told_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    for paper in PAPERS:
        failure = run_cell(paper, paper.cells[0], 0, tmp_path / "log.jsonl", True)
        assert re.search(r"(mnist.npz|tinyshakespeare.txt) is not in", failure)
        assert "FEDPLAT_DATA" in failure


def test_a_run_ends_at_its_target(mnist: Path):
    cell = dataclasses.replace(PAPERS[0].cells[0], target=0.1)
    run_cell(PAPERS[0], cell, 0, mnist / "log.jsonl", False)
    log = read_log(mnist / "log.jsonl")
    assert (len(log.rounds), log.done) == (1, True)


# The first square roots of a process that several threads compute are sometimes wrong by 3e-4 (Intel MKL 2024.2).
@pytest.mark.parametrize("attack", ["alie", "bit-flip", "ipm"])
def test_attackers_report_what_the_attack_says(mnist: Path, attack: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "BATCH_SIZE", 2)
    data = sources.Mnist().load(SourcePaths(mnist, mnist, np.random.default_rng(0)))
    engine = Workers(data, 3, 1, attack, 0.9, seed=1)
    engine.publish(0, engine.initial)
    works = [ClientTask(client, 0, 0) for client in range(4)]
    updates = np.array([engine.result(work).update.to_vector() for work in works])
    good, bad = updates[:3], updates[3]
    if attack == "ipm":
        np.testing.assert_allclose(bad, -0.1 * good.mean(0), atol=1e-6)
    elif attack == "alie":
        # 4 workers: 2 supporters are needed, and 1 of 3 good ones may be out of range.
        z = statistics.NormalDist().inv_cdf(1 / 3)
        np.testing.assert_allclose(bad, good.mean(0) + z * good.std(0, ddof=1), atol=1e-5)
    else:
        assert float(bad @ good.mean(0)) < 0
    other = Workers(data, 3, 1, attack, 0.9, seed=1)
    other.set_client_states(engine.client_states())
    for each in (engine, other):
        each.publish(1, engine.initial)
    second = [each.result(ClientTask(0, 1, 0)).update.to_vector() for each in (engine, other)]
    assert second[0].tobytes() == second[1].tobytes() != good[0].tobytes()


def test_a_stopped_cell_resumes(mnist: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reproduction, "CHECKPOINT_S", 0.0)
    paper, resumed = PAPERS[0], list[bool]()
    cell = dataclasses.replace(paper.cells[0], quick=("rounds=3", "selection.goal=2"))
    whole, log = mnist / "whole.jsonl", mnist / "log.jsonl"

    def stopped_after_two(file: SimulationFile, observe: Observe, run_folder: RunFolderOptions) -> None:
        def stop(record: AttemptResult) -> None:
            observe(record)
            if record.round == 2:
                raise KeyboardInterrupt

        resumed.append(run_folder.resume)
        reproduction.play(file, observe if run_folder.resume else stop, run_folder)

    run_cell(paper, cell, 0, whole, True)
    stopping = dataclasses.replace(paper, play=stopped_after_two)
    with pytest.raises(KeyboardInterrupt):
        run_cell(stopping, cell, 0, log, True)
    assert not read_log(log).done
    assert run_cell(stopping, cell, 0, log, True) == ""
    assert resumed == [False, True]
    assert log.read_bytes() == whole.read_bytes()
