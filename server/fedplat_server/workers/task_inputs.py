"""What the daemon and the ranks send each other: the inputs of an attempt's aggregate, and of training tasks.

Paths are absolute. This module needs neither the rest of the daemon nor PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from fedplat import aggregate, codecs, privacy, rounds
from fedplat.aggregate.state import Columns
from fedplat.codecs import container
from fedplat.config.loaded_plugins import PluginReference, select_references
from fedplat.job import JobSpec, build_rule
from fedplat.job.tables import ServerStep, WarmStart
from fedplat.local_options import NO_PINS, Pins
from fedplat.model import ModelFile, Values
from fedplat.model.turns import spread
from fedplat.parallel import Parallel
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat_server.storage.blobs import BlobStore


class SpooledUpdate(msgspec.Struct, frozen=True):
    """An accepted update: its file and, if the rule needs it, the file of the version that its client trained.

    With `size_bytes`, the update is the part of its file that begins at `start`.
    """

    path: str
    contribution: aggregate.Contribution
    origin_path: str = ""
    start: int = 0
    size_bytes: int | None = None


class AttemptInputs(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs but the updates. `version` is the number of the version that the attempt at `round` produces.

    `base_path` is the file of the previous version, `state_path` that of the rule's state ("": it has no state yet).
    `noise_key` is the key of a private job's noise: a backend that computes the aggregate again draws the same noise.
    `plugins` are the job's plugins, which other processes import.
    """

    spec: JobSpec
    job_id: str
    version: int
    round: int
    base_path: str
    state_path: str = ""
    noise_key: bytes = b""
    plugins: tuple[PluginReference, ...] = ()

    @classmethod
    def of(cls, job: rounds.JobState, blobs: BlobStore, plugins: tuple[PluginReference, ...] = ()) -> AttemptInputs:
        """Return the inputs for a job's next version; `plugins` are those of the server."""
        latest = job.latest
        return cls(
            spec=job.spec,
            job_id=job.job_id,
            version=latest.version + 1,
            round=1 if job.open_attempt is None else job.open_attempt.key.round,
            base_path=os.path.abspath(blobs.path(latest.digest)),
            state_path=os.path.abspath(blobs.path(latest.state_digest)) if latest.state_digest else "",
            # A new key for each attempt: a discarded release reveals nothing about the next one.
            noise_key=os.urandom(privacy.KEY_BYTES) if disclosure_of(job.spec).is_charged else b"",
            plugins=select_references(plugins, job.plugins),
        )

    def build_rule(self, keep_step: Callable[[bytes], None] = lambda payload: None) -> aggregate.Rule:
        """Build the job's rule; `keep_step` is called with the encoded step of a job with a downlink."""
        noise = privacy.Noise(self.noise_key) if self.noise_key else None
        return build_rule(self.spec, aggregate.seed_of(self.job_id, self.version), noise, keep_step, self.round)

    def num_sums(self, rule: aggregate.Rule, base: ModelFile) -> int:
        """Return the number of partial sums: one, unless the job splits reports over ranks.

        The k-th update is in sum k modulo this number. The bits of the result depend on it, so it is the same on every
        backend.
        """
        pool = self.spec.pool
        split = pool is not None and pool.split == "reports" and rule.gather is None and base.schema.num_floating > 0
        return pool.ranks if pool is not None and split else 1

    def read_scalars(self, rule: aggregate.Rule, base: ModelFile) -> Mapping[str, float]:
        """Read the scalars of the rule's state; empty before its first version."""
        return aggregate.read_scalars(self.state_path, rule, base.schema.num_floating) if self.state_path else {}

    def read_memory(self, rule: aggregate.Rule, base: ModelFile) -> bytes:
        """Read the memory of the rule's state; b"" before its first version."""
        return aggregate.read_memory(self.state_path, rule, base.schema.num_floating) if self.state_path else b""

    def read_columns(self, rule: aggregate.Rule, base: ModelFile, shard: range) -> Columns:
        """Read the columns of the rule's state that belong to a shard."""
        size = base.schema.num_floating
        if not self.state_path:
            return aggregate.first_columns(rule, len(shard))
        return aggregate.read_columns(self.state_path, rule, size, shard)

    def open_update(self, update: SpooledUpdate, base: ModelFile) -> Values:
        """Open an update of all tensors, rebased to this attempt's base if the rule needs that."""
        codec = self.spec.compression.uplink
        values = container.open_update(update.path, base, codec, update.start, update.size_bytes)
        values = spread(values, base.schema.uploaded) if self.spec.turn(self.round).groups else values
        return aggregate.rebase(values, ModelFile.open(update.origin_path), base) if update.origin_path else values


class CloseAttempt(msgspec.Struct, tag="close", frozen=True):
    """The message after the last update: the files to fill, which exist and have their final size."""

    model: str
    state: str
    payload: str


class AddUpdate(msgspec.Struct, tag="fold", frozen=True):
    """The message that adds one update to the aggregate."""

    update: SpooledUpdate


class AttemptAggregate(msgspec.Struct, frozen=True):
    """The result of an aggregation: "done" if the files are written and synced, else `problem` is the reason.

    "refused": the updates have no valid aggregate on any backend; "full": the disk is full; "failed": any other error.
    """

    kind: Literal["done", "refused", "full", "failed"] = "done"
    problem: str = ""
    num_updates: int = 0
    total_weight: float = 0.0
    published: Mapping[str, float] | None = None


class TrainerReference(msgspec.Struct, frozen=True):
    """The name of a `ServerTrainer` (`module:object`); `folder` is added to `sys.path`."""

    reference: str
    folder: str


class TeacherModels(msgspec.Struct, frozen=True):
    """The clients' models of a round: the version that they started from, and the files of their updates, in order."""

    base: str
    updates: tuple[str, ...]
    uplink: codecs.CodecOptions | None


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A training by `warm_start` or `server_step`, the job's table of that name; with `teachers`, a distillation.

    The model is in the file `model`; the ranks write the trained one to the new file `result`. Entries that belong to
    the job's rule keep their values. Paths are absolute, and the same for all ranks. `plugins` are the job's plugins.
    With `parallel`, `num_ranks` ranks divide the model.
    """

    trainer: TrainerReference
    rule: aggregate.RuleOptions
    num_ranks: int
    model: str
    result: str
    warm_start: WarmStart | None = None
    server_step: ServerStep | None = None
    round_number: int = 0
    parallel: Parallel | None = None
    checkpoints: str = ""
    traces: str = ""
    teachers: TeacherModels | None = None
    plugins: tuple[PluginReference, ...] = ()
    pins: Pins = NO_PINS


class TrainProgress(msgspec.Struct, frozen=True):
    """The number of completed training steps, and of all."""

    done: int
    total: int


class TrainReply(msgspec.Struct, frozen=True):
    """The outcome of a training: `error`, or the statistics once `result` is written.

    `first_loss` and `last_loss` are means over the first and the last tenth of the steps. `step_profile` has the
    metrics of `fedplat.step_profile` if steps were traced.
    """

    error: str = ""
    num_steps: int = 0
    num_examples: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0
    step_profile: dict[str, float] = {}


class EvaluateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of the model file `model` on a trainer's held-out examples; `parallel` as in `TrainRequest`."""

    trainer: TrainerReference
    rule: aggregate.RuleOptions
    model: str
    parallel: Parallel | None = None
    plugins: tuple[PluginReference, ...] = ()
    pins: Pins = NO_PINS


class EvaluateReply(msgspec.Struct, frozen=True):
    """The metrics, or the error that prevented them."""

    error: str = ""
    metrics: dict[str, float] = {}
