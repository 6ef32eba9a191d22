"""A job's use of the server's own accelerators: the tables `[pool]`, `[warm_start]` and `[server_step]`.

The result is that of `pool.ranks` ranks, whatever the number of processes: fewer processes take turns, so a pool that
has lost some, or all, changes how long the work takes but not its result.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.aggregate import options as ranges
from fedplat.job.sections import Count, Name

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


class ServerLearning(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training of the model on the server's own data, by a trainer that the operator installed on the server.

    The learning rate is scaled as in Goyal et al. 2017, arXiv 1706.02677, Section 2.1, or Krizhevsky 2014, arXiv
    1404.5997, Section 5.
    """

    trainer: Name
    """Trainer of the server (`fedplat-server run --trainer NAME=module:object`); without it the job is refused."""
    batch_size: Count
    """Examples of one rank in one batch."""
    learning_rate: ranges.Rate
    """Learning rate of one rank."""
    momentum: ranges.Decay = 0.0
    """Momentum of SGD."""
    weight_decay: Coefficient = 0.0
    """Weight decay of SGD."""
    max_grad_norm: Coefficient = 0.0
    """Bound on the norm of a step's gradient; 0: no bound."""
    accumulate: Count = 1
    """Batches of one step, which has `pool.ranks × batch_size × accumulate` examples."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward passes."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor of `learning_rate`: 1, the number of ranks, or its square root."""
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
