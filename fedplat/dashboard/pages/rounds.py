"""A round: the funnel from check-in to merge, why clients did not contribute, and the timeline of assignments."""

from __future__ import annotations

import dataclasses

from fedplat.admin import descriptions
from fedplat.dashboard import formats, rendering, source
from fedplat.dashboard.pages.jobs import outcome_counts
from fedplat.wire.v1 import admin_pb2

NUM_ASSIGNMENTS = 40
STATES = (
    *("TRAINING", "ADVERTISED", "SHARED", "UPLOADING", "REPORTED", "MERGED"),
    *("LATE", "FAILED", "REJECTED", "SURPLUS", "DROPPED"),
)


@dataclasses.dataclass(frozen=True)
class FunnelBar:
    """One stage of the funnel. `share` is its part of the widest stage, in per cent; `of_previous` a text."""

    name: str
    count: int
    share: float
    of_previous: str
    explanation: str


@dataclasses.dataclass(frozen=True)
class TimelineSegment:
    """A part of an assignment's time: its start and width in per cent of the timeline."""

    kind: str
    start: float
    width: float


@dataclasses.dataclass(frozen=True)
class TimelineRow:
    """An assignment with its parts on the timeline, and a text of them."""

    assignment: admin_pb2.AssignmentDetails
    segments: list[TimelineSegment]
    text: str


def show_round(visit: source.Visit) -> rendering.Page:
    """Return the page of an attempt: the last one of the round, unless the parameter `attempt` names another."""
    job = visit.source.show_job(visit.names["job"])
    round_, attempt = visit.number("round"), source.parse_number(visit.text("attempt") or "0")
    details = visit.source.show_round(job.job_id, round_, attempt)
    privacy = next(iter(visit.source.show_privacy(job.job_id).jobs), None)
    is_private = privacy is not None and privacy.is_private
    each = details.round
    state = visit.choice("state", STATES)
    assignments: source.OptionalResult[admin_pb2.ListAssignmentsResponse] = source.OptionalResult()
    if not visit.source.is_simulation:
        request = admin_pb2.ListAssignmentsRequest(
            job=job.job_id,
            round=round_,
            attempt=each.attempt,
            states=[state] if state else [],
            page_size=NUM_ASSIGNMENTS,
            page_token=visit.paging.token,
        )
        assignments = source.call_if_supported(lambda: visit.server.page(request))
    found = assignments.value or admin_pb2.ListAssignmentsResponse()
    data = {
        "job": job,
        "round": each,
        "details": details,
        "is_private": is_private,
        "stages": draw_funnel(each),
        "largest_loss": descriptions.largest_loss(each),
        "step": descriptions.describe_step(each.progress),
        "facts": descriptions.list_facts(each),
        "waiting": descriptions.describe_wait(each, formats.clock),
        "outcomes": outcome_counts(each),
        "phase": formats.attempt_phase(each.phase),
        "assignments": assignments,
        "timeline": timeline(each, list(found.assignments)),
        "states": STATES,
        "state": state,
        "pager": visit.pager(len(found.assignments), found.total, found.next_page_token),
    }
    return rendering.Page("round.html", f"Round {round_} of {job.name}", data, section="jobs", job=job.job_id)


def draw_funnel(each: admin_pb2.Round) -> list[FunnelBar]:
    """Return the known stages of an attempt, from the clients that were waiting to the merged updates."""
    known = [
        stage for stage in descriptions.funnel_stages(each) if stage.count or stage.name in ("selected", "reported")
    ]
    widest = max((stage.count or 0 for stage in known), default=0)
    bars: list[FunnelBar] = []
    previous = 0
    for stage in known:
        count = stage.count or 0
        share = 100.0 * count / widest if widest else 0.0
        of_previous = formats.percent(count, previous) if previous else ""
        bars.append(FunnelBar(stage.name.capitalize(), count, round(share, 1), of_previous, stage.meaning))
        previous = count
    return bars


def timeline(each: admin_pb2.Round, assignments: list[admin_pb2.AssignmentDetails]) -> list[TimelineRow]:
    """Return the assignments with their download, training and upload, as parts of the time of the attempt."""
    begin = min([each.opened_unix_s, *(one.assigned_unix_s for one in assignments)])
    ends = [one.ended_unix_s for one in assignments] + [one.assigned_unix_s for one in assignments]
    end = max([each.opened_unix_s + each.seconds, *ends, begin + 1e-3])
    return [_row(one, begin, end) for one in assignments]


def _row(one: admin_pb2.AssignmentDetails, begin: float, end: float) -> TimelineRow:
    stop = one.ended_unix_s or end
    # A small model is part of the assignment, and a small update part of the report: then these times are unknown.
    trained_from = one.downloaded_unix_s or one.assigned_unix_s
    marks = [
        ("download", one.assigned_unix_s if one.downloaded_unix_s else 0.0, one.downloaded_unix_s),
        ("training", trained_from, one.uploading_unix_s or stop),
        ("upload", one.uploading_unix_s, stop),
    ]
    scale = 100.0 / (end - begin)
    segments: list[TimelineSegment] = []
    texts: list[str] = []
    for kind, start, finish in marks:
        if start and finish >= start:
            width = min(100.0, max(0.4, (finish - start) * scale))
            segments.append(TimelineSegment(kind, round(min(99.6, (start - begin) * scale), 2), round(width, 2)))
            texts.append(f"{kind} {formats.duration(finish - start)}")
    return TimelineRow(one, segments, ", ".join(texts) or formats.NOTHING)
