"""The Grafana dashboard, and the commands that print the shipped files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedplat_server import metrics
from fedplat_server.instruments import METRICS
from support.boards import BOARD, expressions, panels
from support.commands import here


def test_every_panel_is_described_and_has_the_data_source_of_the_variable() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert BOARD["templating"]["list"][0]["type"] == "datasource"
    assert [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"] == [
        "Overview",
        "Rounds",
        "Server health",
        "Privacy",
    ]
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == source
        assert all(target["datasource"] == source for target in panel["targets"])


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        covered = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert max(columns) < 24
        assert not covered & cells, panel["title"]
        cells |= covered


def test_every_metric_is_on_the_board() -> None:
    shown = set(re.findall(r"\b(?:fedplat|grpc)_\w+", " ".join(expressions())))
    suffix = re.compile(r"_(?:bucket|count|sum)$")
    names = {name if name in METRICS else suffix.sub("", name) for name in shown}
    assert names - METRICS.keys() == {"grpc_status", "grpc_method"}
    assert METRICS.keys() - names == {"fedplat_job_idle_since_timestamp_seconds"}  # for an alert


def test_the_commands_print_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, name in (("grafana", "fedplat.json"), ("rules", "fedplat.rules.yml")):
        content = (Path(metrics.__path__[0]) / "grafana" / name).read_text()
        assert here(monkeypatch, capsys, "metrics", command) == (0, content, "")
        assert here(monkeypatch, capsys, "metrics", command, "--to", str(tmp_path / name)) == (0, "", "")
        assert (tmp_path / name).read_text() == content
        status, _, err = here(monkeypatch, capsys, "metrics", command, "--to", str(tmp_path / "no" / name))
        assert (status, err.count("\n")) == (2, 1)
        assert "the file cannot be written: No such file or directory" in err


def test_the_board_is_as_grafana_writes_it() -> None:
    path = Path(metrics.__path__[0]) / "grafana/fedplat.json"
    assert path.read_text() == json.dumps(BOARD, indent=2) + "\n"
