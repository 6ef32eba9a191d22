"""The owner's consent to each job: decisions by digest, a policy for those without one, and what was used of them.

What a server says of a job is never believed: its file has the digest that the owner has approved, or it is not read.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from typing_extensions import override

from fedplat import errors, texts
from fedplat.config.plugins import Plugins
from fedplat.job import policy
from fedplat.job.policy import OwnerPolicy, PolicyDecision
from fedplat.job.terms import calibrate_noise, max_rounds, stated_epsilon
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._auth.authenticator import Connection
from fedplat_client._consent import terms
from fedplat_client._consent.terms import OfferedJob
from fedplat_client._state import approvals, released
from fedplat_client._state.approvals import ApprovalFile, Decision, Decisions, OfferedFile, OfferFiles
from fedplat_client._state.data_dir import DataDirectory, SigningKey
from fedplat_client._state.released import ReleasedItem, ReleaseRecord
from fedplat_client._work.consent import Consent, ReleaseMarks
from fedplat_client._work.heartbeat import AssignmentFailedError
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallRefusedError, DataDirectoryError

MAX_APPROVED, MAX_REJECTED = 500, 100
"""Approvals and rejections that a check-in announces; servers accept so many."""
MAX_JOB_FILE = 2**20
"""Largest job file of an offer, in bytes."""
MAX_PAGES = 100
_MAX_PARSED = 256
_logger = logging.getLogger(__name__)
_Use = Literal["train", "evaluate"]


class Standing(NamedTuple):
    """Whether a job may run now, and why: in words for the owner, and for the operator of the job if it may not."""

    verdict: policy.Verdict
    reason: str


class PolicyFile:
    """A policy, which is parsed again when its file has changed; without a file, all jobs are asked about."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[bytes, OwnerPolicy] | None = None

    def read(self) -> OwnerPolicy:
        """Return the policy. Raises `ValueError` with its mistakes, one in each line."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return OwnerPolicy()
        except OSError as exc:
            raise ValueError(f"the policy {self.path} cannot be read: {exc}") from exc
        if self._last is None or self._last[0] != content:
            try:
                self._last = content, policy.parse_policy(content.decode())
            except errors.JobFileError as exc:
                raise ValueError(f"the policy {self.path}: {exc}") from exc
        return self._last[1]


class Uses:
    """The rounds in which a client has taken part, by the digests of jobs, from the record of what has left it.

    The same round again with the same model is no other one: an attempt that is repeated gives the server no more than
    a second training. With another model it is one more, whatever number the server gives it.
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], set[tuple[int, str]]] = collections.defaultdict(set)

    def add(self, digest: str, content: str, round: int, base_digest: str) -> None:
        """Count a line of the record."""
        if digest:
            self._rounds[digest, _use_of(content)].add((round, base_digest))

    def count(self, digest: str, use: _Use) -> int:
        """Return the number of rounds of a job."""
        return len(self._rounds[digest, use])

    def has(self, digest: str, use: _Use, round: int, base_digest: str) -> bool:
        """Return whether a round was counted."""
        return (round, base_digest) in self._rounds[digest, use]


def _use_of(content: str) -> _Use:
    return "evaluate" if content == "metrics" else "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnerFiles:
    """What the owner's decisions are made of, also without a running client: files, and the local time (`now`)."""

    approvals: ApprovalFile
    offers: OfferFiles
    policy: PolicyFile
    plugins: Plugins
    now: Callable[[], datetime.datetime] = datetime.datetime.now
    _jobs: dict[str, OfferedJob] = dataclasses.field(default_factory=dict[str, OfferedJob], init=False)

    def read(self, digest: str) -> OfferedJob | None:
        """Return an offered job; None if the client does not have its file. Raises `JobFileError`."""
        if digest not in self._jobs and (offer := self.offers.find(digest)) is not None:
            if len(self._jobs) >= _MAX_PARSED:
                self._jobs.clear()
            self._jobs[digest] = terms.read_offer(digest, offer, self.plugins)
        return self._jobs.get(digest)

    def judge(self, job: OfferedJob, decision: Decision | None) -> tuple[Standing, PolicyDecision | None]:
        """Return whether a job may run now, by its decision or else by the policy, which is then returned, too."""
        if decision is not None:
            return _judge(job, decision, self.now().date()), None
        found = policy.decide(self.policy.read(), job.spec, job.digest, self.now())
        reason = {
            "allow": f"allowed by the rule {found.rule} of the owner's policy",
            "refuse": f"refused by the owner's policy ({found.rule})",
            "ask": "not approved yet: the owner of this client has to approve it",
        }[found.verdict]
        return Standing(found.verdict, reason), found


def _judge(job: OfferedJob, decision: Decision, today: datetime.date) -> Standing:
    if decision.verdict != "approved":
        said = f": {decision.reason}" if decision.reason else ""
        return Standing("refuse", f"{decision.verdict} by the owner of this client{said}")
    if decision.is_over(today):
        return Standing("refuse", f"the approval of this client's owner ended on {decision.until}")
    if decision.max_epsilon is not None:
        epsilon = stated_epsilon(job.spec)
        if epsilon is None or epsilon > decision.max_epsilon:
            stated = "states none" if epsilon is None else f"has {epsilon:g}"
            text = (
                f"the owner of this client allows an epsilon of at most {decision.max_epsilon:g}, and the job {stated}"
            )
            return Standing("refuse", text)
    return Standing("allow", "approved by the owner of this client")


def open_files(
    directory: DataDirectory, key: SigningKey, policy_path: str | os.PathLike[str] | None, plugins: Plugins
) -> OwnerFiles:
    """Return the files of a client's owner; by default the policy is in the client's folder."""
    return OwnerFiles(
        approvals=ApprovalFile(directory.approvals, key),
        offers=OfferFiles(directory.offers),
        policy=PolicyFile(directory.policy if policy_path is None else Path(policy_path)),
        plugins=plugins,
    )


def note_decision(record: ReleaseRecord, decisions: Decisions) -> None:
    """Note the number of the owner's last decision in the record. Raises `DataDirectoryError`."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    nothing = released.ReleasedLine(
        content="decision", time=time, job_id="", job="", round=0, attempt=0, trainer="", approvals=decisions.counter
    )
    try:
        record.add(nothing)
    except OSError as exc:
        raise DataDirectoryError(f"the record {record.path} cannot be written: {exc}; free space") from exc


class OwnerConsent(Consent):
    """The consent of an owner who approves each job, by itself or by a policy.

    A round ends under the policy with which it began; a revocation, and the end of an approval, count at once. Raises
    `DataDirectoryError` if a file of it is not the client's own, or an older one than the record says.
    """

    longest_wait_s = 10.0

    def __init__(self, files: OwnerFiles, record: ReleaseRecord, clock: Callable[[], float]) -> None:
        self._files = files
        self._record = record
        self._clock = clock
        self._refreshed_at = -math.inf
        self._uses, self._least_counter = Uses(), 0
        try:
            for line in released.read(record.path):
                self._uses.add(line.job_digest, line.content, line.round, line.base_digest)
                self._least_counter = max(self._least_counter, line.approvals)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise DataDirectoryError(f"the record {record.path} cannot be read: {exc}; move the file aside") from exc
        self._current: list[str] = []
        self._is_old_server = False
        self._calibrated: dict[str, OfferedJob] = {}
        self._load()

    def _load(self) -> Decisions:
        found = self._files.approvals.load()
        if found.counter < self._least_counter:
            raise DataDirectoryError(
                f"approvals.json has the decisions up to number {found.counter}, and the record of what has left this "
                f"client was written under number {self._least_counter}: it is an older file. Restore the last one, or "
                "delete both files and approve the jobs again"
            )
        if found.counter > self._least_counter:
            note_decision(self._record, found)
            self._least_counter = found.counter
        return found

    @property
    @override
    def is_due(self) -> bool:
        return self._clock() - self._refreshed_at >= self.longest_wait_s

    # --- an assignment ---

    @override
    def check(self, assignment: fleet_pb2.Assignment) -> None:
        job = self._find(assignment.job_digest)
        standing = self._judge(job, self._load())
        if standing.verdict != "allow":
            raise _refuse(standing.reason)
        differences = list(itertools.islice(terms.list_differences(self._calibrate(job), assignment), 3))
        if differences:
            raise _refuse(f"the assignment is not what the owner has approved: {'; '.join(differences)}")
        self._check_rounds(job, assignment)

    @override
    def check_release(self, assignment: fleet_pb2.Assignment, item: ReleasedItem) -> ReleaseMarks:
        decisions = self._load()
        if item.content == "failure":  # of a task that was perhaps refused; its text has nothing of the data
            return ReleaseMarks(approvals=decisions.counter)
        digest, base = assignment.job_digest, assignment.model.digest
        job, decision = self._find(digest), decisions.jobs.get(digest)
        if decision is not None and (standing := self._judge(job, decisions)).verdict != "allow":
            raise _refuse(f"nothing was sent: {standing.reason}")
        self._check_rounds(job, assignment)
        self._uses.add(digest, item.content, assignment.round, base)
        return ReleaseMarks(digest, base, decisions.counter)

    def _find(self, digest: str) -> OfferedJob:
        if not digest:
            text = "the server is older: it does not name the digest of the job, so that no approval can be found"
            raise AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, text)
        try:
            job = self._files.read(digest)
        except errors.FedplatError as exc:
            raise _refuse(f"the file of the job cannot be read: {exc}") from exc
        if job is None:
            raise _refuse("this client does not have the file of the job, so its owner has not approved it")
        return job

    def _judge(self, job: OfferedJob, decisions: Decisions) -> Standing:
        try:
            return self._files.judge(job, decisions.jobs.get(job.digest))[0]
        except ValueError as exc:
            return Standing("refuse", f"the owner's policy has a mistake: {exc}")

    def _calibrate(self, job: OfferedJob) -> OfferedJob:
        if job.digest not in self._calibrated:
            try:
                self._calibrated[job.digest] = dataclasses.replace(job, spec=calibrate_noise(job.spec))
            except errors.FedplatError as exc:
                raise _refuse(f"the noise of this client cannot be derived from the job: {exc}") from exc
        return self._calibrated[job.digest]

    def _check_rounds(self, job: OfferedJob, assignment: fleet_pb2.Assignment) -> None:
        use: _Use = "train" if assignment.task == fleet_pb2.TASK_TRAIN else "evaluate"
        most, count = self._max_rounds(job), self._uses.count(job.digest, use)
        if count >= most and not self._uses.has(job.digest, use, assignment.round, assignment.model.digest):
            rounds = texts.format_count(count, "round")
            raise _refuse(f"this client has taken part in {rounds} of the job, and its owner has approved {most}")

    def _max_rounds(self, job: OfferedJob) -> int:
        decision = self._load().jobs.get(job.digest)
        stated = decision.max_rounds if decision is not None else None
        return max_rounds(job.spec) if stated is None else min(stated, max_rounds(job.spec))

    # --- what the server offers ---

    @override
    def refresh(self, connection: Connection, stop: StopSignal) -> None:
        known = self._files.offers.list()
        request = fleet_pb2.ReviewJobsRequest(known=known[-approvals.MAX_OFFERS :])
        current: list[str] = []
        for _ in range(MAX_PAGES):
            try:
                response = connection.review_jobs(request, stop)
            except CallRefusedError as exc:
                if exc.code != "UNIMPLEMENTED":
                    raise
                self._note_old_server()
                return
            current += [each.digest for each in response.jobs if self._keep(each)]
            request.page_token = response.next_page_token
            if not request.page_token:
                break
        self._current, self._refreshed_at = current, self._clock()

    def _note_old_server(self) -> None:
        if not self._is_old_server:
            self._is_old_server = True
            _logger.warning(
                "The server cannot show its jobs for approval, since it is older than this client: this client runs "
                "none of them until the server is upgraded."
            )

    def _keep(self, job: fleet_pb2.ReviewedJob) -> bool:
        """Store a job that is offered, and return whether the client has it. Raises `DataDirectoryError`."""
        if not job.job_file:
            return self._files.offers.find(job.digest) is not None
        offer = OfferedFile(
            job_file=job.job_file,
            initial_digest=job.initial_digest,
            job_id=job.job_id[:100],
            submitter=job.submitter[:100],
            plugins=tuple(job.plugins[:100]),
        )
        try:
            if len(offer.job_file.encode()) > MAX_JOB_FILE:
                raise errors.JobFileError(f"it has more than {MAX_JOB_FILE} bytes")
            found = terms.read_offer(job.digest, offer, self._files.plugins)
            self._files.offers.add(job.digest, offer)
        except errors.FedplatError as exc:
            name = texts.printable(f"{job.name[:100]} ({job.digest[:16]})")
            _logger.warning("The job %s cannot be shown for approval: %s", name, texts.printable(str(exc)))
            return False
        except OSError as exc:
            raise DataDirectoryError(f"the file of a job cannot be stored: {exc}; free space") from exc
        _logger.info(
            "The server offers the job %s with the digest %s; the command review shows what it does.",
            texts.printable(found.spec.name),
            job.digest[:16],
        )
        return True

    @override
    def announce(self) -> fleet_pb2.OwnerApprovals:
        decisions = self._load()
        wanted = dict.fromkeys([*self._current, *_list_approved(decisions)])
        announced = fleet_pb2.OwnerApprovals()
        for digest in wanted:
            standing = self._stand(digest, decisions)
            if standing.verdict == "allow" and len(announced.approved) < MAX_APPROVED:
                announced.approved.append(digest)
            elif standing.verdict == "refuse" and len(announced.rejected) < MAX_REJECTED:
                announced.rejected.add(digest=digest, text=texts.shorten(standing.reason, approvals.MAX_TEXT))
        return announced

    def _stand(self, digest: str, decisions: Decisions) -> Standing:
        """Return whether the client would run a job now, so that no attempt waits for one that would refuse it."""
        try:
            job = self._find(digest)
            standing = self._judge(job, decisions)
            if standing.verdict == "allow":
                self._calibrate(job)
                most = self._max_rounds(job)
                if most < max_rounds(job.spec) and self._uses.count(digest, "train") >= most:
                    return Standing("refuse", f"this client has taken part in the {most} rounds that its owner allows")
            return standing
        except AssignmentFailedError as exc:
            return Standing("refuse" if digest in self._current else "ask", str(exc))


def _list_approved(decisions: Decisions) -> Iterator[str]:
    """Yield the jobs that were approved, also before they were submitted; the last one first."""
    jobs: Mapping[str, Decision] = decisions.jobs
    return (digest for digest in reversed(jobs) if jobs[digest].verdict == "approved")


def _refuse(text: str) -> AssignmentFailedError:
    return AssignmentFailedError(model_pb2.REASON_NOT_APPROVED, text)
