"""The output folder: it continues only the same sweep, and its results do not depend on the order of the runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fedplat import __version__, sweep
from fedplat.errors import DataError
from fedplat.simulation import simulate
from fedplat.sweep import SweepFile, SweepResult, runner
from fedplat.sweep.result import open_folder
from fedplat.sweep.runner import WorkerOptions
from fedplat.sweep.worker import OUTCOME, PartRequest
from support.sweeps import BASE, GRID, HALVING, FakePool, outcome, write_sweep


def run(path: Path) -> SweepResult:
    return sweep.run(path, path.parent / "out")


def test_only_missing_runs_are_requested_the_longest_first(tmp_path: Path, pool: FakePool) -> None:
    path = write_sweep(tmp_path)
    result = run(path)
    epochs = ["config.epochs=3" in request.changes for request in pool.requests]
    assert epochs == [True] * 4 + [False] * 4
    assert [(row.number, row.rank) for row in result.rows] == [(4, 1), (3, 2), (2, 3), (1, 4)]
    before = {name: (tmp_path / "out" / name).read_bytes() for name in ("results.json", "sweep.csv", "best.toml")}
    pool.requests.clear()
    (tmp_path / "out/runs/0002-seed1" / OUTCOME).unlink()
    run(path)
    assert [request.folder for request in pool.requests] == ["0002-seed1"]
    assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before


def test_stopped_runs_are_reported_as_done(tmp_path: Path, pool: FakePool) -> None:
    seen: list[tuple[int, bool]] = []
    sweep.run(
        write_sweep(tmp_path, GRID + HALVING),
        tmp_path / "out",
        observe=lambda progress: seen.append((progress.num_done, progress.is_done)),
    )
    assert [request.until for request in pool.requests] == [2] * 8 + [4] * 4 + [0] * 2
    assert [done for done, _ in seen] == [0] * 8 + [4] * 4 + [7, 8]


def test_the_table_and_the_best_file(tmp_path: Path, pool: FakePool) -> None:
    result = run(write_sweep(tmp_path, GRID.replace("epochs", "momentum").replace("[1, 3]", "[0.0, 0.5]")))
    lines = result.to_csv().splitlines()
    assert lines[0] == (
        "rank,number,config.learning_rate,config.momentum,status,stopped_after,score,low,high,num_reached,"
        "target_rounds,target_s,seed 0,seed 1"
    )
    assert lines[1].startswith("1,4,1.0,0.5,COMPLETED,0,0.2405,")
    best = (tmp_path / "out/best.toml").read_text()
    assert best.splitlines()[0] == (
        "# The best configuration of sweep.toml: learning_rate=1.0, momentum=0.5 (accuracy 0.2405, 2 seeds)"
    )
    expected = BASE.replace("learning_rate = 0.3 # of SGD", "learning_rate = 1.0 # of SGD\nmomentum = 0.5")
    assert best.partition("\n")[2] == expected
    numbers = json.loads((tmp_path / "out/results.json").read_text())
    assert numbers["best"] == 4
    assert [row["rank"] for row in numbers["rows"]] == [1, 2, 3, 4]


def test_the_best_file_finds_the_files_of_the_base_file(tmp_path: Path, pool: FakePool) -> None:
    (tmp_path / "own.py").write_text("from torch.nn.functional import cross_entropy as loss\n")
    (tmp_path / "devices.csv").write_text("speed\n10\n20\n")
    more = '[simulation.model]\nloss = "own:loss"\n[simulation.fleet]\ntrace = "devices.csv"\n'
    result = run(write_sweep(tmp_path, GRID, BASE.replace("rounds = 6", "rounds = 1") + more))
    best = tmp_path / "out/best.toml"
    assert f'loss = "{tmp_path / "own.py"}:loss"' in best.read_text()
    assert f'trace = "{tmp_path / "devices.csv"}"' in best.read_text()
    assert not result.needs_base_folder
    assert simulate(best, {"simulation.engine": "loop"}).result.status == "COMPLETED"


def test_the_best_file_names_the_folder_that_it_needs(tmp_path: Path, pool: FakePool) -> None:
    (tmp_path / "own.py").write_text("from fedplat.pytorch.models import digits_2nn\n")
    base = BASE.replace("fedplat.pytorch.models:digits_2nn", "own:digits_2nn").replace("rounds = 6", "rounds = 1")
    assert run(write_sweep(tmp_path, GRID, base)).needs_base_folder
    best = tmp_path / "out/best.toml"
    assert best.read_text().splitlines()[1] == f"# Its modules are in {tmp_path}: run it there."
    best.rename(tmp_path / "best.toml")
    assert simulate(tmp_path / "best.toml", {"simulation.engine": "loop"}).result.status == "COMPLETED"


def test_without_a_finite_score_there_is_no_best_file(tmp_path: Path, pool: FakePool) -> None:
    def write(request: PartRequest) -> None:
        folder = tmp_path / "out/runs" / request.folder
        folder.mkdir(parents=True)
        (folder / OUTCOME).write_bytes(msgspec.json.encode(outcome([None])))

    pool.write = write
    result = run(write_sweep(tmp_path))
    assert result.best is None
    assert not (tmp_path / "out/best.toml").exists()
    assert result.to_dict()["best"] is None


OTHER: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda folder: write_sweep(folder, GRID.replace("[0, 1]", "[0, 2]")),
        "has seeds = [0, 1], and this file [0, 2]; continue with the same sweep file",
    ),
    (
        lambda folder: write_sweep(folder, GRID, BASE.replace("batch_size = 32", "batch_size = 16")),
        "has the base file's config.batch_size = 32, and this one 16; continue with the same base file",
    ),
    (
        lambda folder: write_sweep(folder, GRID, BASE.replace('"digits"\n\n', '"digits"\ntest_fraction = 0.1\n\n')),
        "has the base file's simulation.data.test_fraction = nothing, and this one 0.1",
    ),
    (
        lambda folder: _edit(folder, "versions", {"fedplat": "0.0.1"}),
        f"was computed with fedplat 0.0.1, and this is {__version__}; continue with the same version",
    ),
    (
        lambda folder: _edit(folder, "plugins", {"lion.py:Lion": "1" * 64}),
        "used another file of the plugin 'lion.py:Lion'; continue with the same plugins",
    ),
]


def _edit(folder: Path, part: str, values: dict[str, str]) -> None:
    path = folder / "out/sweep.json"
    inputs = json.loads(path.read_text())
    inputs[part] |= values
    path.write_text(json.dumps(inputs))


@pytest.mark.parametrize(("change", "words"), OTHER)
def test_a_folder_continues_only_the_same_sweep(
    tmp_path: Path, pool: FakePool, change: Callable[[Path], object], words: str
) -> None:
    path = write_sweep(tmp_path)
    run(path)
    change(tmp_path)
    with pytest.raises(DataError, match=re.escape(f"the sweep in {tmp_path / 'out'} {words}")):
        run(path)


def test_comments_and_limits_may_change(tmp_path: Path, pool: FakePool) -> None:
    run(write_sweep(tmp_path))
    run(write_sweep(tmp_path, "# more\nmax_runs = 8\n" + GRID, "# other\n" + BASE))


def test_a_sweep_that_failed_at_once_is_corrected_in_the_same_folder(tmp_path: Path, pool: FakePool) -> None:
    def fail(request: PartRequest) -> None:
        (tmp_path / "out/runs" / request.folder).mkdir(parents=True)
        raise DataError("no data")

    write, pool.write = pool.write, fail
    with pytest.raises(DataError, match="no data"):
        run(write_sweep(tmp_path, 'metric = "acuracy"\n' + GRID))
    pool.write = write
    assert len(run(write_sweep(tmp_path)).rows) == 4


def test_the_runs_of_another_program_stay(tmp_path: Path, pool: FakePool) -> None:
    """TensorBoard's examples write to `runs`."""
    events = tmp_path / "out" / "runs" / "first" / "events.out.tfevents.1"
    events.parent.mkdir(parents=True)
    events.write_bytes(b"weeks of training")
    with pytest.raises(DataError, match=r"runs has files that belong to no sweep.*--dir"):
        run(write_sweep(tmp_path))
    assert events.read_bytes() == b"weeks of training"


def test_two_sweeps_cannot_use_a_folder_at_the_same_time(tmp_path: Path, pool: FakePool) -> None:
    path = write_sweep(tmp_path)
    file: SweepFile = sweep.read(path)
    with open_folder(tmp_path / "out", file), pytest.raises(DataError, match="another process computes the sweep in"):
        runner.compute(file, tmp_path / "out", WorkerOptions(), lambda progress: None)
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="taken cannot be written: File exists"):
        sweep.run(path, tmp_path / "taken")


def test_a_damaged_outcome_is_named(tmp_path: Path, pool: FakePool) -> None:
    path = write_sweep(tmp_path)
    run(path)
    (tmp_path / "out/runs/0001-seed0" / OUTCOME).write_text("{}")
    with pytest.raises(DataError, match=r"0001-seed0/outcome.json cannot be read: .*; remove its folder"):
        run(path)
