"""A job's use of the server's own accelerators: the tables `[pool]`, `[warm_start]` and `[server_step]`.

The result is that of `pool.ranks` ranks, whatever the number of processes: fewer processes take turns, so a pool that
has lost some, or all, changes how long the work takes but not its result. Only `method = "hogwild"` does not keep this.
With `[pool.parallel]` the ranks divide the model too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.aggregate import options as ranges
from fedplat.job.sections import Count, Name
from fedplat.parallel import Parallel

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
