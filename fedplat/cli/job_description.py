"""`fedplat job describe`: what a job does now and why, on one screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import typer

from fedplat import step_profile
from fedplat.admin import AdminClient, descriptions
from fedplat.cli import formats, job_lists, options, round_description
from fedplat.cli.output import ListLayout, Output, Row, to_record
from fedplat.cli.session import FormatOption, JobArgument, session
from fedplat.job import JobSpec
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

NUM_ROUNDS, NUM_ASSIGNMENTS = 5, 10


@dataclasses.dataclass(frozen=True)
class JobReport:
    """All that a description of a job is made from."""

    job: admin_pb2.Job
    alerts: Sequence[admin_pb2.Alert]
    population: admin_pb2.PopulationCount
    details: admin_pb2.RoundDetails | None
    rounds: Sequence[admin_pb2.Round]
    assignments: Sequence[admin_pb2.AssignmentDetails]
    profile: Mapping[str, float]
    """The metrics of the warm start with the profile of its steps; empty without one."""


def describe_job(
    context: typer.Context,
    job: JobArgument,
    form: FormatOption = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Describe a job: why it waits or failed, its alerts, its last rounds and what the clients did."""
    with session(context, server, as_json, form=form) as command:
        found = collect(command.client, job)
        if command.output.as_json:
            command.output.json(_to_json(found))
        elif not command.output.is_for_people:
            command.output.line(found.job.job_id)
        else:
            _print(command.output, found)


def collect(client: AdminClient, name: str) -> JobReport:
    """Ask the server for all that a description of a job is made from."""
    job = client.show_job(name)
    alerts = [
        alert
        for alert in client.status().alerts
        if alert.job_id == job.job_id or (alert.population == job.population and not alert.job_id)
    ]
    current = job.current if job.HasField("current") else None
    rounds = client.page(
        admin_pb2.ListRoundsRequest(job=job.job_id, all_attempts=True, newest_first=True, page_size=NUM_ROUNDS)
    ).rounds
    last = client.page(admin_pb2.ListAssignmentsRequest(job=job.job_id, page_size=NUM_ASSIGNMENTS)).assignments
    return JobReport(
        job,
        alerts,
        _count_clients(client, job.population),
        client.show_round(job.job_id, current.round, current.attempt) if current is not None else None,
        list(reversed(rounds[:NUM_ROUNDS])),
        last[:NUM_ASSIGNMENTS],
        _find_profile(client, job),
    )


def _find_profile(client: AdminClient, job: admin_pb2.Job) -> Mapping[str, float]:
    spec = job_lists.read_spec(job)
    if spec is None or spec.warm_start is None or not spec.warm_start.profile:
        return {}
    # The first page of all attempts: the warm start is round 0.
    found = client.page(admin_pb2.ListRoundsRequest(job=job.job_id, page_size=1)).rounds
    is_there = found and found[0].kind == admin_pb2.ATTEMPT_KIND_WARM_START
    return dict(found[0].client_metrics) if is_there and step_profile.describe(found[0].client_metrics) else {}


def _count_clients(client: AdminClient, population: str) -> admin_pb2.PopulationCount:
    """Count the clients of a population now: those of `show_fleet` may be a minute old."""

    def count(state: str = "") -> int:
        request = admin_pb2.ListClientsRequest(population=population, state=state, page_size=1)
        return client.page(request).total

    return admin_pb2.PopulationCount(
        population=population, num_clients=count(), num_waiting=count("waiting"), num_busy=count("busy")
    )


def explain(found: JobReport, spec: JobSpec | None) -> str:
    """Return in sentences what a job does now, why, and what an operator can do."""
    job, text = found.job, ""
    match job.status:
        case admin_pb2.JOB_STATUS_DRAFT:
            text = f"it was not started yet. Start it with: fedplat job start {job.job_id}"
        case admin_pb2.JOB_STATUS_PAUSED:
            text = f"it was paused{_because(job)}. Continue it with: fedplat job resume {job.job_id}"
        case admin_pb2.JOB_STATUS_COMPLETED:
            text = f"all its rounds are committed{_because(job)}"
        case admin_pb2.JOB_STATUS_FAILED:
            text = f"it failed{_because(job)}. Its models are kept; submit it again after the cause is gone"
        case admin_pb2.JOB_STATUS_CANCELLED:
            text = f"it was cancelled{_because(job)}. Its models are kept"
        case admin_pb2.JOB_STATUS_RUNNING:
            text = _explain_running(found, spec)
        case _:  # from a newer server
            text = job.reason
    return text


def _because(job: admin_pb2.Job) -> str:
    return f": {job.reason}" if job.reason else ""


def _explain_running(found: JobReport, spec: JobSpec | None) -> str:
    job = found.job
    attempt = found.details.round if found.details is not None else job.current
    place = f"round {formats.rounds(attempt.round, job)}" if attempt.round else "its first round"
    at_work = f", {format_count(attempt.busy, 'client')} at work" if attempt.busy else ""
    if step := descriptions.describe_step(attempt.progress):
        return f"{place} aggregates securely: {step}{at_work}{_until(attempt)}{_because(job)}"
    match attempt.phase:
        case admin_pb2.ATTEMPT_PHASE_COLLECTING:
            text = f"{place} collects reports: {attempt.reported} of {attempt.goal} are there{at_work}"
            return text + _until(attempt) + _because(job)
        case admin_pb2.ATTEMPT_PHASE_COMMITTING:
            return f"{place} is being committed{_because(job)}"
        case _:
            until = f" until {formats.clock(attempt.waiting.until_unix_s)}" if attempt.waiting.until_unix_s else ""
            return f"{place} waits for clients{until}{_because(job)}. {_supply(found, spec, attempt.target)}"


def _until(attempt: admin_pb2.Round) -> str:
    """Return for whom an attempt waits and until when, as the next part of a sentence."""
    text = descriptions.describe_wait(attempt, formats.clock)
    return f"; it {text}" if text else ""


def _supply(found: JobReport, spec: JobSpec | None, target: int) -> str:
    """Compare the clients that a round needs with those of the population."""
    wanted = target or (max(spec.selection.target, spec.selection.wait_for) if spec is not None else 0)
    counts = found.population
    text = (
        f"Of {format_count(counts.num_clients, 'client')} of population {counts.population}, {counts.num_waiting:,} "
        f"wait and {counts.num_busy:,} are busy" + (f"; {wanted:,} must be eligible and wait" if wanted else "")
    )
    if spec is not None and spec.selection.where:
        text += f". Eligible are clients with {spec.selection.where}"
    if spec is not None and spec.selection.min_separation:
        text += f". A client rests for {format_count(spec.selection.min_separation, 'round')} after each of its own"
    return text


def _print(output: Output, found: JobReport) -> None:
    job = found.job
    fields = job_lists.job_fields(job)
    fields["now"] = explain(found, job_lists.read_spec(job))
    if found.profile:
        fields["warm start"] = step_profile.describe(found.profile)
    output.fields(fields)
    if found.alerts:
        output.heading("Alerts")
        for alert in found.alerts:
            output.sentence(formats.alert(alert))
    if found.details is not None:
        round_description.print_funnel(output, found.details.round)
        round_description.print_reasons(output, found.details)
    _print_rows(output, "Last rounds", job_lists.round_layout(job), found.rounds)
    _print_rows(output, "Last assignments", round_description.OF_JOB, found.assignments)


def _print_rows(output: Output, heading: str, layout: ListLayout[Row], rows: Sequence[Row]) -> None:
    if rows:
        output.heading(heading)
        output.rows(rows, layout, "", folds=True)


def _to_json(found: JobReport) -> dict[str, object]:
    return {
        "job": to_record(found.job),
        "alerts": [to_record(alert) for alert in found.alerts],
        "population": to_record(found.population),
        "round": to_record(found.details) if found.details is not None else None,
        "rounds": [to_record(one) for one in found.rounds],
        "assignments": [to_record(one) for one in found.assignments],
        "bottleneck": step_profile.describe(found.profile) or None,
    }
