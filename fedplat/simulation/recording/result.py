"""What a simulation says: records of numbers, which become JSON as they are.

Moments (`…_at`) are virtual seconds since the job was started; nothing here knows how long the computer took.
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


class AttemptResult(Struct, frozen=True, kw_only=True):
    """One attempt that has ended: a round's, or a federated evaluation's.

    `kind` is TRAIN or EVALUATE, `phase` COMMITTED or ABANDONED. `version` is the model version that is the latest
    afterwards. `counts` are the assignments by state (MERGED, LATE, FAILED, REJECTED, SURPLUS, DROPPED). `metrics` are
    what clients reported, weighted; `evaluation` is the score of the committed version on the data that no client has,
    empty where it was not asked for. `staleness` counts the merged updates by how many versions were committed since
    the one that they began with. `bytes_down` and `bytes_up` are what its clients downloaded and sent.
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

    @property
    def committed(self) -> bool:
        """Whether a version came of it, or an evaluation."""
        return self.phase == "COMMITTED"


class Group(Struct, frozen=True, kw_only=True):
    """Clients that have something in common, and their part of what happened; all shares are of 1.

    `name` is `speed 1/10` (the slowest tenth) to `speed 10/10`, or `label=value`. `over` is `share_of_merged`
    divided by `share_of_fleet`: above 1 the group is over-represented.
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
    """Sums over the whole run. `assigned` counts the assignments that have ended, which `counts` has by state.

    `check_ins` are requests for work, `refused` those that ended without any.
    `lost` are assignments whose client became unavailable or silent; the server counts them as LATE, unless the
    attempt ended before their deadline. `events` is what the coordinator was told, in `batches`.
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
    """For each client, how many of its assignments have ended, and how many of them in which way: int64 [clients]."""

    assigned: Counts
    merged: Counts
    late: Counts
    failed: Counts

    def to_dict(self) -> dict[str, list[int]]:
        """The arrays as lists."""
        return {field.name: getattr(self, field.name).tolist() for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The whole run. `status` is the job's at the end (RUNNING if the virtual time was over before it was done)."""

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

    @property
    def rounds(self) -> tuple[AttemptResult, ...]:
        """The attempts of training that were committed."""
        return tuple(each for each in self.attempts if each.kind == "TRAIN" and each.committed)

    def to_dict(self, *, clients: bool = False) -> dict[str, Any]:
        """What JSON can hold; with `clients`, the numbers of every single client too."""
        shown = {
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
            shown["participation"] = self.participation.to_dict()
        return shown
