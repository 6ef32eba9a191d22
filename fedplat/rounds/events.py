"""The coordinator's input. Its driver turns sockets, clocks and operators into these events."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum

from fedplat.config.loaded_plugins import PluginVersion
from fedplat.gossip.messages import GossipEvent
from fedplat.job import JobSpec
from fedplat.rounds import records, states


class JobAction(StrEnum):
    """An action of an operator on a job."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCommand:
    """An operator starts, pauses, resumes or cancels a job.

    `plugins` are the versions that the server has of the job's plugins, `problem` the first mistake in the job file
    with them. A start or a resumption adopts these versions.
    """

    job_id: str
    action: JobAction
    plugins: tuple[PluginVersion, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SpecChanged:
    """An operator has changed options of a job; its file is stored with them, and has another digest."""

    job_id: str
    spec: JobSpec
    digest: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ApprovalsCounted:
    """The owners of `num_approved` of the `num_clients` enrolled clients of a job's population have approved it."""

    job_id: str
    num_approved: int
    num_clients: int


@dataclasses.dataclass(frozen=True, slots=True)
class RollbackOrdered:
    """An operator rolls a job back to an older version, whose file exists.

    The version has a state digest if the state's file exists, too.
    """

    job_id: str
    version: records.ModelVersion


@dataclasses.dataclass(frozen=True, slots=True)
class ServerRestarted:
    """The job was read back after a restart. Its workers are gone; the contents of store and spool are not.

    `plugins` and `problem` are as in `OperatorCommand`.
    """

    job_id: str
    plugins: tuple[PluginVersion, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TimerFired:
    """The deadline to which the timer of a job was last set (`Proposal.timers`) has passed."""

    job_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClientCheckedIn:
    """A client is free and waits for an assignment. `session` is its number of sessions: a restart begins one.

    `approvals` are the digests of the only jobs that its owner allows; None: it takes part in any.
    """

    client_id: str
    population: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    trainers: frozenset[str] = frozenset()
    evaluators: frozenset[str] = frozenset()
    codecs: frozenset[str] = frozenset()
    algorithms: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    session: int = 0
    approvals: frozenset[str] | None = None

    def approves(self, digest: str, *, is_needed: bool) -> bool:
        """Return whether the owner of the client allows the job with this digest, or need not be asked."""
        return not is_needed if self.approvals is None else digest in self.approvals


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLeft:
    """A client no longer waits: its poll timed out, or its connection was lost."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRevoked:
    """An operator revoked a client: it no longer waits, and its open assignments end."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class CandidatesDrawn:
    """The clients that the waiting room drew for an attempt that selects. `final`: no more will follow.

    They were drawn from `num_eligible` clients. `num_resting` other clients wait that a later round may draw, and
    `num_spent` that have reached the participation limit, so that no later round may. `num_unable` other clients have
    the trainer, but not the job's codec, algorithm or features. `num_waiting` clients of the population waited before
    the draw. `error` is the error of a policy that failed to draw. `unlike` describes those of them that the job does
    not want (`WaitingRoom.describe_unlike`), and `num_declined` is the number of those that do not want the job.
    """

    job_id: str
    client_ids: tuple[str, ...]
    final: bool = False
    num_resting: int = 0
    num_eligible: int = 0
    num_spent: int = 0
    num_unable: int = 0
    error: str = ""
    num_waiting: int = 0
    unlike: str = ""
    num_declined: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RollCalled:
    """The coordinator has looked which members of a job's clock set are `present`: they wait for work of the job.

    Absent ones leave the set if their time is over. `is_last`: that of all is over, because the attempt has waited for
    a client as long as it may. With `revoked`, only these clients leave, and no one has looked for the others.
    """

    job_id: str
    present: frozenset[str] = frozenset()
    is_last: bool = False
    revoked: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class SilosLost:
    """Silos of a decentralised job have been silent for too long."""

    job_id: str
    client_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptEvent:
    """Base of the events of one attempt."""

    key: records.AttemptKey

    @property
    def job_id(self) -> str:
        """The job of the attempt."""
        return self.key.job_id


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentReclaimed(AttemptEvent):
    """A client with an open assignment checked in: it lost the reply, or was restarted."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class UploadStarted(AttemptEvent):
    """A client has finished training and begins to upload its update."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateReported(AttemptEvent):
    """A client reports an update (or an evaluation) whose bytes were received and checked.

    `norm` is the L2 norm of the update as it will be folded; None for an evaluation.
    """

    client_id: str
    digest: str
    num_examples: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    update_bytes: int = 0
    norm: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KeysAdvertised(AttemptEvent):
    """A client of a secure aggregation has trained, and sends its keys (`messages.KeyAdvertisement`, validated)."""

    client_id: str
    keys: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SharesSent(AttemptEvent):
    """A client sends the shares of its secrets (`messages.SealedShares`, validated against the roster)."""

    client_id: str
    shares: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SurvivorsConfirmed(AttemptEvent):
    """A client confirms the survivors of its group (`messages.Confirmation`, validated)."""

    client_id: str
    confirmation: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MasksAnswered(AttemptEvent):
    """A client answers the shares with which masks are removed (`messages.UnmaskAnswer`, validated)."""

    client_id: str
    answer: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SiloReported(AttemptEvent):
    """A silo of a decentralised job reports what it has done; the events are validated and are the silo's own.

    `metrics` are those of its training, if it announces a model.
    """

    client_id: str
    events: tuple[GossipEvent, ...]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateRejected(AttemptEvent):
    """An update was received and refused."""

    client_id: str
    reason: states.Reason
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentFailed(AttemptEvent):
    """A client gave up its assignment, in the session of that number."""

    client_id: str
    reason: states.Reason
    text: str = ""
    session: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentRevoked(AttemptEvent):
    """The client of an open assignment was revoked, and its report does not count."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptAggregated(AttemptEvent):
    """The updates of an attempt were aggregated, and the new version is durable.

    `metrics` are stored as those of the attempt; None: the means of its clients' metrics. `cohort` are the clients that
    the job's Flower app has drawn for the next round. It is empty if the app has ended, or if the job has no app.
    `refused` are the clients whose updates the app could not use, and why; they are not in the version.
    """

    version: records.ModelVersion
    metrics: Mapping[str, float] | None = None
    cohort: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


@dataclasses.dataclass(frozen=True, slots=True)
class AggregationFailed(AttemptEvent):
    """The updates of an attempt could not be aggregated or stored.

    `culprits` are the clients of a secure aggregation whose messages are the cause. A cause that `is_lasting` fails the
    next attempt too, unlike a full disk or a lost worker.
    """

    text: str
    culprits: tuple[str, ...] = ()
    is_lasting: bool = False


JobEvent = (
    OperatorCommand
    | SpecChanged
    | ApprovalsCounted
    | RollbackOrdered
    | ServerRestarted
    | CandidatesDrawn
    | RollCalled
    | SilosLost
    | AssignmentReclaimed
    | UploadStarted
    | KeysAdvertised
    | SharesSent
    | SurvivorsConfirmed
    | MasksAnswered
    | SiloReported
    | UpdateReported
    | UpdateRejected
    | AssignmentFailed
    | AssignmentRevoked
    | AttemptAggregated
    | AggregationFailed
)
"""Events of one job."""

Event = JobEvent | TimerFired | ClientCheckedIn | ClientLeft | ClientRevoked
"""All events of the coordinator."""
