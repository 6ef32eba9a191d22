"""What happens to the coordinator. Whoever drives it turns sockets, clocks and operators into these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum

from fedplat.rounds.records import AttemptKey, ModelVersion
from fedplat.rounds.states import Reason


class JobAction(StrEnum):
    """What an operator may do to a job."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCommand:
    """An operator starts, pauses, resumes or cancels a job."""

    job_id: str
    action: JobAction


@dataclasses.dataclass(frozen=True, slots=True)
class RollbackOrdered:
    """An operator wants a job to go on from an older version, whose file is there.

    The version has a state if the state's file is there, too.
    """

    job_id: str
    version: ModelVersion


@dataclasses.dataclass(frozen=True, slots=True)
class ServerRestarted:
    """The job was read back after a restart: whoever did its work is gone, what the store and the spool hold is not."""

    job_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class TimerFired:
    """The deadline to which the timer of a job was last set (`Proposal.timers`) has passed."""

    job_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClientCheckedIn:
    """A client is free and waits for work."""

    client_id: str
    population: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    trainers: frozenset[str] = frozenset()
    evaluators: frozenset[str] = frozenset()
    codecs: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLeft:
    """A waiting client waits no longer: its time is over, or its connection is gone."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRevoked:
    """An operator revoked a client: it waits no longer, and its open assignments end."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class CandidatesDrawn:
    """The waiting room gives clients to an attempt that selects. `final`: nobody else will come.

    They were drawn of `num_eligible`. `num_resting` others waited, who may not be drawn before a later round, and
    `num_spent`, who may never be: they took part in as many rounds as they may.
    """

    job_id: str
    client_ids: tuple[str, ...]
    final: bool = False
    num_resting: int = 0
    num_eligible: int = 0
    num_spent: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptEvent:
    """What the events of one attempt have in common."""

    key: AttemptKey

    @property
    def job_id(self) -> str:
        """The job it belongs to."""
        return self.key.job_id


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentReclaimed(AttemptEvent):
    """A client that has an open assignment checked in: it lost the reply, or was restarted."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class UploadStarted(AttemptEvent):
    """A client has finished training and begins to send its update."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateReported(AttemptEvent):
    """A client commits an update (or an evaluation) whose bytes were received and checked.

    `norm` is the update's L2 norm, as it will be folded; None of an evaluation.
    """

    client_id: str
    digest: str
    num_examples: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    update_bytes: int = 0
    norm: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateRejected(AttemptEvent):
    """An update was received and is not acceptable."""

    client_id: str
    reason: Reason
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentFailed(AttemptEvent):
    """A client gives its assignment up."""

    client_id: str
    reason: Reason
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentRevoked(AttemptEvent):
    """The client of an open assignment was revoked: what it has reported does not count."""

    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptAggregated(AttemptEvent):
    """The updates of an attempt were aggregated; the new version's bytes are durable.

    `metrics` are shown of the attempt; None: the means of what its clients reported.
    """

    version: ModelVersion
    metrics: Mapping[str, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AggregationFailed(AttemptEvent):
    """The updates of an attempt could not be aggregated or stored."""

    text: str


JobEvent = (
    OperatorCommand
    | RollbackOrdered
    | ServerRestarted
    | CandidatesDrawn
    | AssignmentReclaimed
    | UploadStarted
    | UpdateReported
    | UpdateRejected
    | AssignmentFailed
    | AssignmentRevoked
    | AttemptAggregated
    | AggregationFailed
)
"""What happens to one job."""

Event = JobEvent | TimerFired | ClientCheckedIn | ClientLeft | ClientRevoked
"""Everything that happens to the coordinator."""
