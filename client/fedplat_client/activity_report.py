"""A report of what a client has sent in a period: the record of a processor, with the fields of Art. 30 (2) GDPR.

People fill in the fields that neither the record of what has left the client nor the owner's decisions know.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from fedplat import texts
from fedplat_client._state import release_summary, released
from fedplat_client._state.release_summary import JobMonth
from fedplat_client._state.released import ReleasedLine, Site

UNKNOWN = "to be filled in by people"
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~&!#$])")


class ReportField(Struct, frozen=True):
    """A field of the law: its place, what it asks for, and what the client knows of it; nothing: `UNKNOWN`."""

    place: str
    asks: str
    known: tuple[str, ...]


class ReportedMonth(Struct, frozen=True):
    """What has left for a job in a month; `period` has the first and the last day, in UTC."""

    month: str
    job: str
    job_id: str
    digest: str
    trainer: str
    period: str
    num_rounds: int
    sent: Mapping[str, int]
    size_bytes: int
    num_updates: int
    num_masked: int
    min_clients: int
    noise_multiplier: float
    num_other_receivers: int
    protection: str


class ReportedJob(Struct, frozen=True):
    """A job of the period as its file says; `decision` is the last one of the owner on it, empty without one.

    Nothing proves the purpose and the contact that `[approval]` states; they are empty if it does not.
    """

    digest: str
    name: str
    submitter: str
    trainer: str
    kind: str
    purpose: str
    contact: str
    guarantee: str
    decision: str


class ActivityReport(Struct, frozen=True):
    """What a client has sent from one day to another, both included, in UTC."""

    since: str
    until: str
    made_at: str
    server: str
    population: str
    fields: tuple[ReportField, ...]
    months: tuple[ReportedMonth, ...]
    jobs: tuple[ReportedJob, ...]
    num_lines: int
    record: str
    """The result of the check of the record."""


def build_report(
    site: Site, since: datetime.date, until: datetime.date, jobs: Mapping[str, ReportedJob], now: datetime.datetime
) -> ActivityReport:
    """Return the report of a period; `jobs` are those that the client knows, by their digests.

    Raises `OSError`, `msgspec.DecodeError` or `UnicodeDecodeError` if the record cannot be read.
    """
    first, after = since.isoformat(), (until + datetime.timedelta(days=1)).isoformat()
    num_lines = 0

    def choose(lines: Iterable[ReleasedLine]) -> Iterator[ReleasedLine]:
        nonlocal num_lines
        for line in lines:
            if first <= line.time < after:
                num_lines += 1
                yield line

    found = release_summary.sum_up(choose(released.read(site.record)))[::-1]
    record = describe_check(released.verify(site.record))
    digests = dict.fromkeys(each.digest for each in found if each.digest)
    known = tuple(jobs[digest] for digest in digests if digest in jobs)
    return ActivityReport(
        since=first,
        until=until.isoformat(),
        made_at=now.astimezone(datetime.UTC).isoformat(timespec="seconds"),
        server=site.server,
        population=site.population,
        fields=tuple(_list_fields(site, found, known, record)),
        months=tuple(map(_report_month, found)),
        jobs=known,
        num_lines=num_lines,
        record=record,
    )


def parse_day(text: str) -> datetime.date:
    """Return a day, such as `2026-11-28`. Raises `ValueError`."""
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError as exc:
        raise ValueError(f"{texts.quote(text[:40])} is no day; expected one such as 2026-11-28") from exc


def describe_check(found: released.Verification) -> str:
    """Return the result of the check of a record as a sentence."""
    if found.wrong:
        return (
            f"Line {found.wrong:,} of the record is not as it was written, or lines before it were removed; the lines "
            f"up to {found.wrong - 1:,} are unchanged."
        )
    return f"The record has {found.describe_unchanged()}."


def _report_month(found: JobMonth) -> ReportedMonth:
    return ReportedMonth(
        month=found.month,
        job=found.job,
        job_id=found.job_id,
        digest=found.digest,
        trainer=found.trainer,
        period=release_summary.describe_period(found),
        num_rounds=len(found.rounds),
        sent=dict(found.contents),
        size_bytes=found.size_bytes,
        num_updates=found.num_updates,
        num_masked=found.num_masked,
        min_clients=found.min_clients,
        noise_multiplier=found.noise_multiplier,
        num_other_receivers=len(found.receivers),
        protection=found.protection,
    )


def _list_fields(
    site: Site, found: Sequence[JobMonth], jobs: Sequence[ReportedJob], record: str
) -> Iterator[ReportField]:
    yield ReportField("(a)", "name and contact details of the processor, and of its representative", ())
    yield ReportField("(a)", "name and contact details of the data protection officer", ())
    controllers = tuple(map(_describe_controller, jobs))
    yield ReportField("(a)", "name and contact details of each controller, and of its representative", controllers)
    work = (
        *_list_work(found),
        *(f"job {each.name}: purpose as stated: {each.purpose}" for each in jobs if each.purpose),
    )
    yield ReportField("(b)", "categories of processing on behalf of each controller", work)
    receivers = {each for month in found for each in month.receivers}
    recipients = (f"{site.server} (server of the population {site.population})",) if found else ()
    if receivers:
        recipients += (texts.format_count(len(receivers), "other client"),)
    yield ReportField("(c)", "recipients of what has left; where they are, people say", recipients)
    yield ReportField("(c)", "transfers to a third country or an international organisation, and safeguards", ())
    yield ReportField(
        "(d)", "technical and organisational security measures", tuple(_list_measures(found, jobs, record))
    )


def _describe_controller(job: ReportedJob) -> str:
    contact = f"contact as stated: {job.contact}; controller" if job.contact else "controller and contact"
    return f"job {job.name}: submitted by {job.submitter or 'an unknown operator'}; {contact} {UNKNOWN}"


def _list_work(found: Sequence[JobMonth]) -> Iterator[str]:
    by_job: dict[str, list[JobMonth]] = {}
    for each in found:
        by_job.setdefault(each.job_id, []).append(each)
    for months in by_job.values():
        size = texts.size(sum(each.size_bytes for each in months))
        period = f"{months[0].first[:10]} to {months[-1].last[:10]}"
        yield f"job {months[0].job}, trainer {months[0].trainer}: computing on local data, {size} sent, {period}"


def _list_measures(found: Sequence[JobMonth], jobs: Sequence[ReportedJob], record: str) -> Iterator[str]:
    for each in found:
        if each.protection:
            yield f"{each.month}, job {each.job}: hidden from the server: {each.protection}"
    for job in jobs:
        yield f"job {job.name}: guarantee of the job file: {job.guarantee}"
        if job.decision:
            yield f"job {job.name}: {job.decision} by the owner of the data"
    if found:
        yield f"a record is written before each upload. {record}"


def write_markdown(report: ActivityReport) -> str:
    """Return a report as Markdown; names that others have chosen are escaped."""
    return "\n".join(_list_lines(report)) + "\n"


def _list_lines(report: ActivityReport) -> Iterator[str]:
    yield f"# What has left this client from {report.since} to {report.until}"
    yield ""
    yield f"Population {_escape(report.population)} of the server {_escape(report.server)}. Made at {report.made_at}."
    yield ""
    yield "## Record of processing activities (Art. 30 (2) GDPR)"
    yield from _write_table(
        ("", "field", "content"),
        ((each.place, each.asks, "<br>".join(map(_escape, each.known)) or f"*{UNKNOWN}*") for each in report.fields),
    )
    yield ""
    yield "## What has left, by month and job"
    if report.months:
        titles = ("month", "job", "days", "rounds", "sent", "size", "hidden from the server")
        yield from _write_table(titles, map(_write_month, report.months))
    else:
        yield "Nothing has left the client."
    if report.jobs:
        yield ""
        yield "## Jobs"
        titles = ("name", "digest", "submitted by", "trainer", "kind", "guarantee", "decision of the owner")
        yield from _write_table(titles, map(_write_job, report.jobs))
    yield ""
    yield f"{_escape(report.record)} The period has {texts.format_count(report.num_lines, 'line')} of it."


def _write_month(each: ReportedMonth) -> Sequence[str]:
    sent = ", ".join(f"{name} {number:,}" for name, number in each.sent.items())
    size, protection = texts.size(each.size_bytes), each.protection or "-"
    return each.month, _escape(each.job), each.period, f"{each.num_rounds:,}", sent, size, protection


def _write_job(each: ReportedJob) -> Sequence[str]:
    values = (each.name, each.digest, each.submitter or UNKNOWN, each.trainer, each.kind, each.guarantee)
    return *map(_escape, values), _escape(each.decision or "none on this job")


def _write_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _escape(text: str) -> str:
    """Return a text on one line that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", texts.printable(text))
