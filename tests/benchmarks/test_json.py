"""`--json` of every program in benchmarks/: the last line of its output is one object, whose keys `--help` names."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mcmahan
import pytest
import typer

import aggregation
import report
import round_overhead
from round_overhead import Setting
from support.cli.runner import CliRunner

KEYS = ["name", "title", "columns", "rows", "notes", "command", "machine", "date"]
PROGRAMS = sorted(
    path.stem for path in Path(report.__file__).parent.glob("*.py") if re.search(r"\bfinish\(", path.read_text())
)


def run(main: Callable[..., None], *arguments: str) -> str:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def check(text: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    found = json.loads(text.splitlines()[-1])
    assert list(found) == [*KEYS, *more]
    assert found["rows"]
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}
    return found


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "report"])
def test_every_program_has_the_option_and_names_the_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    help_text = run(importlib.import_module(name).main, "--help")
    assert "--json" in help_text
    assert all(key in help_text for key in KEYS)


@pytest.mark.slow
def test_the_last_line_is_one_object() -> None:
    found = check(run(aggregation.main, "--parameters", "1000", "--updates", "2", "--json"))
    assert found["name"] == "aggregation"
    assert found["date"]


def test_the_object_of_round_overhead_has_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def deploy(*arguments: object, **options: object) -> Generator[None]:
        yield None

    def measure(deployment: None, setting: Setting, *arguments: object) -> None:
        setting.rounds += [0.030, 0.010, 0.020]
        setting.server_s += [0.001]
        setting.client_s += [0.001]
        for seconds in setting.stages.values():
            seconds += [0.005]

    monkeypatch.setattr(round_overhead, "deploy", deploy)
    monkeypatch.setattr(round_overhead, "measure", measure)
    found = check(run(round_overhead.main, "--json"), ("median_s", "stages"))
    assert found["median_s"] == pytest.approx(0.020)
    assert found["rows"][0][:2] == ["as deployed by default", pytest.approx(20.0)]
    assert list(found["stages"]) == KEYS
    shown = run(round_overhead.main)
    assert "A no-op round" in shown
    assert "Where a no-op round's time goes" in shown


def test_a_table_of_a_paper_is_an_object_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mcmahan").mkdir()
    cell = mcmahan.PAPER.cells[0]
    about = {"cell": cell.name, "seed": 0, "machine": "a machine", "date": "2026-01-02"}
    lines = [about, {"round": 1, "accuracy": 0.5}, {"done": True}]
    (tmp_path / "mcmahan" / f"{cell.name}-seed0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert mcmahan.main(mcmahan.PAPER, ["--results", str(tmp_path), "--only", cell.name, "--json"]) == 0
    found = check(capsys.readouterr().out)
    assert (found["machine"], found["date"]) == ("a machine", "2026-01-02")


def test_nan_and_none_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    made = report.Report(name="copy", title="Copies", columns=("GB/s",), rows=((float("nan"),), (None,)))
    report.finish(made, as_json=True, save=False)
    assert json.loads(capsys.readouterr().out)["rows"] == [[None], [None]]
