"""The alert rules: each alert fires when it should, and stays silent otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from fedplat.cli.app import app
from fedplat_server import metrics
from fedplat_server.cli.commands import app as server
from fedplat_server.instruments import METRICS
from support.cli.runner import CliRunner
from support.scrapes import promtool

RULES = Path(metrics.__path__[0]) / "grafana/fedplat.rules.yml"
JOB = 'job_id="j-1",job_name="digits"'
DAYS = 86_400
GROUPS = ("certificates", "client", "job", "privacy")
"""Commands that have commands."""


class Case(NamedTuple):
    """Time series by minute with which an alert fires at some minute, and ones with which it does not."""

    alert: str
    minute: int
    labels: str
    fires: dict[str, str]
    silent: list[dict[str, str]]


def budget(committed: float, budget: float) -> dict[str, str]:
    return {
        'fedplat_privacy_epsilon_committed{population="demo"}': f"{committed}x30",
        'fedplat_privacy_epsilon_budget{population="demo"}': f"{budget}x30",
    }


def idle(since: str, usual_s: float) -> dict[str, str]:
    """A running job, in a time that begins at 0."""
    return {
        f"fedplat_job_idle_since_timestamp_seconds{{{JOB}}}": since,
        f"fedplat_job_usual_round_seconds{{{JOB}}}": f"{usual_s}x60",
    }


def outcomes(late: int, merged: int) -> dict[str, str]:
    """So many more of each in a minute."""
    return {
        f'fedplat_assignments_total{{{JOB},outcome="late"}}': f"0+{late}x60",
        f'fedplat_assignments_total{{{JOB},outcome="merged"}}': f"0+{merged}x60",
    }


def available(clients: str, goal: int) -> dict[str, str]:
    return {
        f"fedplat_job_clients_available{{{JOB}}}": clients,
        f"fedplat_job_clients_goal{{{JOB}}}": f"{goal}x60",
    }


def deliveries(delivered: str, failed: str) -> dict[str, str]:
    name = "fedplat_webhook_deliveries_total"
    return {
        f'{name}{{job="fedplat",instance="a",result="delivered"}}': delivered,
        f'{name}{{job="fedplat",instance="a",result="failed"}}': failed,
    }


LEADERS = ('fedplat_leader{job="fedplat",instance="a"}', 'fedplat_leader{job="fedplat",instance="b"}')
CERTIFICATE = 'fedplat_certificate_expiry_timestamp_seconds{instance="a"}'
FULL = 'fedplat_storage_full_total{instance="a",place="models"}'
CASES = [
    Case(
        "FedplatNoLeader",
        10,
        'job="fedplat"',
        {LEADERS[0]: "0x30", LEADERS[1]: "1x5 0x30"},
        [{LEADERS[0]: "0x30", LEADERS[1]: "1x30"}, {LEADERS[0]: "1x9 0x1 1x30"}],
    ),
    Case("FedplatNoLeader", 10, "", {}, []),
    Case(
        "FedplatNoCommit",
        30,
        JOB,
        idle("0x60", 300),
        [idle("0x60", 900), idle("0+60x60", 10), {f"fedplat_job_usual_round_seconds{{{JOB}}}": "10x60"}],
    ),
    Case(
        "FedplatTooFewClients",
        25,
        JOB,
        available("9x60", 10),
        [available("10x60", 10), available("0x8 12x1 0x8 12x1 0x8", 10), available("12x18 0x20", 10)],
    ),
    Case(
        "FedplatManyLateClients",
        40,
        JOB,
        outcomes(4, 6),
        [outcomes(2, 8), outcomes(0, 0), outcomes(0, 5)],
    ),
    Case("FedplatPrivacyBudgetNearlyUsed", 10, 'population="demo"', budget(3.7, 4.0), [budget(3.5, 4.0)]),
    Case(
        "FedplatCertificateExpiresSoon",
        10,
        'instance="a"',
        {CERTIFICATE: f"{13 * DAYS}x30"},
        [{CERTIFICATE: f"{15 * DAYS}x30"}],
    ),
    Case(
        "FedplatStorageFull",
        10,
        'instance="a",place="models"',
        {FULL: "0x5 1x30"},
        [{FULL: "5x30"}],
    ),
    Case(
        "FedplatWebhookFailing",
        25,
        'job="fedplat",instance="a"',
        deliveries("7x60", "0+1x60"),
        [deliveries("0+1x60", "0+1x60"), deliveries("7x60", "3x60")],
    ),
]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def test_the_rules_are_valid() -> None:
    assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "rules", RULES)


def test_every_alert_fires_and_stays_silent(tmp_path: Path) -> None:
    assert {case.alert for case in CASES} == {rule["alert"] for rule in rules()}
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    tests: list[dict[str, Any]] = []
    for case in CASES:
        firing = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
        labels = ",".join(filter(None, [case.labels, f'severity="{severities[case.alert]}"']))
        sample = {"labels": f"{firing[:-1]},{labels}}}", "value": 1}
        for series, expected in [(case.fires, [sample]), *((silent, []) for silent in case.silent)]:
            query = {"expr": firing, "eval_time": f"{case.minute}m", "exp_samples": expected}
            inputs = [{"series": name, "values": values} for name, values in series.items()]
            tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": [query]})
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", path)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    summary, description = (rule["annotations"][name] for name in ("summary", "description"))
    assert summary.endswith(".")
    assert len(summary) <= 100
    assert description.endswith(".")
    programs = {"fedplat": app, "fedplat-server": server}
    for program, *words in re.findall(r"\b(fedplat(?:-server)?) ([a-z]+)(?: ([a-z]+))?", description):
        names = words if words[0] in GROUPS else words[:1]  # else the second word is part of the sentence
        assert CliRunner().invoke(programs[program], [*names, "--help"]).exit_code == 0, (program, *names)


def test_alerts_use_metrics_of_the_catalogue() -> None:
    for rule in rules():
        names = set(re.findall(r"fedplat_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= METRICS.keys()
