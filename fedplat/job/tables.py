"""All tables of a job file as one record, without the checks between them, and those for the server's accelerators.

The result is that of `pool.ranks` ranks, whatever the number of processes: fewer processes take turns, so a pool that
has lost some, or all, changes how long the work takes but not its result. Only `method = "hogwild"` does not keep this.
With `[pool.parallel]` the ranks divide the model too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat import aggregate, modes, privacy
from fedplat.aggregate import algebra as ranges
from fedplat.gossip.topology import Gossip
from fedplat.job import sections
from fedplat.job.sections import Count, Name
from fedplat.model.turns import Turn
from fedplat.parallel import Parallel
from fedplat.secure_aggregation.messages import SecureAggregation

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
    approval: sections.Approval | None = None
    """What the owners of clients are asked; none: clients take part as their owners have set them up."""
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
    def needs_approval(self) -> bool:
        """True if only clients take part whose owners have approved the job."""
        return self.approval is not None and self.approval.required

    @property
    def client_config(self) -> Mapping[str, sections.Scalar]:
        """The values that clients find in `task.config`."""
        return self.config if self.flower is None else self.flower.run_config

    def turn(self, round: int) -> Turn:
        """Return which tensors clients leave out of their updates in a round, because they rest (`config.alternate`).

        None, where updates of one attempt may be of different rounds, where a codec has feedback for all entries, where
        a server step reads the updates, and where the noise of later rounds cancels that of earlier ones.
        """
        alternate = self.client_config.get("alternate")
        has_own_form = self.compression.uplink is not None or self.server_step is not None or self.flower is not None
        has_tree = self.privacy is not None and self.privacy.participation == "min_separation"
        if not isinstance(alternate, str) or not isinstance(self.mode, modes.Sync) or has_own_form or has_tree:
            return Turn()
        return Turn.of(alternate, round)

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


Coefficient = Annotated[float, Meta(ge=0.0, le=1e30)]


class PoolOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks of the server's accelerators that work for the job."""

    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Number of ranks that the work is divided into. With more processes some are idle; with fewer, each does the work
    of several."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`"nccl"`: only a pool with GPUs, otherwise the server does the work itself. `"gloo"`: the ranks compute on CPUs.
    `"auto"`: the backend that the pool was started with."""
    split: Literal["columns", "reports"] = "columns"
    """`"columns"`: each rank folds its part of every update, and the result has the bits of one process. `"reports"`:
    each rank folds whole updates, which differs by rounding and is faster if updates must be decoded."""
    parallel: Parallel | None = None
    """How the ranks divide the model that the server trains and evaluates; none: each rank has the whole model, and
    computes its part of every batch."""

    def __post_init__(self) -> None:
        if self.parallel is not None and self.parallel.num_ranks != self.ranks:
            found = self.parallel
            raise ValueError(
                f"ranks = {self.ranks}, but pool.parallel has {found.data} data × {found.shard} shard × "
                f"{found.tensor} tensor × {found.pipeline} pipeline = {found.num_ranks}; expected ranks = "
                f"{found.num_ranks}, or another layout"
            )

    @property
    def num_parts(self) -> int:
        """The number of parts of every batch: the ranks, or those of them that do not share one in the layout."""
        return self.ranks if self.parallel is None else self.parallel.num_parts


class ServerLearning(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training of the model on the server's own data, by a trainer that the operator installed on the server.

    The learning rate is scaled as in Goyal et al. 2017, arXiv 1706.02677, Section 2.1, or Krizhevsky 2014, arXiv
    1404.5997, Section 5.
    """

    trainer: Name
    """Trainer of the server (`fedplat-server run --trainer NAME=module:object`); without it the job is refused."""
    batch_size: Count
    """Examples of one rank in one batch; in a layout (`[pool.parallel]`), of the ranks that compute one part of it."""
    learning_rate: ranges.Rate
    """Learning rate of one rank."""
    momentum: ranges.Decay = 0.0
    """Momentum of SGD."""
    weight_decay: Coefficient = 0.0
    """Weight decay of SGD."""
    max_grad_norm: Coefficient = 0.0
    """Bound on the norm of a step's gradient; 0: no bound."""
    accumulate: Count = 1
    """Batches of one step, which has `pool.ranks × batch_size × accumulate` examples; in a layout, `data × shard` in
    place of `pool.ranks`."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward passes."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor of `learning_rate`: 1, the number of ranks (in a layout, `data × shard`), or its square root."""
    warmup_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Steps over which the rate grows from that of one rank to the scaled one."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of all randomness."""
    profile: bool = False
    """Write traces for TensorBoard into `DATA_DIR/traces/JOB_ID`."""


class WarmStart(ServerLearning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training on the server's data before round 1; the result is version 1 of the job's model."""

    epochs: Count = 1
    """Passes over the data."""
    checkpoint_every: Count = 100
    """Steps between two checkpoints, from which a killed warm start continues."""
    method: Literal["sgd", "hogwild"] = "sgd"
    """`"sgd"`: all ranks compute one step together. `"hogwild"`: each rank of one host, on CPUs, changes common weights
    with each of its batches and never waits for the others; with two or more processes the result depends on timing.
    Not with `momentum`, `scaling` or `[pool.parallel]`."""

    def __post_init__(self) -> None:
        if self.method == "sgd":
            return
        if self.momentum:
            raise ValueError(
                f'momentum = {self.momentum}: with method = "hogwild" each rank would have a velocity of its own; '
                'expected momentum = 0, or method = "sgd"'
            )
        if self.scaling != "none":
            raise ValueError(
                f'scaling = "{self.scaling}": with method = "hogwild" each batch of one rank is an update of its own; '
                'expected scaling = "none", or method = "sgd"'
            )


class ServerStep(ServerLearning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training on the server's data at the end of rounds, before their version is committed.

    Distillation is Algorithm 1 of Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion in Federated
    Learning", arXiv 2006.07242.
    """

    steps: Count
    """Steps at the end of a round."""
    every: Count = 1
    """Every n-th round ends with these steps."""
    method: Literal["train", "distill"] = "train"
    """`"train"`: learn the data's targets. `"distill"`: learn the mean output of the clients' models of the round; not
    with `durability = "memory"`, `[privacy]`, `[robust]` or buffers."""
    temperature: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0
    """With `"distill"`: divisor of the logits."""
