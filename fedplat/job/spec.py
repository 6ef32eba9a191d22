"""A training job, as a whole."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from fedplat import aggregate, modes, privacy
from fedplat.configuration import read_record, read_toml, shown, shown_key
from fedplat.job import checks, private
from fedplat.job.pool import Pool, ServerStep, WarmStart
from fedplat.job.sections import (
    Compression,
    Count,
    Deadlines,
    Evaluation,
    Model,
    Name,
    Retention,
    Retry,
    Scalar,
    Selection,
    Updates,
)

OUTLIER_FACTOR = 1000.0
MAX_WEIGHT_FACTOR = 10.0


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A training job."""

    name: Name
    """Name of the job: letters, digits and `_.-`."""
    population: Name
    """Population whose clients may take part."""
    trainer: Name
    """Name under which the training function is installed on the clients."""
    rounds: Count
    """Number of committed rounds after which the job is complete."""
    model: Model
    """Source of the initial model."""
    selection: Selection
    """Clients that take part, and when an attempt closes."""
    mode: modes.Sync | modes.Buffered = modes.Sync()
    """Synchronous rounds, or asynchronous training with a buffer of updates."""
    config: dict[str, Scalar] = {}
    """Hyper-parameters that the trainer finds in `task.config`."""
    durability: Literal["spool", "memory"] = "spool"
    """`"spool"`: accepted updates lie on the server's disk until their version is committed, so a server that is killed
    goes on with the open attempt. `"memory"`: updates never touch the disk (Linux), and a crash costs the open attempt,
    which is tried again, and never the job."""
    deadlines: Deadlines = Deadlines()
    """Duration of each phase."""
    retry: Retry = Retry()
    """Back-off between attempts at the same round."""
    updates: Updates = Updates()
    """Weights and bounds of updates."""
    compression: Compression = Compression()
    """Codecs of updates and versions."""
    aggregation: aggregate.Options = aggregate.FedAvg()
    """Aggregation rule and its options."""
    robust: aggregate.Robust | None = None
    """Robust aggregation in place of the mean; none: the rule's own mean."""
    privacy: privacy.Privacy | None = None
    """Differential privacy of clients; none: no promise."""
    evaluation: Evaluation = Evaluation()
    """Evaluation of committed models."""
    retention: Retention = Retention()
    """Files and history that the server keeps."""
    pool: Pool | None = None
    """Ranks of the server that work for the job, if it has any; needs `durability = "spool"`."""
    warm_start: WarmStart | None = None
    """Training on the server's data before round 1; none: round 1 begins with the initial model."""
    server_step: ServerStep | None = None
    """Training on the server's data at the end of rounds; none: clients alone train."""

    def __post_init__(self) -> None:
        if len(self.config) > 1000:
            raise ValueError(f"config has {len(self.config)} keys; expected at most 1000")
        for key, value in self.config.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"config.{shown_key(key)} = {value}: expected a finite number")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"config.{shown_key(key)} = {shown(value)}: expected a number of at most 64 bits")
        checks.check(self)

    def settled(self) -> JobSpec:
        """The job as it is run: a private one with its noise, and the releases that its budget is enough for.

        Raises `JobFileError` if no noise is enough, and `MissingExtraError` without the extra `privacy`.
        """
        return private.settled(self)

    @property
    def mechanism(self) -> privacy.Mechanism | None:
        """How the job's releases are made; None if it is not private, or its noise was not calibrated yet."""
        return private.mechanism(self)

    @property
    def planned(self) -> privacy.Charge | None:
        """What the job may release in all, once it was settled; None if it is not private, or was not."""
        mechanism = self.mechanism
        if self.privacy is None or self.privacy.max_releases is None or mechanism is None:
            return None
        return privacy.Charge(mechanism, self.privacy.max_releases)

    def mechanism_with(self, whole: float) -> privacy.Mechanism:
        """How the releases of a private job would be made with this noise multiplier of a whole round."""
        return private.mechanism_with(self, whole)

    def rule(self, seed: int = 0, noise: privacy.Noise | None = None) -> aggregate.Rule:
        """The aggregation rule that the job file describes; `seed` decides what it draws in an attempt.

        `aggregate.seed_of(job_id, version)` is that of the version that the attempt shall lead to. `noise`, fresh for
        each attempt, is what private jobs make their releases with; without it, their rule makes none.
        """
        rule = self.aggregation.build()
        if self.robust is not None:
            rule = self.robust.build(seed)(rule)
        rule = self.updates.clip(rule)
        release = private.release(self)
        return rule if release is None else privacy.privatized(release, noise)(rule)

    @property
    def num_ranks(self) -> int:
        """How many ranks the server's own training is made for."""
        return self.pool.ranks if self.pool is not None else 1

    @property
    def buffered(self) -> modes.Buffered | None:
        """How the job's updates are buffered; None if it has synchronous rounds."""
        return self.mode if isinstance(self.mode, modes.Buffered) else None

    @property
    def max_participations(self) -> int:
        """In how many rounds a client may take part; 0: in any number."""
        return self.privacy.max_participations if self.privacy is not None else 0

    @property
    def remembers(self) -> bool:
        """Whether selection asks what clients did in earlier rounds."""
        return self.selection.remembers or self.max_participations > 0

    @property
    def num_wanted(self) -> int:
        """How many clients the job wants at work at the same time."""
        return self.mode.concurrency if isinstance(self.mode, modes.Buffered) else self.selection.target

    @property
    def outlier_factor(self) -> float:
        """How many times the median norm an update may have; 0: any number.

        By default 1000, and 0 where clipping or a robust rule bounds what an update does.
        """
        if self.updates.outlier_factor is not None:
            return self.updates.outlier_factor
        return 0.0 if self.updates.clips or self.robust is not None else OUTLIER_FACTOR

    @property
    def max_weight_factor(self) -> float:
        """How many times the median number of examples an update may count for; 0: any number.

        By default 10 with `weighting = "examples"`. A private job has a bound of its own: no update weighs above 1.
        """
        if self.updates.weighting == "uniform" or self.privacy is not None:
            return 0.0
        factor = self.updates.max_weight_factor
        return MAX_WEIGHT_FACTOR if factor is None else factor

    def weight(self, num_examples: float, staleness: int = 0, most: float = math.inf) -> float:
        """The weight of an update that was trained on `num_examples` examples, and is so many versions behind.

        It counts for `most` examples at most.
        """
        most = min(most, self.updates.max_examples)
        weight = 1.0 if self.updates.weighting == "uniform" else min(num_examples, most)
        if self.privacy is not None and self.updates.weighting == "examples":
            weight /= self.updates.max_examples  # 1 at most
        return self.mode.weight(staleness) * weight


def parse_job(text: str) -> JobSpec:
    """Reads a job file. Raises `JobFileError`, whose message has a line for each mistake."""
    return read_record(read_toml(text), JobSpec)
