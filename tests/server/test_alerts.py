"""Which conditions raise an alert, and what operators are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from fedplat.rounds.states import JobStatus
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination import alert_monitor, alerts
from fedplat_server.coordination.alerts import (
    AlertBook,
    JobFacts,
    RoundFacts,
    ServerFacts,
    Spent,
    StoreFacts,
    WebhookFacts,
)
from fedplat_server.records.events import Alert, Severity
from support import daemons
from support.daemons import Site, initial_model, until, update_of
from support.jobs import job_file
from support.silo_clients import gossip_job

pytestmark = pytest.mark.calm
GIB = 2**30
HEALTHY = JobFacts(
    "j-1",
    "digits",
    "demo",
    JobStatus.RUNNING,
    needed=10,
    num_connected=20,
    num_available=15,
    idle_s=50.0,
    longest_s=960.0,
    rounds=[RoundFacts(40.0, 13, 1)] * 5,
)
SLOW = [RoundFacts(200.0, 10, 0)] * 5


def of(**changes: Any) -> JobFacts:
    return dataclasses.replace(HEALTHY, **changes)


JOBS: dict[str, tuple[JobFacts, dict[str, tuple[Severity, str]]]] = {
    "healthy": (HEALTHY, {}),
    "idle, but not for 5 min": (of(idle_s=299.0), {}),
    "stalled": (
        of(idle_s=301.0, reason="3 of at least 8 needed clients reported"),
        {
            "job_stalled": (
                Severity.CRITICAL,
                "Job digits has committed no round for 5 min 1 s; its rounds usually take 40.0 s: 3 of at least 8 "
                "needed clients reported.",
            )
        },
    ),
    "slow rounds are not stalled": (of(idle_s=599.0, rounds=SLOW), {}),
    "three times the usual time": (
        of(idle_s=601.0, rounds=SLOW),
        {"job_stalled": (Severity.CRITICAL, "no round for 10 min 1 s; its rounds usually take 3 min 20 s.")},
    ),
    "no round yet": (of(idle_s=2879.0, rounds=[]), {}),
    "no round for long": (
        of(idle_s=2881.0, rounds=[]),
        {"job_stalled": (Severity.CRITICAL, "no round for 48 min 1 s; a round may take 16 min 0 s.")},
    ),
    "paused": (of(status=JobStatus.PAUSED, idle_s=1e6, waiting_s=1e6, num_available=0, failures=9), {}),
    "paused by an operator while it failed": (
        of(status=JobStatus.PAUSED, failures=9, reason="the job was paused"),
        {},
    ),
    "paused by its failures": (
        of(
            status=JobStatus.PAUSED,
            failures=10,
            reason="round 1 failed 10 times in a row; client c-1: TRAINER_ERROR: x",
        ),
        {
            "job_paused": (
                Severity.CRITICAL,
                "Job digits has paused itself: round 1 failed 10 times in a row; client c-1: TRAINER_ERROR: x.",
            )
        },
    ),
    "all clients vanished": (
        of(idle_s=400.0, waiting_s=390.0, num_connected=0, num_available=0),
        {
            "job_stalled": (Severity.CRITICAL, "40.0 s, and no client of population demo is connected."),
            "too_few_clients": (
                Severity.CRITICAL,
                "Job digits waits for 10 clients, but no client of population demo is connected.",
            ),
        },
    ),
    "too few, but not for a minute": (of(waiting_s=59.0, num_available=9), {}),
    "too few": (
        of(waiting_s=60.0, num_available=9),
        {
            "too_few_clients": (
                Severity.WARNING,
                "waits for 10 clients, but only 9 of the 20 connected clients of population demo may work for it.",
            )
        },
    ),
    "too few, and the last attempt says why": (
        of(waiting_s=60.0, num_available=0, reason="2 more do not have the trainer lineer, but linear"),
        {
            "too_few_clients": (
                Severity.WARNING,
                "of population demo may work for it: 2 more do not have the trainer lineer, but linear.",
            )
        },
    ),
    "enough wait": (of(waiting_s=1000.0, num_available=10), {}),
    "30 % late": (of(rounds=[RoundFacts(40.0, 10, 3)] * 5), {}),
    "more are late": (
        of(rounds=[RoundFacts(40.0, 10, 3)] * 4 + [RoundFacts(40.0, 10, 4)]),
        {
            "many_late": (
                Severity.WARNING,
                "In the last 5 rounds of job digits, 16 of 50 clients (32%) missed the deadline.",
            )
        },
    ),
    "late in few rounds": (of(rounds=[RoundFacts(40.0, 10, 9)] * 4), {}),
    "two failures": (of(failures=2), {}),
    "three failures": (
        of(failures=3, reason="aggregation failed: disk"),
        {
            "attempts_failing": (
                Severity.WARNING,
                "The last 3 attempts of job digits were abandoned: aggregation failed: disk.",
            )
        },
    ),
    "much epsilon": (of(spent=Spent(3.6, 4.0)), {}),
    "more epsilon": (
        of(spent=Spent(3.7, 4.0)),
        {"epsilon_high": (Severity.WARNING, "has spent 92% of its privacy budget (epsilon 3.7 of 4).")},
    ),
    "no epsilon left": (
        of(status=JobStatus.PAUSED, spent=Spent(4.0, 4.0), exhausted="its privacy budget is spent"),
        {"epsilon_exhausted": (Severity.CRITICAL, "Job digits cannot go on: its privacy budget is spent.")},
    ),
    "failed today": (
        of(status=JobStatus.FAILED, failed_s=7200.0, reason="round 3 failed 5 times", problem="x", idle_s=1e6),
        {"job_failed": (Severity.WARNING, "Job digits failed 2 h 0 min ago: round 3 failed 5 times.")},
    ),
    "failed yesterday": (of(status=JobStatus.FAILED, failed_s=86_401.0), {}),
    "without a plugin": (
        of(status=JobStatus.PAUSED, problem="the server has no plugin rules.lion"),
        {"job_needs_plugins": (Severity.CRITICAL, "cannot run on this server: the server has no plugin rules.lion.")},
    ),
}
SERVERS: dict[str, tuple[ServerFacts, dict[str, tuple[Severity, str]]]] = {
    "nothing known": (ServerFacts(), {}),
    "certificate for two weeks": (ServerFacts(certificate_s=14 * 86_400.0), {}),
    "certificate for days": (
        ServerFacts(certificate_s=3 * 86_400.0),
        {"certificate_expiring": (Severity.WARNING, "expires in 3 d 0 h.")},
    ),
    "certificate of yesterday": (
        ServerFacts(certificate_s=-7200.0),
        {"certificate_expired": (Severity.CRITICAL, "expired 2 h 0 min ago: clients and operators cannot connect.")},
    ),
    "room on the disk": (ServerFacts(disk_free_bytes=10 * GIB, disk_total_bytes=100 * GIB), {}),
    "a tenth of a disk": (
        ServerFacts(disk_free_bytes=9 * GIB, disk_total_bytes=100 * GIB),
        {"disk_low": (Severity.WARNING, "has 9.0 GiB of 100.0 GiB free (9%).")},
    ),
    "a small disk": (
        ServerFacts(disk_free_bytes=GIB // 2, disk_total_bytes=2 * GIB),
        {"disk_low": (Severity.WARNING, "has 512 MiB of 2.0 GiB free (25%).")},
    ),
    "full": (
        ServerFacts(full_s=60.0, num_full=2),
        {"storage_full": (Severity.CRITICAL, "Storage was full 1 min 0 s ago: 2 writes failed since")},
    ),
    "full an hour ago": (ServerFacts(full_s=3601.0, num_full=2), {}),
    "a budget": (
        ServerFacts(budgets={"demo": Spent(1.9, 2.0), "other": Spent(0.1, 2.0)}),
        {"epsilon_high": (Severity.WARNING, "of population demo have released or planned 95% of its privacy budget")},
    ),
    "a webhook fails": (
        ServerFacts(webhooks=[WebhookFacts("w-1", "https://example.org", "503", 7200.0)]),
        {"webhook_failing": (Severity.WARNING, "(https://example.org) has accepted no event for 2 h 0 min: 503.")},
    ),
    "the store fails": (
        ServerFacts(store=StoreFacts("s3://fed/spool", "writing s3://fed/spool/x failed: no.\n", 70.0, 1.0)),
        {
            "object_store_failing": (
                Severity.CRITICAL,
                "spool (s3://fed/spool) has failed for 1 min 10 s: writing s3://fed/spool/x failed: no. No report",
            )
        },
    ),
    "the store failed an hour ago": (ServerFacts(store=StoreFacts("s3://fed/spool", "no", 9999.0, 3601.0)), {}),
    "two webhooks fail": (
        ServerFacts(webhooks=[WebhookFacts("w-1", "https://a", "", 3700.0), WebhookFacts("w-2", "https://b", "", 1.0)]),
        {"webhook_failing": (Severity.WARNING, "Webhook w-1 (https://a) has accepted no event for 1 h 1 min; 1 more")},
    ),
}


def check(found: list[Alert], expected: dict[str, tuple[Severity, str]]) -> None:
    assert {alert.name for alert in found} == expected.keys()
    for alert in found:
        severity, text = expected[alert.name]
        assert alert.severity is severity
        assert text in alert.text
        for sentence in (alert.text, alert.remedy):
            assert sentence[0].isupper()
            assert sentence.endswith(".")
            assert "\n" not in sentence


@pytest.mark.parametrize("case", JOBS)
def test_alerts_of_jobs(case: str) -> None:
    facts, expected = JOBS[case]
    found = alerts.evaluate(ServerFacts(), [facts])
    check(found, expected)
    assert {(alert.job_id, alert.population) for alert in found} <= {("j-1", "demo")}


@pytest.mark.parametrize("case", SERVERS)
def test_alerts_of_the_server(case: str) -> None:
    facts, expected = SERVERS[case]
    check(alerts.evaluate(facts, [HEALTHY]), expected)


def test_commands_of_a_remedy_find_the_data_of_this_server() -> None:
    """They are typed on the server's host, in any folder, where they must not find another database."""
    place = " --data-dir /srv/fedplat --database @/etc/fedplat/database"
    facts = ServerFacts(
        certificate_s=1.0,
        disk_total_bytes=GIB,
        renewal=f"fedplat-server certificates renew{place}",
        prune=f"fedplat-server prune{place}",
    )
    remedies = {alert.name: alert.remedy for alert in alerts.evaluate(facts, [])}
    assert f"server's host: fedplat-server certificates renew{place}. A" in remedies["certificate_expiring"]
    assert f"(fedplat-server prune{place} --keep-versions 5)" in remedies["disk_low"]
    (alone,) = alerts.evaluate(ServerFacts(disk_total_bytes=GIB, is_alone=True), [])
    assert "on the server's host, while the server is stopped (fedplat-server prune" in alone.remedy
    (own,) = alerts.evaluate(ServerFacts(certificate_s=1.0, renewal=""), [])
    assert own.remedy.startswith("Replace the files of --tls-certificate and --tls-key")


def test_every_rule_has_a_case() -> None:
    cases = {name for table in (JOBS, SERVERS) for _, expected in table.values() for name in expected}
    assert cases == {
        *("job_stalled", "too_few_clients", "many_late", "attempts_failing", "epsilon_high", "epsilon_exhausted"),
        *("certificate_expiring", "certificate_expired", "disk_low", "storage_full", "job_failed", "job_needs_plugins"),
        *("webhook_failing", "object_store_failing", "job_paused"),
    }


def test_the_most_severe_alerts_are_first() -> None:
    jobs = [of(job_id="j-2", failures=3), of(job_id="j-1", failures=3), of(job_id="j-3", problem="x")]
    found = alerts.evaluate(ServerFacts(certificate_s=1.0), jobs)
    assert [(alert.name, alert.job_id) for alert in found] == [
        ("job_needs_plugins", "j-3"),
        ("attempts_failing", "j-1"),
        ("attempts_failing", "j-2"),
        ("certificate_expiring", ""),
    ]


def test_a_book_of_alerts_has_their_changes() -> None:
    book, one, two = AlertBook(), *(Alert("name", Severity.WARNING, f"{n}.", "Do.", f"j-{n}") for n in (1, 2))
    assert book.compare([one]) == ([one], [])
    book.update([one], 10.0)
    longer = dataclasses.replace(one, text="It lasts.")
    assert book.compare([longer, two]) == ([two], [])
    book.update([longer, two], 20.0)
    assert book.current == [(longer, 10.0), (two, 20.0)]
    assert book.compare([two]) == ([], [longer])
    book.update([two], 30.0)
    assert book.compare([one, two]) == ([one], [])
    book.update([one, two], 40.0)
    assert book.current == [(one, 40.0), (two, 20.0)]


async def test_a_job_whose_clients_all_vanish(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "AWAY_S", 0.0)
    monkeypatch.setattr(alerts, "MIN_STALLED_S", 0.0)
    job = await site.operator.start(job_file("digits", rounds=3, goal=2))
    clients = await site.fleet(2)
    work = await site.assign(clients)
    assert names(await site.status()) == []
    for seed, (client, assignment) in enumerate(zip(clients, work, strict=True)):
        await client.deliver(assignment.token, update_of(initial_model(), seed))
    await site.operator.until(job, "attempt", "COMMITTED")

    async def has_both() -> bool:
        return names(await site.status()) == ["job_stalled", "too_few_clients"]

    await until(has_both, "an alert after three times the length of the first round")
    status = await site.status()
    assert status.num_alerts == 2
    stalled, few = status.alerts
    assert few.text == "Job digits waits for 2 clients, but no client of population demo is connected."
    assert "population demo" in few.remedy
    assert stalled.text.endswith("and no client of population demo is connected.")
    assert {alert.severity for alert in status.alerts} == {admin_pb2.ALERT_SEVERITY_CRITICAL}
    assert {(alert.job_id, alert.population) for alert in status.alerts} == {(job, "demo")}
    since = [alert.since_unix_s for alert in status.alerts]
    await site.assign(clients)  # they return
    assert [alert.since_unix_s for alert in (await site.status()).alerts if alert.name == "job_stalled"] in (
        [],
        since[:1],
    )
    assert "too_few_clients" not in names(await site.status())


async def test_silos_that_lack_the_option_to_exchange_models(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `where` nor the trainers of these clients explain why the job cannot have them."""
    monkeypatch.setattr(alerts, "AWAY_S", 0.0)
    await site.operator.start(gossip_job(goal=2, rounds=1))

    async def has_alert() -> bool:
        return names(await site.status()) == ["too_few_clients"]

    await until(has_alert, "an alert of a job without silos")
    remedy = (await site.status()).alerts[0].remedy
    assert remedy.startswith("Start clients of population demo with --exchange-models, or check")
    (found,) = alerts.evaluate(ServerFacts(), [of(waiting_s=60.0, num_available=0, option="--exchange-models")])
    assert found.remedy.startswith("Start more clients with --exchange-models, which this job needs, or compare")


async def test_changes_of_alerts_are_events_over_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "AWAY_S", 0.0)
    monkeypatch.setattr(alert_monitor, "ALERT_INTERVAL_S", 0.02)

    async def changes(site: Site) -> list[tuple[str, str, str]]:
        found = await site.store.inner.events.list_events(types=["alert.raised", "alert.ended"])
        return [(one.type, one.subject, one.job_id) for one in found if one.subject != "disk_low"]

    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file("digits", rounds=3, goal=2))
        raised = ("alert.raised", "too_few_clients", job)
        await until(lambda: is_equal(changes(site), [raised]), "the event of the alert")
        (since,) = [alert.since_unix_s for alert in (await site.status()).alerts if alert.name == "too_few_clients"]
    async with daemons.running(folder) as site:
        (again,) = [alert.since_unix_s for alert in (await site.status()).alerts if alert.name == "too_few_clients"]
        assert again == pytest.approx(since, abs=1.0)
        await site.assign(await site.fleet(2))
        expected = [raised, ("alert.ended", "too_few_clients", job)]
        await until(lambda: is_equal(changes(site), expected), "the event of the end of the alert")


async def is_equal(found: Awaitable[object], expected: object) -> bool:
    return await found == expected


async def test_the_status_has_disk_and_database(site: Site) -> None:
    status = await site.status()
    assert 0 < status.disk_free_bytes < status.disk_total_bytes
    assert status.database == "sqlite"


def names(status: admin_pb2.GetStatusResponse) -> list[str]:
    return [alert.name for alert in status.alerts if alert.name != "disk_low"]  # the disk is that of the machine
