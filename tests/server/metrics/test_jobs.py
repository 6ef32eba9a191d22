"""The time series of jobs: what they show, how many there are, and that they vanish with their jobs."""

from __future__ import annotations

import statistics
from typing import Any

from fedplat.rounds.events import AssignmentFailed, JobAction, OperatorCommand, TimerFired
from fedplat.rounds.states import Reason
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.instruments import MAX_JOBS, OTHER_LABEL, method_label
from fedplat_server.metrics.job_series import LINGER_S, MAX_METRICS, JobSeriesTable
from fedplat_server.records.audit import AuditAction
from support.rounds.driver import make_client, make_job, make_spec
from support.scrapes import Stage


def check_in(stage: Stage, population: str, count: int, prefix: str = "c") -> None:
    stage.do(*(make_client(f"{population}-{prefix}{i}", population=population) for i in range(count)))


def start(stage: Stage, job_id: str, population: str = "demo", **spec: Any) -> None:
    stage.add(make_job(job_id, make_spec(name=f"name-{job_id}", population=population, **spec)))
    stage.do(OperatorCommand(job_id, JobAction.START))


def running(num_clients: int = 3, **spec: Any) -> Stage:
    """A job `j` whose first attempt has clients at work."""
    stage = Stage()
    check_in(stage, "demo", num_clients)
    options: dict[str, Any] = {"goal": 3, "rounds": 100, **spec}
    start(stage, "j", **options)
    return stage


def next_round(stage: Stage, seconds: float, **metrics: float) -> None:
    """The round lasts so long; then its clients wait again."""
    stage.now += seconds
    stage.play_round("j", **metrics)
    check_in(stage, "demo", 3)


def test_a_round_is_counted() -> None:
    stage = running()
    before = stage.scrape()
    assert before.by("outcome", "fedplat_assignments_total") == {}
    assert before.value("fedplat_clients", population="demo", state="working") == 3
    next_round(stage, 7.0)
    samples = stage.scrape()
    labels = {"job_id": "j", "job_name": "name-j"}
    assert samples.value("fedplat_assignments_total", outcome="merged", **labels) == 3
    assert samples.value("fedplat_attempts_total", kind="train", outcome="committed", **labels) == 1
    assert samples.value("fedplat_update_bytes_total", **labels) == 300
    assert samples.value("fedplat_job_round", **labels) == 1
    assert samples.value("fedplat_job_rounds_planned", **labels) == 100
    assert samples.value("fedplat_attempt_duration_seconds_sum", kind="train", outcome="committed") == 7.0
    assert samples.value("fedplat_assignment_duration_seconds_count", outcome="merged") == 3
    assert samples.value("fedplat_commit_duration_seconds_count") == 1
    assert samples.value("fedplat_jobs", status="running") == 1


def test_late_and_failed_clients_have_their_outcome_and_duration() -> None:
    stage = running()
    attempt = stage.coordinator.jobs["j"].attempt
    assert attempt is not None
    first = next(iter(attempt.assignments.values()))
    stage.now += 5.0
    stage.do(AssignmentFailed(first.key, first.client_id, Reason.TRAINER_ERROR))
    stage.now += 95.0
    stage.do(TimerFired("j"))
    samples = stage.scrape()
    assert samples.by("outcome", "fedplat_assignments_total") == {"failed": 1, "late": 2}
    assert samples.by("outcome", "fedplat_assignment_duration_seconds_sum") == {"failed": 5.0, "late": 200.0}
    assert samples.by("outcome", "fedplat_attempts_total") == {"abandoned": 1}


def test_metrics_by_declared_names_only() -> None:
    stage = running()
    next_round(stage, 1.0, loss=0.5, secret=3.0)
    assert stage.scrape().by("name", "fedplat_job_metric", source="train") == {"loss": 0.5}
    next_round(stage, 1.0, loss=0.25, accuracy=0.75)
    assert stage.scrape().by("name", "fedplat_job_metric", source="train") == {"loss": 0.25, "accuracy": 0.75}
    stage.table.note_scores("j", {"accuracy": 0.5, "x" * 1000: 1.0})
    assert stage.scrape().by("name", "fedplat_job_metric", source="server") == {"accuracy": 0.5}


def test_a_job_has_only_so_many_metrics() -> None:
    stage = running()
    names = [f"metric-{i}" for i in range(20)]
    table = JobSeriesTable(stage.instruments, names, lambda: stage.now)
    table.follow(stage.coordinator.jobs["j"])
    table.note_metrics("j", "train", dict.fromkeys(names, 1.0))
    (series,) = table.all()
    assert len(series.metrics) == MAX_METRICS


def test_the_usual_time_of_a_round_is_the_median() -> None:
    stage = running()

    def usual() -> float:
        return stage.scrape().value("fedplat_job_usual_round_seconds")

    deadlines = stage.coordinator.jobs["j"].spec.deadlines
    guess = deadlines.selection_s + deadlines.training_s + deadlines.upload_s
    assert usual() == guess
    lengths = [30.0, 10.0, 50.0, 20.0]
    next_round(stage, lengths[0])
    for length in lengths[1:3]:
        next_round(stage, length)
        assert usual() == guess
    next_round(stage, lengths[3])
    assert usual() == statistics.median(lengths[1:])
    assert stage.scrape().value("fedplat_job_last_commit_timestamp_seconds") == stage.now


def test_a_pause_is_not_a_round() -> None:
    stage = running()
    for _ in range(4):
        next_round(stage, 10.0)
    stage.do(OperatorCommand("j", JobAction.PAUSE))
    stage.now += 5000.0
    assert stage.scrape().values("fedplat_job_idle_since_timestamp_seconds") == []
    stage.do(OperatorCommand("j", JobAction.RESUME))
    assert stage.scrape().value("fedplat_job_idle_since_timestamp_seconds") == stage.now
    next_round(stage, 10.0)
    assert stage.scrape().value("fedplat_job_usual_round_seconds") == 10.0


def test_available_clients_work_wait_or_have_reported() -> None:
    stage = running(num_clients=5)

    def available() -> float:
        return stage.scrape().value("fedplat_job_clients_available")

    assert available() == 5
    check_in(stage, "demo", 2, "more")
    assert available() == 7
    check_in(stage, "elsewhere", 4)
    assert available() == 7
    assert stage.scrape().value("fedplat_job_clients_goal") == 3
    assert stage.scrape().by("population", "fedplat_clients", state="waiting") == {"demo": 4, "elsewhere": 4}


def test_ended_jobs_vanish_after_the_last_scrapes() -> None:
    stage = running(rounds=1)
    stage.now += 1.0
    stage.play_round("j")
    samples = stage.scrape()
    assert samples.value("fedplat_assignments_total", outcome="merged") == 3
    assert samples.value("fedplat_jobs", status="completed") == 1
    assert samples.values("fedplat_job_idle_since_timestamp_seconds") == []
    stage.now += LINGER_S + 1.0
    samples = stage.scrape()
    assert samples.label_values("job_id") == set()
    assert samples.value("fedplat_jobs", status="completed") == 1


def test_drafts_have_no_series() -> None:
    stage = Stage()
    stage.add(make_job("j"))
    stage.do(OperatorCommand("j", JobAction.CANCEL))
    assert stage.scrape().label_values("job_id") == set()


def test_jobs_beyond_the_limit_share_a_label() -> None:
    stage = Stage()
    for i in range(MAX_JOBS + 5):
        check_in(stage, f"p{i}", 1)
        start(stage, f"j{i}", f"p{i}", goal=1, rounds=2)
        stage.now += 1.0
        stage.play_round(f"j{i}")
    samples = stage.scrape()
    assert len(samples.label_values("job_id")) == MAX_JOBS + 1
    assert samples.value("fedplat_assignments_total", job_id=OTHER_LABEL, outcome="merged") == 5
    assert samples.values("fedplat_job_round", job_id=OTHER_LABEL) == []
    # When another job has ended, those keep the label that their counters have, and a new job gets its own.
    stage.do(OperatorCommand("j0", JobAction.CANCEL))
    stage.now += LINGER_S + 1.0
    stage.scrape()
    check_in(stage, f"p{MAX_JOBS}", 1)
    stage.play_round(f"j{MAX_JOBS}")
    start(stage, "new", "p0")
    samples = stage.scrape()
    assert samples.value("fedplat_assignments_total", job_id=OTHER_LABEL, outcome="merged") == 6
    assert "new" in samples.label_values("job_id")


def test_populations_beyond_the_limit_share_a_label() -> None:
    stage = Stage()
    for i in range(55):
        check_in(stage, f"p{i:02}", 2)
    waiting = stage.scrape().by("population", "fedplat_clients", state="waiting")
    assert len(waiting) == 51
    assert waiting[OTHER_LABEL] == 10


def test_twenty_jobs_and_ten_thousand_clients_have_few_series() -> None:
    """At most 2,000, and within 5 % of that after 200 jobs have ended."""
    stage = Stage()
    record_calls(stage)
    for i in range(20):
        check_in(stage, f"p{i}", 500)
        start(stage, f"j{i}", f"p{i}", goal=10, rounds=5)
        stage.now += 1.0
        stage.play_round(f"j{i}", loss=0.5, accuracy=0.5)
        stage.table.note_scores(f"j{i}", {"loss": 1.0, "accuracy": 0.5})
        for result in ("assigned", "not_selected", "no_work"):
            stage.instruments.check_ins.labels(f"p{i}", result).inc()
    num_before = count_series(stage)
    for i in range(200):
        job_id = f"short{i}"
        check_in(stage, "short", 1)
        start(stage, job_id, "short", goal=1, rounds=1)
        stage.now += 1.0
        stage.play_round(job_id, loss=0.5)
    assert count_series(stage) <= 4000  # while they linger
    stage.now += LINGER_S + 1.0
    num_after = count_series(stage)
    assert stage.scrape().value("fedplat_jobs", status="completed") == 200
    assert num_before <= 2000
    assert num_before <= num_after <= 1.05 * num_before


def record_calls(stage: Stage) -> None:
    """One of each method, a refused one of each that clients call, and of each operation and audit action."""
    for module in (admin_pb2, fleet_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                duration, label = stage.instruments.call_duration, method_label(f"/{service.full_name}/{method.name}")
                assert label != OTHER_LABEL
                duration.labels(label, "OK").observe(0.1)
                if service.name == "Fleet":
                    duration.labels(label, "UNAUTHENTICATED").observe(0.1)
    for action in AuditAction:
        stage.instruments.audit_events.labels(action.value).inc()
    for operation in ("read", "write"):
        stage.instruments.database_duration.labels(operation).observe(0.1)
    for operation in ("fsync", "rename", "delete"):
        stage.instruments.blob_duration.labels(operation, "folder").observe(0.1)


def count_series(stage: Stage) -> int:
    """The samples of a scrape, and about 30 more that Prometheus's library adds about the process."""
    return 30 + sum(not line.startswith("#") for line in stage.text().splitlines())


def test_the_sample_of_a_private_job_stays_secret() -> None:
    stage = Stage()
    private = {"participation": "poisson", "delta": 1e-6, "noise_multiplier": 1.0}
    selection = {"sampling": {"policy": "poisson", "rate": 1.0}, "close": "deadline", "wait_for": 4}
    updates = {"weighting": "uniform", "clip_norm": 1.0}
    check_in(stage, "vault", 4)
    check_in(stage, "demo", 2)
    start(stage, "j", "vault", goal=4, privacy=private, selection=selection, updates=updates)
    assert stage.coordinator.jobs["j"].num_busy == 4
    stage.now += 500.0
    stage.do(TimerFired("j"))
    assert stage.coordinator.jobs["j"].num_busy == 0
    samples = stage.scrape()
    assert samples.values("fedplat_job_round", job_id="j") == [0.0]
    for name in ("assignments_total", "update_bytes_total", "job_clients_available", "job_clients_goal"):
        assert samples.values(f"fedplat_{name}") == []
    assert samples.values("fedplat_assignment_duration_seconds_count") == []
    assert samples.by("population", "fedplat_clients", state="waiting") == {"demo": 2}


def test_a_private_job_shows_its_losses() -> None:
    stage = running()
    stage.losses.spent["j"], stage.losses.planned["j"] = 0.5, 2.0
    stage.losses.committed["demo"], stage.losses.budgets["demo"] = 2.0, 4.0
    samples = stage.scrape()
    assert samples.value("fedplat_privacy_epsilon_spent", job_id="j") == 0.5
    assert samples.value("fedplat_privacy_epsilon_planned", job_id="j") == 2.0
    assert samples.value("fedplat_privacy_epsilon_committed", population="demo") == 2.0
    assert samples.value("fedplat_privacy_epsilon_budget", population="demo") == 4.0
