"""How ranks divide the training of one model: data, sharded, tensor and pipeline parallelism, and their products.

The record is the same for the server's pool (`[pool.parallel]`) and for a silo (`TorchTrainer(parallel=...)`);
`fedplat.pytorch.parallel` carries it out.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from fedplat.config.decoding import prepare_type

Degree = Annotated[int, Meta(ge=1, le=4096)]
Schedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "pipedream"]
_PRECISIONS = ("fp32", "bf16")
_STAGES_OF_A_RANK = {"interleaved-1f1b": 2, "zero-bubble": 2}


class Parallel(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layout of ranks for one model: `data × shard × tensor × pipeline` of them.

    Ranks are numbered with `tensor` innermost, then `shard`, `data` and `pipeline`, so that those that exchange most
    are neighbours (Narayanan et al. 2021, arXiv 2104.04473, Section 3).
    """

    data: Degree = 1
    """Replicas, each of which computes a part of every batch."""
    shard: Degree = 1
    """Ranks that store a part of each tensor, and of its gradient and optimizer state; each computes a part of every
    batch (FSDP; Rajbhandari et al. 2020, arXiv 1910.02054)."""
    tensor: Degree = 1
    """Ranks that compute a part of each operation (Shoeybi et al. 2019, arXiv 1909.08053)."""
    pipeline: Degree = 1
    """Groups of ranks, each of which has some of the model's layers."""
    schedule: Schedule = "1f1b"
    """Order of the micro-batches of a pipeline: GPipe (arXiv 1811.06965), 1F1B (arXiv 2006.09503), interleaved 1F1B
    (arXiv 2104.04473) or zero-bubble (arXiv 2401.10241), which have the same gradients; or PipeDream (arXiv
    1806.03377), which is asynchronous: each batch is a step, without micro-batches."""
    micro_batches: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Micro-batches of each batch of a pipeline; 0: four for each of its stages. `"1f1b"` needs at least `pipeline`,
    and `"interleaved-1f1b"` fewer than that or a number that it can divide into equal rounds of `pipeline` or more."""
    sequence: bool = False
    """With `tensor`: also divide the activations between its operations (arXiv 2205.05198, Section 4.2.2)."""
    reshard: bool = True
    """With `shard`: free the parameters of other ranks between the forward and the backward pass (ZeRO-3). Without it
    they are gathered once for each step (ZeRO-2)."""
    offload: Literal["none", "cpu"] = "none"
    """With `"cpu"`: parameters, gradients and the optimizer's state are in the memory of the host."""
    recompute: Literal["none", "blocks"] = "none"
    """With `"blocks"`: compute the activations of each block again in the backward pass (arXiv 1604.06174)."""

    def __post_init__(self) -> None:
        if self.micro_batches and self.pipeline == 1:
            raise ValueError("micro_batches are for a pipeline; set pipeline, or use accumulate")
        if self.schedule == "pipedream" and self.micro_batches:
            raise ValueError('schedule = "pipedream": each batch is a step; remove micro_batches')
        if self.schedule == "1f1b" and 0 < self.micro_batches < self.pipeline:
            raise ValueError(
                f'micro_batches = {self.micro_batches}: schedule = "1f1b" needs at least one for each of '
                f"{self.pipeline} stages; expected more, or another schedule"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence = true divides activations among tensor ranks; expected tensor = 2 or more")
        if self.schedule == "zero-bubble" and self.tensor > 1:
            # PyTorch iterates over sets of parameters there, and ranks that exchange in different orders wait forever.
            raise ValueError(
                'schedule = "zero-bubble" computes the gradients of weights in an order that tensor ranks do not '
                'share; expected tensor = 1, or schedule = "interleaved-1f1b"'
            )
        if self.schedule == "interleaved-1f1b":
            count, rounds = self.num_micro_batches, max(1, self.num_micro_batches // self.pipeline)
            if count % rounds:
                raise ValueError(
                    f'micro_batches = {count}: schedule = "interleaved-1f1b" computes them in {rounds} equal rounds; '
                    f"expected a multiple of {rounds}, such as one of the {self.pipeline} ranks of the pipeline"
                )
        if self.schedule == "pipedream" and self.num_ranks != self.pipeline:
            raise ValueError('schedule = "pipedream" is for a pipeline alone; expected data, shard and tensor of 1')
        if self.schedule == "pipedream" and (self.offload != "none" or self.recompute != "none"):
            raise ValueError(
                'schedule = "pipedream" keeps several versions of the weights; remove offload and recompute'
            )

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the layout."""
        return math.prod((self.data, self.shard, self.tensor, self.pipeline))

    @property
    def num_parts(self) -> int:
        """The number of parts of every batch: those of different replicas and shards."""
        return self.data * self.shard

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline; some schedules have several on each rank."""
        return self.pipeline * (_STAGES_OF_A_RANK.get(self.schedule, 1) if self.pipeline > 1 else 1)

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of each part of a batch."""
        if self.pipeline == 1 or self.schedule == "pipedream":
            return 1
        return self.micro_batches or 4 * self.num_stages

    def check_ranks(self, num_ranks: int) -> None:
        """Raise `ValueError` unless the layout is for this number of ranks."""
        if self.num_ranks != num_ranks:
            product = f"{self.data} data × {self.shard} shard × {self.tensor} tensor × {self.pipeline} pipeline"
            raise ValueError(f"the layout has {product} = {self.num_ranks} ranks; there are {num_ranks}")

    def check_precision(self, precision: str) -> None:
        """Raise `ValueError` unless a layout has this precision, also one whose ranks are computed in turn."""
        if precision not in _PRECISIONS:
            raise ValueError(
                f'precision = "{precision}": a model that several ranks divide has no scaled gradients; expected '
                '"bf16" or "fp32", or a trainer without a layout'
            )

    def check_steps(self, *, max_grad_norm: float, accumulate: int, precision: str) -> None:
        """Raise `ValueError` if the schedule does not have these options of a training's steps."""
        self.check_precision(precision)
        if self.schedule != "pipedream":
            return
        if max_grad_norm:
            raise ValueError(
                'max_grad_norm: with schedule = "pipedream" each stage changes its weights before the gradient of the '
                'stages before it is known, so there is no total norm; remove it, or set schedule = "1f1b"'
            )
        if accumulate != 1:
            raise ValueError(
                f'accumulate = {accumulate}: with schedule = "pipedream" every batch is a step; expected 1 and a '
                'larger batch_size, or schedule = "1f1b"'
            )
        if precision != "fp32":
            raise ValueError(
                f'precision = "{precision}": schedule = "pipedream" keeps versions of whole float32 weights; expected '
                '"fp32", or schedule = "1f1b"'
            )

    @classmethod
    def from_text(cls, text: str) -> Parallel:
        """Parse `shard=2,tensor=2`, the form of command lines. Raises `ValueError`."""
        table: dict[str, object] = {}
        for item in text.split(","):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or name in table or not value:
                raise ValueError(f"{item.strip()!r}: expected NAME=VALUE, each name once, such as shard=2,tensor=2")
            table[name] = {"true": True, "false": False}.get(value, int(value) if value.isdecimal() else value)
        try:
            return msgspec.convert(table, prepare_type(cls))
        except msgspec.ValidationError as exc:
            raise ValueError(f"{text!r}: {exc}; the names are {', '.join(cls.__struct_fields__)}") from exc
