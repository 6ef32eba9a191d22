"""The results of a simulation: records of numbers, which are written as JSON without changes.

Moments (`…_at`) are virtual seconds since the start of the job; no record has a time of the computer's clock.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat.model import Parameters

Counts = npt.NDArray[np.int64]


class SecureCosts(Struct, frozen=True, kw_only=True):
    """The cost of the secure aggregation of an attempt.

    `groups` is the number of groups, `steps` the number of clients that took each step, by its phase, and `dropped` the
    number of those that were lost before it or in it. `bytes_down` and `bytes_up` are those of an average client whose
    update was added, without the model: keys, shares and the masked update. `client_s` and `server_s` are seconds of a
    core, of such a client and of the server, by the formula of `simulation.secure.costs`.
    """

    groups: int = 0
    steps: dict[str, int] = {}
    dropped: dict[str, int] = {}
    bytes_down: float = 0.0
    bytes_up: float = 0.0
    client_s: float = 0.0
    server_s: float = 0.0


class GossipExchange(Struct, frozen=True, kw_only=True):
    """The exchange of models between silos in a round of a decentralised job.

    `edges` were drawn among `silos`, and `confirmed` count; `trains` is false in a round that only mixes. `distance` is
    the root mean square distance of all silos' models from their mean after the round, and `reported` the relative
    distance before it, as the coordinator knows it (infinite: unknown). `busiest_bytes` are those that the busiest silo
    sent and received.
    """

    silos: int
    edges: int
    confirmed: int
    trains: bool
    distance: float
    reported: float
    busiest_bytes: float


class AttemptResult(Struct, frozen=True, kw_only=True):
    """One attempt that has ended: a round's, or a federated evaluation's.

    `kind` is TRAIN or EVALUATE, `phase` COMMITTED or ABANDONED. `version` is the latest model version after the
    attempt. `counts` are the assignments by state (MERGED, LATE, FAILED, REJECTED, SURPLUS, DROPPED). `metrics` are the
    weighted means of the clients' metrics; `evaluation` is the score of the committed version on the central test data,
    empty if the version was not evaluated. `staleness` counts the merged updates by the number of versions committed
    since their base version. `bytes_down` and `bytes_up` are the clients' downloads and uploads. `secure` is None
    without secure aggregation, and `exchange` in a job that is not decentralised.
    """

    round: int
    attempt: int
    kind: str
    phase: str
    opened_at: float
    collecting_at: float
    ended_at: float
    version: int
    reason: str = ""
    counts: dict[str, int] = {}
    metrics: dict[str, float] = {}
    evaluation: dict[str, float] = {}
    staleness: dict[int, int] = {}
    num_updates: int = 0
    total_weight: float = 0.0
    bytes_down: float = 0.0
    bytes_up: float = 0.0
    secure: SecureCosts | None = None
    exchange: GossipExchange | None = None

    @property
    def committed(self) -> bool:
        """True if the attempt resulted in a version or an evaluation."""
        return self.phase == "COMMITTED"


class Group(Struct, frozen=True, kw_only=True):
    """Clients with a common property, and their shares (from 0 to 1) of the fleet, the examples and the work.

    `name` is `speed 1/10` (the slowest tenth) to `speed 10/10`, or `label=value`. `over` is `share_of_merged`
    divided by `share_of_fleet`: a group above 1 is over-represented.
    """

    name: str
    num_clients: int
    share_of_fleet: float
    share_of_examples: float
    share_of_assigned: float
    share_of_merged: float
    share_of_merged_examples: float
    over: float


class Totals(Struct, frozen=True, kw_only=True):
    """Sums over the whole run. `assigned` is the number of assignments that have ended; `counts` has them by state.

    `check_ins` are requests for an assignment, `refused` those that ended without one. `lost` are assignments whose
    client became unavailable or silent; the server counts them as LATE, unless the attempt ended before their deadline.
    `events` is the number of events that the coordinator processed, in `batches`.
    """

    duration_s: float
    rounds: int
    attempts: int
    abandoned: int
    assigned: int
    counts: dict[str, int]
    lost: int
    check_ins: int
    refused: int
    distinct_clients: int
    bytes_down: float
    bytes_up: float
    events: int
    batches: int


@dataclasses.dataclass(frozen=True)
class ParticipationCounts:
    """The number of each client's assignments that have ended, in total and by outcome: int64 [clients]."""

    assigned: Counts
    merged: Counts
    late: Counts
    failed: Counts

    def to_dict(self) -> dict[str, list[int]]:
        """Return the arrays as lists."""
        return {field.name: getattr(self, field.name).tolist() for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run. `status` is the final status of the job: RUNNING if the simulation ended before it.

    `problem` is why the job has not ended as planned; empty if it is complete, or if its privacy budget is spent.
    `unmasked` are the survivors of attempts that are releases, if clients add the noise (`JobState.unmasked`).
    """

    job: str
    seed: int
    num_clients: int
    status: str
    reason: str
    attempts: tuple[AttemptResult, ...]
    totals: Totals
    staleness: dict[int, int]
    groups: tuple[Group, ...]
    participation: ParticipationCounts
    model: Parameters | None = None
    unmasked: tuple[int, ...] = ()
    problem: str = ""

    @property
    def rounds(self) -> tuple[AttemptResult, ...]:
        """The committed attempts of training."""
        return tuple(each for each in self.attempts if each.kind == "TRAIN" and each.committed)

    @property
    def secure_costs(self) -> list[tuple[AttemptResult, SecureCosts]]:
        """The attempts with secure aggregation, and the costs of it."""
        return [(each, each.secure) for each in self.attempts if each.secure is not None]

    def to_dict(self, *, clients: bool = False) -> dict[str, Any]:
        """Return the result without the model, for JSON; with `clients`, includes the numbers of every client."""
        fields = {
            "job": self.job,
            "seed": self.seed,
            "num_clients": self.num_clients,
            "status": self.status,
            "reason": self.reason,
            "totals": msgspec.to_builtins(self.totals),
            "staleness": {str(key): count for key, count in sorted(self.staleness.items())},
            "groups": msgspec.to_builtins(self.groups),
            "attempts": msgspec.to_builtins(self.attempts, str_keys=True),
        }
        if clients:
            fields["participation"] = self.participation.to_dict()
        return fields


def describe_end(until_s: float) -> str:
    """Return why a simulation ended before its job: at the end of the virtual time that it was given."""
    return f"the virtual time ended (simulation.until_s = {until_s:g})"
