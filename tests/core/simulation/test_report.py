"""Pictures, event files and texts of a run."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat.errors import DataError, MissingExtraError
from fedplat.simulation.data import Dataset, Federation, deal, partitioners
from fedplat.simulation.recording import folder
from fedplat.simulation.report import data, plots
from fedplat.simulation.report.summary import summarize
from fedplat.simulation.run_folder import metrics_of
from support.simulation.runs import attempt, result

PNG = b"\x89PNG\r\n"


def federation(num_clients: int = 4) -> Federation:
    targets = np.arange(80) % 4
    dataset = Dataset.from_arrays(np.zeros((80, 1), np.float32), targets)
    return deal(dataset, partitioners.Classes(clients=num_clients, classes_per_client=1), 0)


def test_pictures(tmp_path: Path) -> None:
    stale = attempt(2, {"accuracy": 0.6}, counts={"MERGED": 3, "LATE": 1, "SURPLUS": 2}, staleness={0: 1, 2: 2})
    made = result(attempt(1, {"accuracy": 0.5}, counts={"MERGED": 1}), stale)
    made = dataclasses.replace(made, staleness={0: 2, 2: 2})
    drawn = plots.draw(made, summarize(made, target=0.55), tmp_path / "new", federation())
    assert {path.name for path in drawn} == {
        "accuracy.png",
        "time.png",
        "participation.png",
        "staleness.png",
        "data.png",
    }
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    made = result(attempt(1, {}))
    assert {path.name for path in plots.draw(made, summarize(made), tmp_path)} == {"time.png", "participation.png"}


def test_pictures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = result(attempt(1, {}))
    with pytest.raises(MissingExtraError, match=r"pip install 'matplotlib>="):
        plots.draw(made, summarize(made), tmp_path)


def test_who_has_which_data() -> None:
    found = data.facts(federation())
    assert found["clients"] == found["labels"] == 4
    assert found["smallest"] == found["largest"] == 20
    assert found["labels_per_client"] == 1.0
    assert found["skew"] == pytest.approx(0.75)  # each client's one label is a quarter of all
    text = data.lines(federation(), 80)
    assert text[0].startswith("4 clients with 20 to 20 examples (median 20), 80 in all; 0 are unused, 0 held out")
    assert text[2:6] == ["     0  █   ", "     1   █  ", "     2    █ ", "     3     █"]
    assert "2 of the clients" in data.lines(federation(), 10)[-1]
    values = Dataset.from_arrays(np.zeros((8, 1), np.float32), np.linspace(0, 1, 8, dtype=np.float32))
    assert len(data.lines(deal(values, partitioners.Iid(clients=2), 0), 80)) == 1


def test_the_metrics_of_a_round_have_virtual_times() -> None:
    trained = attempt(
        1, {"accuracy": 0.5}, metrics={"loss": 2.0}, counts={"MERGED": 3}, staleness={0: 1, 1: 3}, bytes_up=8.0
    )
    metrics = metrics_of(trained)
    assert metrics is not None
    assert (metrics.round, metrics.time_s) == (1, 10.0)
    assert metrics.values == {
        "held_out/accuracy": 0.5,
        "clients/loss": 2.0,
        "round/virtual_seconds": 10.0,
        "round/attempts": 1.0,
        "round/bytes_down": 0.0,
        "round/bytes_up": 8.0,
        "round/merged": 3.0,
        "round/staleness": 0.75,
    }
    evaluated = metrics_of(attempt(1, {}, kind="EVALUATE", metrics={"loss": 3.0}, counts={"MERGED": 3}))
    assert evaluated is not None
    assert evaluated.values == {"evaluation/loss": 3.0}  # not a second value of clients/loss in this round
    assert metrics_of(attempt(2, {"accuracy": 0.9}, phase="ABANDONED")) is None


def test_lines_are_attempts(tmp_path: Path) -> None:
    for _ in range(2):  # a resumed run writes them again
        with folder.Lines(tmp_path) as lines:
            lines.add(attempt(1, {"loss": float("nan")}))
            lines.add(attempt(2, {"loss": 1.0}, staleness={2: 1}))
    rows = [json.loads(line) for line in (tmp_path / folder.ROUNDS).read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[0]["evaluation"] == {"loss": None}
    assert rows[1]["staleness"] == {"2": 1}


def test_folders_are_counted(tmp_path: Path) -> None:
    default = tmp_path / "runs" / "digits"
    for number in (1, 2, 3):
        free = folder.free(default)
        assert free.name == ("digits" if number == 1 else f"digits-{number}")
        folder.begin(free, {})
        assert folder.latest(default) == free
    with pytest.raises(DataError, match="has a run already"):
        folder.begin(default, {})
    (tmp_path / "file").write_text("")
    assert folder.latest(tmp_path / "none") == tmp_path / "none"
    with pytest.raises(DataError, match="cannot be written"):
        folder.begin(tmp_path / "file" / "run", {})


def test_a_run_goes_on_with_the_same_file_wherever_it_is_computed(tmp_path: Path) -> None:
    given = {"simulation": {"rounds": 3, "simulation": {"seed": 1, "engine": "loop", "data": {"source": "digits"}}}}
    with pytest.raises(DataError, match="there is no run to resume in"):
        folder.resume(tmp_path / "run", given)
    folder.begin(tmp_path / "run", given)
    folder.resume(tmp_path / "run", given)
    table = given["simulation"]["simulation"]
    assert isinstance(table, dict)
    table["engine"] = "processes"
    folder.resume(tmp_path / "run", given)
    table["seed"] = 2
    with pytest.raises(DataError, match=r"has simulation.seed = 1, and this one 2; resume with the same file"):
        folder.resume(tmp_path / "run", given)
    (tmp_path / "run" / folder.RUN).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        folder.resume(tmp_path / "run", given)


@pytest.mark.parametrize("name", ["model.safetensors", "journal"])
def test_a_run_replaces_no_files_of_others(tmp_path: Path, name: str) -> None:
    """`--output .` in the folder of the initial model; or a run whose run.json was lost, and its checkpoints."""
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=f"has {name} and no run.json"):
        folder.begin(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == [name]
