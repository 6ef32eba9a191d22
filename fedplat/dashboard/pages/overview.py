"""The overview: what needs attention, and how the server and its jobs are doing."""

from __future__ import annotations

import dataclasses

from markupsafe import Markup

from fedplat.dashboard import charts, formats
from fedplat.dashboard.optional_calls import OptionalResult, call_if_supported
from fedplat.dashboard.pages.round_metrics import main_metric, metric_values
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.visit import Visit
from fedplat.wire.v1 import admin_pb2, events_pb2

MAX_JOBS = 8
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
        page_size=MAX_JOBS,
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
    return JobLine(job, charts.sparkline(values, text), f"{name} {last}" if values else "")
