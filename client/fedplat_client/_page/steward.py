"""What the page of a client's owner shows and does: the client's decisions, offers, policy and record."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator

from fedplat import errors
from fedplat.job import policy, terms
from fedplat_client import activity_report
from fedplat_client._consent.owner import OwnerFiles, Standing, Uses
from fedplat_client._consent.terms import OfferedJob
from fedplat_client._state import release_summary, released
from fedplat_client._state.approvals import Decision
from fedplat_client._state.release_summary import JobMonth
from fedplat_client._state.released import Site
from fedplat_client.activity_report import ReportedJob

MAX_JOBS = 200
"""Jobs that a page shows: those that were offered last."""


@dataclasses.dataclass(frozen=True)
class ReviewedOffer:
    """An offered job, whether it may run, and the decision on it, if there is one; `problem` if it cannot be read."""

    digest: str
    job: OfferedJob | None
    standing: Standing
    decision: Decision | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The name of the job; the first digits of its digest if the client does not have its file."""
        return self.job.spec.name if self.job is not None else self.digest[:16]


@dataclasses.dataclass(frozen=True)
class RecordSummary:
    """A record at a moment: what has left by month and job, its number of lines, and the result of its check.

    `uses` counts the rounds that the client has taken part in.
    """

    months: list[JobMonth]
    check: str
    is_whole: bool
    num_lines: int
    uses: Uses


class Steward:
    """The owner of one client's data. `decide` and `fetch` are what the commands do, too: see `Client`."""

    home = "/"

    def __init__(
        self, site: Site, files: OwnerFiles, decide: Callable[[str, Decision], None], fetch: Callable[[], None]
    ) -> None:
        self.site, self.files, self.decide, self.fetch = site, files, decide, fetch
        self.lock = threading.Lock()
        self._summary: tuple[tuple[int, int, int], RecordSummary] | None = None

    @property
    def name(self) -> str:
        """The population and the server of the client."""
        return f"{self.site.population} at {self.site.server}"

    def close(self) -> None:
        """Close nothing: files are read when they are needed."""

    def list_offers(self) -> list[ReviewedOffer]:
        """Return the jobs that the server has offered, the latest one first. Raises `DataDirectoryError`."""
        return [self.find(digest) for digest in self.files.offers.list()[: -MAX_JOBS - 1 : -1]]

    def find(self, digest: str) -> ReviewedOffer:
        """Return what is known of a job. Raises `DataDirectoryError`."""
        decision = self.files.approvals.load().jobs.get(digest)
        try:
            job = self.files.read(digest)
        except errors.FedplatError as exc:
            return ReviewedOffer(digest, None, Standing("refuse", "its file cannot be read"), decision, str(exc))
        if job is None:
            text = f"{decision.verdict} by the owner of this client" if decision is not None else "unknown"
            return ReviewedOffer(digest, None, Standing("ask", text), decision)
        try:
            standing = self.files.judge(job, decision)[0]
        except ValueError as exc:
            standing = Standing("refuse", f"the owner's policy has a mistake: {exc}")
        return ReviewedOffer(digest, job, standing, decision)

    def list_decisions(self) -> list[ReviewedOffer]:
        """Return the jobs that were decided on, the latest decision first. Raises `DataDirectoryError`."""
        jobs = self.files.approvals.load().jobs
        latest = sorted(jobs, key=lambda digest: jobs[digest].at, reverse=True)
        return [self.find(digest) for digest in latest[:MAX_JOBS]]

    def find_last_approved(self, job: OfferedJob) -> OfferedJob | None:
        """Return the job that was approved last, if possible one of the same name, but for a job itself."""
        others = [
            each.job
            for each in self.list_decisions()
            if each.decision is not None and each.decision.verdict == "approved" and each.digest != job.digest
            if each.job is not None
        ]
        same = [each for each in others if each.spec.name == job.spec.name]
        return next(iter(same or others), None)

    def report_jobs(self) -> dict[str, ReportedJob]:
        """Return the jobs that the client knows, as its report names them. Raises `DataDirectoryError`."""
        found = {each.digest: each for each in [*self.list_offers(), *self.list_decisions()]}
        return {digest: _report(each, each.job) for digest, each in found.items() if each.job is not None}

    def summarize(self) -> RecordSummary:
        """Return the summary of the record; it is made again when the file has changed.

        Raises `OSError`, `msgspec.DecodeError` or `UnicodeDecodeError` if it cannot be read.
        """
        path = self.site.record
        try:
            stat = os.stat(path)
            stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
        except FileNotFoundError:
            stamp = 0, 0, 0
        if self._summary is None or self._summary[0] != stamp:
            check = released.verify(path)
            months = release_summary.sum_up(released.read(path))
            uses = Uses()
            for line in released.read(path):
                uses.add(line.job_digest, line.content, line.round, line.base_digest)
            summary = RecordSummary(
                months,
                activity_report.describe_check(check),
                not check.wrong,
                sum(1 for _ in released.read(path)) if check.wrong else check.num_lines,
                uses,
            )
            self._summary = stamp, summary
        return self._summary[1]


def find_fact(job: OfferedJob, title: str) -> str:
    """Return one part of what a job means for the owner of data."""
    return "; ".join(text for each in terms.describe(job.spec) if each.title == title for text in each.texts)


def _report(found: ReviewedOffer, job: OfferedJob) -> ReportedJob:
    spec, decision = job.spec, found.decision
    return ReportedJob(
        digest=job.digest,
        name=spec.name,
        submitter=job.offer.submitter,
        trainer=spec.trainer,
        purpose=spec.approval.purpose if spec.approval is not None else "",
        contact=spec.approval.contact if spec.approval is not None else "",
        kind=policy.kind_of(spec),
        guarantee=find_fact(job, "guarantee"),
        decision=f"{decision.verdict} at {decision.at[:19]}" if decision is not None else "",
    )


def list_latest(summary: RecordSummary, site: Site, first: int, number: int) -> Iterator[released.ReleasedLine]:
    """Yield lines of a record, the latest one first: `number` of them from the `first` one on, counted from 1."""
    end = max(0, summary.num_lines - first + 1)
    yield from reversed(list(released.read_part(site.record, max(0, end - number), end)))
