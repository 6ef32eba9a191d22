"""The list of jobs, a job, and the table of one of its charts."""

from __future__ import annotations

import dataclasses

from fedplat.admin import exchange, funnel, waiting
from fedplat.dashboard import formats
from fedplat.dashboard.pages import job_charts
from fedplat.dashboard.pages.overview import STATUSES
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.visit import PAGE_SIZE, NotFoundError, Visit
from fedplat.wire.v1 import admin_pb2

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
        "current": job.current if job.HasField("current") and job.current.phase not in funnel.ENDED else None,
        "step": funnel.describe_step(job.current.progress),
        "waiting": waiting.describe(job.current, formats.clock),
        "exchange": exchange.describe(job.exchange) if job.HasField("exchange") else "",
        "unreachable": exchange.join_names(job.exchange.unreachable, job.exchange.num_unreachable),
        "axis": axis,
        "charts": job_charts.make_charts(sample.rounds, axis, is_virtual=visit.source.is_simulation),
        "num_committed": sample.total,
        "num_sampled": len(sample.rounds),
        "recent": recent.rounds,
        "num_attempts": recent.total,
        "versions": visit.source.list_latest_versions(job.job_id, MAX_VERSIONS),
        "privacy": privacy if privacy is not None and privacy.is_private else None,
        "actions": JobActions.of(job),
        "result": job_charts.describe_result(sample.rounds),
    }
    return Page("job.html", job.name, data, section="jobs", job=job.job_id, has_charts=True)


def show_chart(visit: Visit) -> Page:
    """Return the page with the numbers of a chart. Raises `NotFoundError` for a chart that the job does not have."""
    job = visit.source.show_job(visit.names["job"])
    axis = visit.choice("axis", ("round", "time")) or "round"
    sample = visit.source.page(admin_pb2.ListRoundsRequest(job=job.job_id, num_samples=NUM_SAMPLES))
    made = job_charts.make_charts(sample.rounds, axis, is_virtual=visit.source.is_simulation)
    for chart in made:
        if chart.key == visit.names["chart"]:
            data = {"job": job, "chart": chart}
            return Page("chart.html", f"{chart.title} of {job.name}", data, section="jobs", is_live=False)
    raise NotFoundError


def list_rounds(visit: Visit) -> Page:
    """Return the page with all attempts of a job."""
    job = visit.source.show_job(visit.names["job"])
    request = admin_pb2.ListRoundsRequest(
        job=job.job_id,
        all_attempts=True,
        newest_first=True,
        page_size=PAGE_SIZE,
        page_token=visit.paging.token,
    )
    found = visit.source.page(request)
    pager = visit.pager(len(found.rounds), found.total, found.next_page_token)
    data = {"job": job, "rounds": found.rounds, "pager": pager}
    return Page("rounds.html", f"Rounds of {job.name}", data, section="jobs", job=job.job_id)
