"""The overview, the list of jobs, a job, and its charts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from fedplat.admin import descriptions
from fedplat.dashboard import formats
from fedplat.dashboard.formats import Chart, ChartSeries, Unit, finite
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.source import PAGE_SIZE, NotFoundError, OptionalResult, Visit, call_if_supported
from fedplat.metrics import is_score, is_smaller_better
from fedplat.wire.v1 import admin_pb2, events_pb2

NUM_SAMPLES = 400
"""Rounds that the charts of a job show."""
MAX_RECENT = 20
MAX_VERSIONS = 12
ENDED = frozenset({admin_pb2.JOB_STATUS_COMPLETED, admin_pb2.JOB_STATUS_FAILED, admin_pb2.JOB_STATUS_CANCELLED})
_ACTIONS = {
    admin_pb2.JOB_STATUS_DRAFT: ("start",),
    admin_pb2.JOB_STATUS_RUNNING: ("pause",),
    admin_pb2.JOB_STATUS_PAUSED: ("resume",),
}


@dataclasses.dataclass(frozen=True)
class JobActions:
    """What may be done with a job in its present status."""

    simple: tuple[str, ...]
    can_cancel: bool
    can_roll_back: bool

    @classmethod
    def of(cls, job: admin_pb2.Job) -> JobActions:
        """Return the actions for a job."""
        is_open = job.status not in ENDED
        can_roll_back = job.status in (admin_pb2.JOB_STATUS_RUNNING, admin_pb2.JOB_STATUS_PAUSED)
        return cls(_ACTIONS.get(job.status, ()), is_open, can_roll_back and job.model.version > 0)


def list_jobs(visit: Visit) -> Page:
    """Return the page `/jobs`."""
    status = visit.choice("status", STATUSES)
    request = admin_pb2.ListJobsRequest(
        page_size=PAGE_SIZE,
        page_token=visit.paging.token,
        newest_first=True,
        search=visit.text("search"),
        population=visit.text("population"),
    )
    if status:
        request.statuses.append(admin_pb2.JobStatus.Value(f"JOB_STATUS_{status}"))
    found = visit.source.page(request)
    data = {
        "jobs": found.jobs,
        "counts": [(name, found.num_by_status.get(name, 0)) for name in STATUSES],
        "chosen": status,
        "search": request.search,
        "population": request.population,
        "pager": visit.pager(len(found.jobs), found.total, found.next_page_token),
    }
    return Page("jobs.html", "Jobs", data, section="jobs")


def show_job(visit: Visit) -> Page:
    """Return the page of a job."""
    job = visit.source.show_job(visit.names["job"])
    axis = visit.choice("axis", ("round", "time")) or "round"
    sample = visit.source.page(admin_pb2.ListRoundsRequest(job=job.job_id, num_samples=NUM_SAMPLES))
    recent = visit.source.page(
        admin_pb2.ListRoundsRequest(job=job.job_id, newest_first=True, page_size=MAX_RECENT, all_attempts=True)
    )
    privacy = next(iter(visit.source.show_privacy(job.job_id).jobs), None)
    data = {
        "job": job,
        "status": formats.job_status(job.status),
        "current": job.current if job.HasField("current") and job.current.phase not in descriptions.ENDED else None,
        "step": descriptions.describe_step(job.current.progress),
        "waiting": descriptions.describe_wait(job.current, formats.clock),
        "exchange": descriptions.describe_exchange(job.exchange) if job.HasField("exchange") else "",
        "unreachable": descriptions.join_names(job.exchange.unreachable, job.exchange.num_unreachable),
        "axis": axis,
        "charts": make_charts(sample.rounds, axis, is_virtual=visit.source.is_simulation),
        "num_committed": sample.total,
        "num_sampled": len(sample.rounds),
        "recent": recent.rounds,
        "num_attempts": recent.total,
        "versions": visit.source.list_latest_versions(job.job_id, MAX_VERSIONS),
        "privacy": privacy if privacy is not None and privacy.is_private else None,
        "actions": JobActions.of(job),
        "result": describe_result(sample.rounds),
    }
    return Page("job.html", job.name, data, section="jobs", job=job.job_id, has_charts=True)


def show_chart(visit: Visit) -> Page:
    """Return the page with the numbers of a chart. Raises `NotFoundError` for a chart that the job does not have."""
    job = visit.source.show_job(visit.names["job"])
    axis = visit.choice("axis", ("round", "time")) or "round"
    sample = visit.source.page(admin_pb2.ListRoundsRequest(job=job.job_id, num_samples=NUM_SAMPLES))
    made = make_charts(sample.rounds, axis, is_virtual=visit.source.is_simulation)
    for chart in made:
        if chart.key == visit.names["chart"]:
            data = {"job": job, "chart": chart}
            return Page("chart.html", f"{chart.title} of {job.name}", data, section="jobs", is_live=False)
    raise NotFoundError


def list_rounds(visit: Visit) -> Page:
    """Return the page with all attempts of a job."""
    job = visit.source.show_job(visit.names["job"])
    request = admin_pb2.ListRoundsRequest(
        job=job.job_id, all_attempts=True, newest_first=True, page_size=PAGE_SIZE, page_token=visit.paging.token
    )
    found = visit.source.page(request)
    pager = visit.pager(len(found.rounds), found.total, found.next_page_token)
    data = {"job": job, "rounds": found.rounds, "pager": pager}
    return Page("rounds.html", f"Rounds of {job.name}", data, section="jobs", job=job.job_id)


MAX_JOBS_SHOWN = 8
SPARK_POINTS = 40
MAX_EVENTS = 8
STATUSES = ("RUNNING", "PAUSED", "DRAFT", "COMPLETED", "FAILED", "CANCELLED")


@dataclasses.dataclass(frozen=True)
class JobLine:
    """A job of the overview, with a small line of its main metric."""

    job: admin_pb2.Job
    spark: Markup
    metric: str


def overview(visit: Visit) -> Page:
    """Return the page `/`."""
    request = admin_pb2.ListJobsRequest(
        page_size=MAX_JOBS_SHOWN,
        newest_first=True,
        # The only job of a simulation is what its page is for, also after its end.
        statuses=() if visit.source.is_simulation else (admin_pb2.JOB_STATUS_RUNNING, admin_pb2.JOB_STATUS_PAUSED),
    )
    jobs = visit.source.page(request)
    events: OptionalResult[events_pb2.ListEventsResponse] = OptionalResult()
    if not visit.source.is_simulation:
        latest = events_pb2.ListEventsRequest(newest_first=True, page_size=MAX_EVENTS)
        events = call_if_supported(lambda: visit.server.page(latest))
    return Page(
        "overview.html",
        "Overview",
        {
            "status": visit.status,
            "counts": [(name, visit.status.num_jobs.get(name, 0)) for name in STATUSES],
            "jobs": [_line(visit, job) for job in jobs.jobs],
            "events": events.value.events[:MAX_EVENTS] if events.value else [],
            "events_problem": events.problem,
            "job_names": {job.job_id: job.name for job in jobs.jobs},
        },
        section="overview",
    )


def _line(visit: Visit, job: admin_pb2.Job) -> JobLine:
    request = admin_pb2.ListRoundsRequest(job=job.job_id, num_samples=SPARK_POINTS)
    rounds = visit.source.page(request).rounds
    name = main_metric(rounds)
    values = [value for each in rounds if (value := metric_values(each).get(name)) is not None]
    last = formats.number(values[-1]) if values else ""
    text = f"{name} over {len(values)} rounds, now {last}"
    return JobLine(job, formats.sparkline(values, text), f"{name} {last}" if values else "")


MAX_METRICS = 3
"""Charts of convergence: one for each metric, the most useful first."""
OUTCOMES = ("merged", "late", "failed", "rejected", "surplus", "dropped")
Rounds = Sequence[admin_pb2.Round]


def make_charts(rounds: Rounds, axis: str, *, is_virtual: bool) -> list[Chart]:
    """Return the charts over the rounds, or over time. With `is_virtual`, moments are seconds since the start."""
    if not rounds:
        return []
    x: list[float]
    unit: Unit
    if axis == "time":
        x, unit = [each.opened_unix_s + each.seconds for each in rounds], "seconds" if is_virtual else "time"
    else:
        x, unit = [float(each.round) for each in rounds], "round"
    charts = [_convergence(name, rounds, x, unit) for name in metric_names(rounds)[:MAX_METRICS]]
    charts.append(_participation(rounds, x, unit))
    charts.append(_single("duration", "Duration of rounds", rounds, (x, unit), ("seconds", lambda each: each.seconds)))
    if any(each.update_bytes for each in rounds):
        up: tuple[Unit, Callable[[admin_pb2.Round], float]] = ("bytes", lambda each: float(each.update_bytes))
        charts.append(_single("bytes", "Bytes received in updates", rounds, (x, unit), up))
    if any(each.max_staleness for each in rounds):
        charts.append(_staleness(rounds, x, unit))
    return charts


def describe_result(rounds: Rounds) -> list[tuple[str, str]]:
    """Return the last and the best value of each shown metric, as names and texts."""
    result: list[tuple[str, str]] = []
    for name in metric_names(rounds)[:MAX_METRICS]:
        values = _values(rounds, name)
        if values:
            last = max(values)
            at, value = best_value(values, name)
            text = f"{formats.number(values[last])} in round {last}"
            if is_score(name):
                text += f"; best {formats.number(value)} in round {at}"
            result.append((formats.printable(name), text))
    return result


def outcome_counts(each: admin_pb2.Round) -> dict[str, int]:
    """Return the assigned clients of an attempt by outcome; those that have no outcome yet are "open"."""
    counts = {
        "merged": each.merged or each.reported,
        "late": each.late,
        "failed": each.failed,
        "rejected": each.rejected,
        "surplus": each.surplus,
        "dropped": each.dropped,
    }
    return {**counts, "open": max(0, each.assigned - sum(counts.values()))}


def _values(rounds: Rounds, name: str) -> dict[int, float]:
    found = {each.round: metric_values(each).get(name) for each in rounds}
    return {round_: value for round_, value in found.items() if value is not None and finite(value) is not None}


def _convergence(name: str, rounds: Rounds, x: list[float], unit: Unit) -> Chart:
    server = [finite(each.server_metrics[name]) if name in each.server_metrics else None for each in rounds]
    clients = [finite(each.client_metrics[name]) if name in each.client_metrics else None for each in rounds]
    series = [ChartSeries("server's evaluator", server), ChartSeries("mean of the clients", clients)]
    values = _values(rounds, name)
    shown = formats.printable(name)
    sentence = f"{shown} has no finite value yet."
    if values:
        last = max(values)
        at, value = best_value(values, name)
        best = f"; the best is {formats.number(value)}, in round {at}" if is_score(name) else ""
        sentence = f"{shown} is {formats.number(values[last])} after round {last}{best}."
    present = [each for each in series if any(item is not None for item in each.values)]
    title = f"Convergence: {shown}" if is_score(name) else shown
    return Chart(f"metric-{name}", title, sentence, x, present or series, unit)


def _participation(rounds: Rounds, x: list[float], unit: Unit) -> Chart:
    counts = [outcome_counts(each) for each in rounds]
    totals = {name: sum(each[name] for each in counts) for name in OUTCOMES}
    assigned = sum(totals.values())
    lost = {name: total for name, total in totals.items() if name != "merged" and total}
    parts = ", ".join(f"{formats.percent(total, assigned)} {name}" for name, total in lost.items())
    sentence = f"{formats.percent(totals['merged'], assigned)} of {formats.count(assigned)} assignments were merged"
    series = [
        ChartSeries(name, [float(each[name]) for each in counts])
        for name in OUTCOMES
        if name == "merged" or name in lost
    ]
    return Chart(
        "participation",
        "Participation by outcome",
        f"{sentence}; {parts}." if parts else f"{sentence}.",
        x,
        series,
        unit,
        "count",
        is_stack=True,
    )


def _single(
    key: str,
    title: str,
    rounds: Rounds,
    horizontal: tuple[list[float], Unit],
    vertical: tuple[Unit, Callable[[admin_pb2.Round], float]],
) -> Chart:
    x, x_unit = horizontal
    unit, value_of = vertical
    values = [value_of(each) for each in rounds]
    show = formats.size if unit == "bytes" else formats.duration
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    sentence = f"The median is {show(middle)}, the last one {show(values[-1])}, the largest {show(ordered[-1])}."
    return Chart(key, title, sentence, x, [ChartSeries(title.lower(), values)], x_unit, unit)


def _staleness(rounds: Rounds, x: list[float], unit: Unit) -> Chart:
    largest = max(each.max_staleness for each in rounds)
    last = rounds[-1].mean_staleness
    return Chart(
        "staleness",
        "Staleness of updates",
        f"Merged updates were {formats.number(last)} versions behind on average in the last round, {largest} at most.",
        x,
        [
            ChartSeries("mean", [each.mean_staleness for each in rounds]),
            ChartSeries("maximum", [float(each.max_staleness) for each in rounds]),
        ],
        unit,
        "count",
    )


_PREFERRED = ("accuracy", "loss", "relative_distance", "confirmed_edges")


def metric_values(each: admin_pb2.Round) -> dict[str, float]:
    """Return the metrics of a round: those of the server's evaluator, and of the clients where it has none."""
    return {**each.client_metrics, **each.server_metrics}


def metric_names(rounds: Iterable[admin_pb2.Round]) -> list[str]:
    """Return the metrics of some rounds, the most useful first: those of the evaluator, then `_PREFERRED`."""
    server = Counter[str]()
    found = Counter[str]()
    for each in rounds:
        server.update(each.server_metrics.keys())
        found.update(metric_values(each).keys())
    order = {name: position for position, name in enumerate(_PREFERRED)}
    return sorted(found, key=lambda name: (-min(server[name], 1), order.get(name, len(order)), -found[name], name))


def main_metric(rounds: Sequence[admin_pb2.Round]) -> str:
    """Return the first of `metric_names`; empty without metrics."""
    return next(iter(metric_names(rounds)), "")


def best_value(values: Mapping[int, float], name: str) -> tuple[int, float]:
    """Return the round with the best value of a metric, and that value."""
    choose = min if is_smaller_better(name) else max
    at = choose(values, key=lambda round_: values[round_])
    return at, values[at]
