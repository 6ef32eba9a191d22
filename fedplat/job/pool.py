"""What a job asks of the server's own accelerators: the tables `[pool]`, `[warm_start]` and `[server_step]`.

The math is that of `pool.ranks` ranks, however many processes do it: fewer of them take turns, so a pool that has lost
some, or none at all, changes how long the work takes and not what comes out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.aggregate import options as ranges
from fedplat.job.sections import Count, Name

Coefficient = Annotated[float, Meta(ge=0.0, le=1e30)]


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks that work for the job.

    `split` says how an attempt's updates are spread over them: by `columns` (each rank folds its part of every update;
    the result has the bits of one process), or by `reports` (each folds whole updates, and their sums are added up;
    the result differs from that of one process by rounding, and pays where updates have to be decoded). `backend`
    "auto" is whatever the pool was started with; only a pool with GPUs serves "nccl", and with "gloo" the ranks compute
    on CPUs.
    """

    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    split: Literal["columns", "reports"] = "columns"


class ServerLearning(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model is trained on the server's own data, by a trainer that the operator gave to the server.

    A step has the mean gradient of `pool.ranks * batch_size * accumulate` examples. `learning_rate` is that of one
    rank: with `scaling` "linear" it is multiplied by the number of ranks, with "sqrt" by its root (Goyal et al. 2017,
    arXiv 1706.02677, Section 2.1; Krizhevsky 2014, arXiv 1404.5997, Section 5). Over the first `warmup_steps` it grows
    to that value from its own. `profile` writes traces for TensorBoard into the server's data folder.
    """

    trainer: Name
    batch_size: Count
    learning_rate: ranges.Rate
    momentum: ranges.Decay = 0.0
    weight_decay: Coefficient = 0.0
    max_grad_norm: Coefficient = 0.0
    accumulate: Count = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    scaling: Literal["none", "linear", "sqrt"] = "none"
    warmup_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    profile: bool = False


class WarmStart(ServerLearning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training on public data before round 1; what comes out is version 1 of the job's model.

    Every `checkpoint_every` steps it is saved how far it is; a warm start that was killed goes on from there.
    """

    epochs: Count = 1
    checkpoint_every: Count = 100


class ServerStep(ServerLearning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps on public data at the end of every `every`-th round, before its version is committed.

    `method` "train" learns the data's targets. "distill" learns what the clients' models of the round say of the
    inputs: the mean of their outputs, at `temperature` (Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion
    in Federated Learning", arXiv 2006.07242, Algorithm 1).
    """

    steps: Count
    every: Count = 1
    method: Literal["train", "distill"] = "train"
    temperature: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0
