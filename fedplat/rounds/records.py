"""The coordinator's state of a job, as frozen records; a store keeps one row for each.

An assignment is identified for good by the attempt that it was made in: so are its row and its upload. In a job with a
buffer it may outlive that attempt; then the job carries it over, and the next attempt takes it over.

Moments (`..._at`) are seconds on the clock of the coordinator's driver: monotonic in the daemon, virtual in a
simulation. A restart begins a new clock: a store returns only the moments of assignments, translated to the new clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from msgspec import Struct, field, structs

from fedplat import aggregate, job
from fedplat.config.loaded_plugins import PluginVersion
from fedplat.rounds import persistent_map, states


class AttemptKey(NamedTuple):
    """The identity of an attempt: job, round and number."""

    job_id: str
    round: int
    number: int

    def __str__(self) -> str:
        return f"{self.job_id} round {self.round} attempt {self.number}"


class AssignmentId(NamedTuple):
    """The identity of an assignment and of its update: the attempt that it was made in, and the client."""

    attempt: AttemptKey
    client_id: str

    def __str__(self) -> str:
        return f"{self.client_id} in {self.attempt}"


class SecureMessages(Struct, frozen=True):
    """A client's part in the secure aggregation of an attempt.

    `group` and `position` are its place on the roster, -1 before it has one. The others are the messages that it sent
    (`fedplat.secure_aggregation.messages`), empty before: `keys`, `shares`, `confirmation` and `answer`.
    """

    group: int = -1
    position: int = -1
    keys: bytes = b""
    shares: bytes = b""
    confirmation: bytes = b""
    answer: bytes = b""


class Assignment(Struct, frozen=True):
    """One client's participation in a job: the attempt that it was made in, and the version that it began with.

    `kind` is that of the attempt: what the client has to do. `took_s` is the time from the assignment to the report
    or, in a secure aggregation, to the keys; `report_number` grows from report to report, which is the order in which
    updates are folded; `update_bytes` is the size of the update as received. `folded_into` is the attempt whose sum the
    update is part of, `staleness` the number of versions committed in between, and `weight` its weight there;
    `folded_into` is None for a report that waits for the next attempt. `norm` is the update's L2 norm, which private
    jobs do not store. `secure` is the client's part in the secure aggregation, if the job has one: then `num_examples`,
    `weight` and `metrics` are not those of the client.
    """

    key: AttemptKey
    client_id: str
    kind: states.AttemptKind
    token_hash: bytes
    state: states.AssignmentState
    base_version: int
    assigned_at: float
    deadline_at: float
    reason: states.Reason | None = None
    text: str = ""
    digest: str = ""
    num_examples: float = 0.0
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    took_s: float | None = None
    report_number: int | None = None
    update_bytes: int = 0
    folded_into: AttemptKey | None = None
    staleness: int = 0
    norm: float | None = None
    secure: SecureMessages | None = None

    @property
    def id(self) -> AssignmentId:
        """The identity of the assignment and of its update."""
        return AssignmentId(self.key, self.client_id)

    @property
    def is_busy(self) -> bool:
        """True if the client is still working."""
        return self.state in states.BUSY_STATES

    @property
    def is_open(self) -> bool:
        """True if it has not ended: the client is working, or its update is to be merged."""
        return self.state in states.OPEN_STATES

    @property
    def contribution(self) -> aggregate.Contribution:
        """The contribution of the reported update to the job's rule; the same each time it is folded."""
        return aggregate.Contribution(self.weight, self.num_examples, self.metrics, self.staleness, self.client_id)


class AssignmentSet(Struct, frozen=True, kw_only=True):
    """Assignments by client.

    `counts` holds the number of assignments by state, and `last_report` the largest number of a report; no assignment
    is late before `next_deadline`. All are kept up to date by `with_assignments`, so that a report does not iterate
    over all of them.
    """

    assignments: Mapping[str, Assignment] = field(default_factory=persistent_map.PersistentMap[Assignment])
    counts: Mapping[states.AssignmentState, int] = field(default_factory=dict[states.AssignmentState, int])
    next_deadline: float | None = None
    last_report: int = 0

    @property
    def reported(self) -> list[Assignment]:
        """The assignments whose report was accepted and is not merged yet, in the order of acceptance."""
        found = [each for each in self.assignments.values() if each.state is states.AssignmentState.REPORTED]
        return sorted(found, key=lambda each: each.report_number or 0)

    @property
    def busy(self) -> list[Assignment]:
        """The assignments of clients that are still working."""
        return [each for each in self.assignments.values() if each.is_busy] if self.num_busy else []

    @property
    def failures(self) -> dict[str, str]:
        """The reasons why clients have failed or their updates were refused, by client."""
        ended = (states.AssignmentState.FAILED, states.AssignmentState.REJECTED)
        found = (each for each in self.assignments.values() if each.state in ended)
        return {each.client_id: each.text or str(each.reason or each.state) for each in found}

    @property
    def num_busy(self) -> int:
        """The number of clients that are still working."""
        return sum(self.counts.get(state, 0) for state in states.BUSY_STATES)

    @property
    def num_reported(self) -> int:
        """The number of clients whose report was accepted and is not merged yet."""
        return self.counts.get(states.AssignmentState.REPORTED, 0)

    @property
    def next_report(self) -> int:
        """A number above that of every report so far, including those that were dropped later.

        After a restart assignments that have ended may be missing, but those that are open keep their numbers.
        """
        ended = (states.AssignmentState.REJECTED, states.AssignmentState.DROPPED)
        return 1 + max(self.last_report, self.num_reported + sum(self.counts.get(state, 0) for state in ended))

    def with_assignments(self, changed: Iterable[Assignment]) -> Self:
        """Return this set with some assignments added or replaced."""
        latest = {assignment.client_id: assignment for assignment in changed}
        counts, next_deadline, last_report = Counter(self.counts), self.next_deadline, self.last_report
        for assignment in latest.values():
            if (before := self.assignments.get(assignment.client_id)) is not None:
                counts[before.state] -= 1
            counts[assignment.state] += 1
            if assignment.is_busy:
                earlier = assignment.deadline_at if next_deadline is None else next_deadline
                next_deadline = min(assignment.deadline_at, earlier)
            last_report = max(last_report, assignment.report_number or 0)
        assignments = persistent_map.to_persistent(self.assignments).update(latest)
        return structs.replace(
            self, assignments=assignments, counts=counts, next_deadline=next_deadline, last_report=last_report
        )

    def find(self, key: AttemptKey, client_id: str) -> Assignment | None:
        """Return the client's assignment of an attempt, if it is in the set."""
        found = self.assignments.get(client_id)
        return found if found is not None and found.key == key else None


NO_ASSIGNMENTS = AssignmentSet()
"""The empty set of assignments."""


def make_assignment_set(assignments: Iterable[Assignment]) -> AssignmentSet:
    """Return a set of these assignments."""
    members = list(assignments)
    return NO_ASSIGNMENTS.with_assignments(members) if members else NO_ASSIGNMENTS


class Attempt(AssignmentSet, frozen=True, kw_only=True):
    """One try at one round, the federated evaluation of a committed version, or a warm start (in round 0).

    `goal` reports close it, `minimum` reports are enough when no client is left to wait for, and `target` clients work
    for it. It waits for clients until `selection_ends_at`. If it hides its sample, it collects until `closes_at` in any
    case. In a step of secure aggregation in which no client is busy, and in all phases of a decentralised job,
    `step_ends_at` is the deadline; at least `num_awaited` messages are missing then. Neither is stored. `num_survivors`
    is the number of updates in the sum of its smallest group, from the moment on at which the clients were asked to
    remove the masks; 0 before. `num_checked_in` and `num_eligible` are the largest numbers of a draw (`count_draw`).
    """

    key: AttemptKey
    kind: states.AttemptKind
    phase: states.AttemptPhase
    base_version: int
    goal: int
    minimum: int
    target: int
    opened_at: float
    selection_ends_at: float
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    ended_at: float | None = None
    closes_at: float | None = None
    num_checked_in: int = 0
    num_eligible: int = 0
    step_ends_at: float | None = None
    num_awaited: int = 0
    num_survivors: int = 0

    def count_draw(self, num_waiting: int, num_eligible: int) -> Self:
        """Return the attempt after a draw from the waiting clients of the population, some of them eligible.

        Clients that it already has were waiting and eligible before, so they are included.
        """
        num_assigned = len(self.assignments)
        return structs.replace(
            self,
            num_checked_in=max(self.num_checked_in, num_assigned + num_waiting),
            num_eligible=max(self.num_eligible, num_assigned + num_eligible),
        )

    @property
    def is_open(self) -> bool:
        """True if it has not ended."""
        return self.phase in states.OPEN_PHASES

    @property
    def awaits_clients(self) -> bool:
        """True if no client works for it, so that it depends on clients that check in."""
        if self.phase is states.AttemptPhase.COLLECTING and self.closes_at is None:
            return not self.num_busy
        return self.phase is states.AttemptPhase.SELECTING


class ModelVersion(Struct, frozen=True):
    """A committed global model: digests of the model, and of the server optimizer's state.

    Version 0 is the initial model. A later version of round 0 is the result of a warm start, or of a rollback, and then
    has the bytes of the version `restored_from`. `state_digest` is empty for rules without state. The delta is the
    encoded step to this version from the version whose digest is `delta_base`; both digests are empty if there is no
    delta. The mean of a decentralised job `is_held_by_clients`: the server has its digest only.
    """

    version: int
    round: int
    attempt: int
    digest: str
    size_bytes: int
    state_digest: str = ""
    delta_digest: str = ""
    delta_size_bytes: int = 0
    delta_base: str = ""
    num_updates: int = 0
    total_weight: float = 0.0
    restored_from: int | None = None
    is_held_by_clients: bool = False

    @property
    def is_aggregate(self) -> bool:
        """True if a round of clients made it: it is not the initial model, nor from a warm start or a rollback."""
        return self.round > 0


class Claim(NamedTuple):
    """A client's last report: the norm of its update, and its number of examples as claimed."""

    client_id: str
    norm: float | None
    num_examples: float


class FutileAttempts(NamedTuple):
    """Failed attempts in a row that another try would only repeat, since the server started.

    `clients` are those that failed in them, and `num_eligible` is the largest number of clients that could be drawn.
    """

    number: int = 0
    clients: frozenset[str] = frozenset()
    num_eligible: int = 0


NO_FUTILE = FutileAttempts()


class ApprovalCount(NamedTuple):
    """How many of the enrolled clients of a job's population have approved it."""

    num_approved: int = 0
    num_clients: int = 0


class JobState(Struct, frozen=True):
    """The state of a job.

    `attempt` is the last one, open or ended. `round` counts committed rounds, `failures` the attempts abandoned in a
    row, and `futile` those of them that another try would only repeat (it is not stored). `durations` holds how long
    the latest reported assignments took, in seconds. `revision` grows with each stored change; the store refuses a
    change to a revision other than its own. `carried_over` are assignments to train that have outlived their attempt,
    while no other attempt to train collects. `claims` holds the latest claim of each client, in order, if the job
    judges reports by more than one attempt (`influence.looks_back`). `plugins` are the versions of the plugins that it
    runs with. `unmasked` are the numbers of survivors (`Attempt.num_survivors`) of all attempts of a job with
    `privacy.trust = "none"` whose masks were requested: each is a release, whether its attempt has committed or not.
    `barred` are clients that a job with secure aggregation does not draw again, because their messages were invalid
    (`REJECTED_MESSAGE`) in an earlier attempt. `protocol` is what only the protocol of its training reads and writes
    (`RoundProtocol.read_state`). `digest` is that of its job file and initial model, by which owners of data approve
    it; it follows from them, and is not stored. `approvals` counts those who have, before the job begins; the clients
    announce it, and so it is not stored either.
    """

    job_id: str
    spec: job.JobSpec
    latest: ModelVersion
    status: states.JobStatus = states.JobStatus.DRAFT
    reason: str = ""
    round: int = 0
    attempt: Attempt | None = None
    failures: int = 0
    futile: FutileAttempts = NO_FUTILE
    resume_at: float | None = None
    durations: tuple[float, ...] = ()
    revision: int = 0
    carried_over: AssignmentSet = NO_ASSIGNMENTS
    claims: tuple[Claim, ...] = ()
    plugins: tuple[PluginVersion, ...] = ()
    unmasked: tuple[int, ...] = ()
    barred: tuple[str, ...] = ()
    protocol: object = None
    digest: str = ""
    approvals: ApprovalCount = ApprovalCount()

    @property
    def algorithms(self) -> frozenset[str]:
        """The algorithms of plugins that a client must have to train."""
        return frozenset(version.name for version in self.plugins if version.kind == "algorithms")

    @property
    def open_attempt(self) -> Attempt | None:
        """The attempt that has not ended, if there is one."""
        return self.attempt if self.attempt is not None and self.attempt.is_open else None

    @property
    def assignment_sets(self) -> tuple[AssignmentSet, ...]:
        """The assignments of the last attempt, and those that the job carries over."""
        return (self.carried_over,) if self.attempt is None else (self.attempt, self.carried_over)

    @property
    def num_busy(self) -> int:
        """The number of clients that work for the job."""
        return sum(group.num_busy for group in self.assignment_sets)

    @property
    def open_assignments(self) -> list[Assignment]:
        """The assignments that have not ended."""
        return [each for group in self.assignment_sets for each in group.assignments.values() if each.is_open]

    def find(self, key: AttemptKey, client_id: str) -> Assignment | None:
        """Return the client's assignment that was made in an attempt; None if the state does not have it any more."""
        for group in self.assignment_sets:
            if (found := group.find(key, client_id)) is not None:
                return found
        return None
