"""All tables of a job file as one record, without the checks between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from fedplat import aggregate, modes, privacy
from fedplat.gossip.options import Gossip
from fedplat.job import sections
from fedplat.job.pool import PoolOptions, ServerStep, WarmStart
from fedplat.parallel import Parallel
from fedplat.secure_aggregation.options import SecureAggregation

OUTLIER_FACTOR = 1000.0
MAX_WEIGHT_FACTOR = 10.0


class JobTables(Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of a training job, each with its own checks."""

    name: sections.Name
    """Name of the job: letters, digits and `_.-`."""
    population: sections.Name
    """Population whose clients may take part."""
    trainer: sections.Name
    """Name under which the training function is installed on the clients."""
    rounds: sections.Count
    """Number of committed rounds after which the job is complete."""
    model: sections.Model
    """Source of the initial model."""
    selection: sections.Selection
    """Clients that take part, and when an attempt closes."""
    mode: modes.Sync | modes.Buffered | modes.StaleSynchronous | modes.Cyclic | Gossip = modes.Sync()
    """Synchronous rounds, asynchronous training with a buffer of updates, stale synchronous parallel training, training
    by one client after the other, or an exchange between silos without a server's model."""
    config: dict[str, sections.Scalar] = {}
    """Hyper-parameters that the trainer finds in `task.config`."""
    durability: Literal["spool", "memory"] = "spool"
    """`"spool"`: accepted updates are stored on the server's disk until their version is committed, so a killed server
    continues the open attempt. `"memory"`: updates are never written to disk (Linux), and a crash costs the open
    attempt, which is retried, but never the job."""
    deadlines: sections.Deadlines = sections.Deadlines()
    """Duration of each phase."""
    retry: sections.Retry = sections.Retry()
    """Back-off between attempts at the same round."""
    updates: sections.Updates = sections.Updates()
    """Weights and bounds of updates."""
    compression: sections.Compression = sections.Compression()
    """Codecs of updates and versions."""
    aggregation: aggregate.RuleOptions = aggregate.FedAvg()
    """Aggregation rule and its options."""
    robust: aggregate.Robust | None = None
    """Robust aggregation in place of the mean; none: the rule's own mean."""
    privacy: privacy.Privacy | None = None
    """Differential privacy of clients; none: no guarantee."""
    secure_aggregation: SecureAggregation | None = None
    """Secure aggregation, with which the server learns only sums of updates; none: it sees each update."""
    evaluation: sections.Evaluation = sections.Evaluation()
    """Evaluation of committed models."""
    retention: sections.Retention = sections.Retention()
    """Files and history that the server keeps."""
    pool: PoolOptions | None = None
    """Ranks of the server that work for the job, if it has any; needs `durability = "spool"`."""
    warm_start: WarmStart | None = None
    """Training on the server's data before round 1; none: round 1 begins with the initial model."""
    server_step: ServerStep | None = None
    """Training on the server's data at the end of rounds; none: only clients train."""
    flower: sections.Flower | None = None
    """Flower app whose messages the rounds exchange; none: clients train the job's model."""

    @property
    def client_config(self) -> Mapping[str, sections.Scalar]:
        """The values that clients find in `task.config`."""
        return self.config if self.flower is None else self.flower.run_config

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the server's own training is divided into."""
        return self.pool.ranks if self.pool is not None else 1

    @property
    def parallel(self) -> Parallel | None:
        """The layout of the ranks that train the model; None: each has the whole model."""
        return self.pool.parallel if self.pool is not None else None

    @property
    def buffered(self) -> modes.Buffered | modes.StaleSynchronous | None:
        """The buffer options of an asynchronous job; None if it has synchronous rounds.

        Stale synchronous parallel training has a buffer of one update.
        """
        return self.mode if isinstance(self.mode, (modes.Buffered, modes.StaleSynchronous)) else None

    @property
    def stale_synchronous(self) -> modes.StaleSynchronous | None:
        """The options of stale synchronous parallel training; None in the other modes."""
        return self.mode if isinstance(self.mode, modes.StaleSynchronous) else None

    @property
    def gossip(self) -> Gossip | None:
        """The options of a decentralised job; None if a server averages."""
        return self.mode if isinstance(self.mode, Gossip) else None

    @property
    def max_participations(self) -> int:
        """The number of rounds in which a client may take part; 0: no limit."""
        return self.privacy.max_participations if self.privacy is not None else 0

    @property
    def remembers(self) -> bool:
        """True if selection depends on participation in earlier rounds."""
        return self.selection.remembers or self.max_participations > 0

    @property
    def num_wanted(self) -> int:
        """The number of clients that the job needs at work at the same time."""
        if self.gossip is not None:
            return self.selection.goal
        return self.buffered.concurrency if self.buffered is not None else self.selection.target

    @property
    def outlier_factor(self) -> float:
        """The maximum norm of an update, relative to the median; 0: no limit.

        By default 1000, and 0 if clipping or a robust rule bounds the influence of an update.
        """
        if self.updates.outlier_factor is not None:
            return self.updates.outlier_factor
        if self.flower is not None or self.secure_aggregation is not None:
            return 0.0
        return 0.0 if self.updates.clips or self.robust is not None else OUTLIER_FACTOR

    @property
    def max_weight_factor(self) -> float:
        """The maximum number of examples that an update counts for, relative to the median; 0: no limit.

        By default 10 with `weighting = "examples"`. A private job and one with secure aggregation have a bound of their
        own: no update has a weight above 1.
        """
        updates, bounds = self.updates, (self.privacy, self.flower, self.secure_aggregation)
        if updates.weighting == "uniform" or any(each is not None for each in bounds):
            return 0.0
        factor = updates.max_weight_factor
        return MAX_WEIGHT_FACTOR if factor is None else factor

    def weight(self, num_examples: float, staleness: int = 0, most: float = math.inf) -> float:
        """Return the weight of an update that was trained on `num_examples` and is `staleness` versions behind.

        It counts for at most `most` examples.
        """
        most = min(most, self.updates.max_examples)
        weight = 1.0 if self.updates.weighting == "uniform" else min(num_examples, most)
        if self.privacy is not None and self.updates.weighting == "examples":
            weight /= self.updates.max_examples  # at most 1
        return self.mode.weight(staleness) * weight


def require_flower(spec: JobTables) -> sections.Flower:
    """Return the options of a job with a Flower app."""
    assert spec.flower is not None
    return spec.flower
