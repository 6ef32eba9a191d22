"""docs/operations.md has all metrics and alerts, and its configuration of Prometheus is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fedplat_server import metrics
from fedplat_server.instruments import METRICS, Instruments
from fedplat_server.metrics.collector import DaemonCollector
from fedplat_server.metrics.job_series import JobSeriesTable
from support import metrics_page
from support.commands import here
from support.scrapes import promtool
from support.selection import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")


def test_the_page_has_every_metric() -> None:
    assert metrics_page.update(PAGE) == PAGE, "run make metrics-page"
    assert PAGE.count("| `grpc_server_call_duration_seconds` |") == 1


def test_the_page_has_every_alert() -> None:
    rules = yaml.safe_load((Path(metrics.__path__[0]) / "grafana/fedplat.rules.yml").read_text())
    assert re.findall(r"^\| `(Fedplat\w+)` \|", PAGE, re.MULTILINE) == [
        rule["alert"] for rule in rules["groups"][0]["rules"]
    ]


def test_every_metric_of_the_catalogue_is_served() -> None:
    instruments = Instruments()
    table = JobSeriesTable(instruments, (), lambda: 0.0)
    served = {family.name for family in DaemonCollector(instruments, table, None, lambda: 0).describe()}
    recorded = {family.name for family in instruments.registry.collect()}
    assert recorded <= served
    assert {name.removesuffix("_total") for name in METRICS} == served


def test_the_configuration_of_prometheus_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = re.findall(r"<!-- file: prometheus.yml -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(text)
    assert here(monkeypatch, capsys, "metrics", "rules", "--to", str(tmp_path / "fedplat.rules.yml"))[0] == 0
    assert "SUCCESS: 1 rule files found" in promtool("check", "config", tmp_path / "prometheus.yml")
