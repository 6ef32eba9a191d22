"""The pages: functions of what the owner's client has, and of the address."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from fedplat.job import policy, policy_texts, terms
from fedplat.job.policy import OwnerPolicy, PolicyDecision
from fedplat.web.rendering import Pager
from fedplat_client import activity_report
from fedplat_client._consent import decisions
from fedplat_client._consent.terms import OfferedJob
from fedplat_client._page import steward as stewards
from fedplat_client._page.steward import MAX_JOBS, Steward
from fedplat_client.activity_report import ActivityReport

PAGE_SIZE = 50
MAX_MONTHS = 200
"""Rows of the table by month and job."""
_DIGEST = re.compile("[0-9a-f]{64}")
_SHORT = ("purpose, as stated", "what leaves", "who sees it", "how often", "guarantee")
"""What a list says of a job."""


class NoPageError(Exception):
    """An address that names no page."""


class FormError(Exception):
    """A form or an address with a mistake; the message is for the person who filled it in."""


@dataclasses.dataclass(frozen=True)
class StewardPage:
    """A page: a template and its data. `section` is its entry of the menu."""

    template: str
    title: str
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    section: str = ""
    status: int = 200


@dataclasses.dataclass(frozen=True)
class OwnerVisit:
    """A request for a page. `names` are the variables of the address, `query` its parameters."""

    steward: Steward
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]


def list_waiting(visit: OwnerVisit) -> StewardPage:
    """Return the page of the jobs that wait for a decision, and of those that a policy decides."""
    offers = visit.steward.list_offers()
    waiting = [each for each in offers if each.job is not None and each.standing.verdict == "ask"]
    data = {
        "waiting": [(each, _describe(each.job, _SHORT)) for each in waiting if each.job is not None],
        "others": [each for each in offers if each not in waiting and each.decision is None],
        "num_most": MAX_JOBS,
    }
    return StewardPage("waiting.html", "Waiting", data, "waiting")


def _describe(job: OfferedJob, titles: Sequence[str] = ()) -> list[terms.JobFact]:
    found = terms.describe(job.spec)
    return [each for title in titles for each in found if each.title == title] if titles else found


def list_decided(visit: OwnerVisit) -> StewardPage:
    """Return the page of the decisions."""
    found = visit.steward.list_decisions()
    uses = visit.steward.summarize().uses
    rows = [
        (each, list(decisions.list_limits(each.decision)), uses.count(each.digest, "train"))
        for each in found
        if each.decision is not None
    ]
    return StewardPage("decided.html", "Approved", {"rows": rows, "num_most": MAX_JOBS}, "decided")


def show_job(visit: OwnerVisit) -> StewardPage:
    """Return the page of a job, with the forms to decide on it."""
    found = visit.steward.find(parse_digest(visit.names["digest"]))
    if found.job is None and found.decision is None and not found.problem:
        raise NoPageError
    job = found.job
    last = visit.steward.find_last_approved(job) if job is not None else None
    data = {
        "found": found,
        "job": job,
        "facts": _describe(job) if job is not None else [],
        "limits": list(decisions.list_limits(found.decision)) if found.decision is not None else [],
        "rounds": visit.steward.summarize().uses.count(found.digest, "train"),
        "last": last,
        "difference": list(_compare(last, job)) if job is not None and last is not None else [],
        "seen": decisions.mark(found.decision),
        "today": visit.steward.files.now().date().isoformat(),
    }
    section = "waiting" if found.decision is None else "decided"
    return StewardPage("job.html", found.name, data, section)


def parse_digest(text: str) -> str:
    """Return a digest of an address. Raises `NoPageError`."""
    if not _DIGEST.fullmatch(text):
        raise NoPageError
    return text


def _compare(last: OfferedJob, job: OfferedJob) -> Iterator[tuple[str, str]]:
    """Yield the lines in which two job files differ, with those around them: the kind of the line, and its text."""
    kinds = {"+": "added", "-": "removed", " ": "same", "@": "place"}
    before, after = last.offer.job_file.splitlines(), job.offer.job_file.splitlines()
    for line in list(difflib.unified_diff(before, after, lineterm=""))[2:]:
        kind = kinds[line[0]]
        yield kind, "" if kind == "place" else line
    if last.offer.initial_digest != job.offer.initial_digest:
        yield "place", ""
        yield "removed", f"-initial model {last.offer.initial_digest}"
        yield "added", f"+initial model {job.offer.initial_digest}"


def list_released(visit: OwnerVisit) -> StewardPage:
    """Return the page of what has left the client."""
    text = visit.query.get("from", "")
    first = int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 10 and int(text) else 1
    summary = visit.steward.summarize()
    lines = list(stewards.list_latest(summary, visit.steward.site, first, PAGE_SIZE))
    following = first + PAGE_SIZE
    pager = Pager(
        first=first if lines else 0,
        last=first + len(lines) - 1 if lines else 0,
        total=summary.num_lines,
        next_address=f"{visit.path}?{urlencode({'from': following})}" if following <= summary.num_lines else "",
        first_address=visit.path if first > 1 else "",
    )
    shown = summary.months[:MAX_MONTHS]
    jobs = {digest: visit.steward.find(digest).job for digest in {each.digest for each in shown if each.digest}}
    guarantees = {digest: stewards.find_fact(job, "guarantee") for digest, job in jobs.items() if job is not None}
    data = {"summary": summary, "months": shown, "guarantees": guarantees, "lines": lines, "pager": pager}
    return StewardPage("released.html", "What left", data, "released")


def show_policy(visit: OwnerVisit) -> StewardPage:
    """Return the page of the policy; with a job, of what each rule says of it."""
    files, text = visit.steward.files, visit.query.get("job", "")
    found = visit.steward.find(parse_digest(text)) if text else None
    if found is not None and found.job is None:
        raise NoPageError
    problem, owners, decision = "", OwnerPolicy(), None
    try:
        owners = files.policy.read()
        if found is not None and found.job is not None:
            decision = policy.decide(owners, found.job.spec, found.digest, files.now())
    except ValueError as exc:
        problem = str(exc)
    data = {
        "file": files.policy.path,
        "exists": files.policy.path.exists(),
        "problem": problem.splitlines(),
        "rules": _list_rules(owners, decision),
        "unknown": policy_texts.describe_unknown(owners),
        "offers": [each for each in visit.steward.list_offers() if each.job is not None],
        "found": found,
        "decision": decision,
    }
    return StewardPage("policy.html", "Policy", data, "policy")


def _list_rules(owners: OwnerPolicy, decision: PolicyDecision | None) -> list[dict[str, Any]]:
    named = [(f"deny {number}", rule) for number, rule in enumerate(owners.deny, 1)]
    named += [(f"allow {number}", rule) for number, rule in enumerate(owners.allow, 1)]
    contrary = {each.rule: each.contrary for each in decision.findings} if decision is not None else {}
    return [
        {"name": name, "conditions": policy_texts.describe_rule(rule), "contrary": contrary.get(name)}
        for name, rule in named
    ]


def show_report(visit: OwnerVisit) -> StewardPage:
    """Return the page of the report of a period."""
    report = make_report(visit)
    data = {"report": report, "query": urlencode({"from": report.since, "to": report.until}), "filled_in_by": _UNKNOWN}
    return StewardPage("report.html", "Report", data, "report")


_UNKNOWN = activity_report.UNKNOWN


def make_report(visit: OwnerVisit) -> ActivityReport:
    """Return the report of the period of an address; by default, of this year until today."""
    now = visit.steward.files.now()
    since = _parse_day(visit.query.get("from", ""), now.date().replace(month=1, day=1))
    until = _parse_day(visit.query.get("to", ""), now.date())
    if until < since:
        raise FormError(f"The last day, {until}, is before the first one, {since}; exchange them.")
    moment = datetime.datetime.now(datetime.UTC)
    return activity_report.build_report(visit.steward.site, since, until, visit.steward.report_jobs(), moment)


def _parse_day(text: str, default: datetime.date) -> datetime.date:
    try:
        return activity_report.parse_day(text) if text else default
    except ValueError as exc:
        raise FormError(f"{str(exc)[:1].upper()}{str(exc)[1:]}.") from exc


def download_markdown(visit: OwnerVisit) -> Iterable[str]:
    """Return the report as Markdown."""
    return [activity_report.write_markdown(make_report(visit))]


def download_json(visit: OwnerVisit) -> Iterable[str]:
    """Return the report as JSON."""
    return [msgspec.json.format(msgspec.json.encode(make_report(visit))).decode() + "\n"]


PageView = Callable[[OwnerVisit], StewardPage]
Download = Callable[[OwnerVisit], Iterable[str]]
PAGES: Mapping[str, PageView] = {
    "/": list_waiting,
    "/approved": list_decided,
    "/jobs/{digest}": show_job,
    "/left": list_released,
    "/policy": show_policy,
    "/report": show_report,
}
MENU = (
    ("waiting", "/", "Waiting"),
    ("decided", "/approved", "Approved"),
    ("released", "/left", "What left"),
    ("policy", "/policy", "Policy"),
    ("report", "/report", "Report"),
)
"""Section, address and title of each entry of the menu."""
