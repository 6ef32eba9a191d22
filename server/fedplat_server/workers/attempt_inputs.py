"""The inputs of an attempt's aggregate: plain records, from which the daemon and the ranks of the pool compute it.

Files are named by absolute paths. Nothing here needs the daemon's other parts, nor PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from fedplat.aggregate import (
    Contribution,
    Rule,
    first_columns,
    read_columns,
    read_scalars,
    rebase,
    seed_of,
)
from fedplat.aggregate.state import Columns
from fedplat.codecs import container
from fedplat.job import JobSpec, build_rule
from fedplat.model import ModelFile, Values
from fedplat.privacy import KEY_BYTES, Noise
from fedplat.rounds import JobState
from fedplat_server.storage.blobs import BlobStore


class SpooledUpdate(msgspec.Struct, frozen=True):
    """An accepted update: its file, and if the rule needs it that of the version its client began with."""

    path: str
    contribution: Contribution
    origin_path: str = ""


class AttemptInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the updates. `version` is the one that the attempt leads to.

    `base_path` is the file of the version before it, `state_path` that of the rule's state, if there is one.
    `noise_key` is the key of a private job's noise: a backend that computes the aggregate anew draws the same.
    """

    spec: JobSpec
    job_id: str
    version: int
    base_path: str
    state_path: str = ""
    noise_key: bytes = b""

    @classmethod
    def of(cls, job: JobState, blobs: BlobStore) -> AttemptInputs:
        """Return those of a job's next version."""
        latest = job.latest
        return cls(
            spec=job.spec,
            job_id=job.job_id,
            version=latest.version + 1,
            base_path=os.path.abspath(blobs.path(latest.digest)),
            state_path=os.path.abspath(blobs.path(latest.state_digest)) if latest.state_digest else "",
            # Never drawn again: a release that was thrown away reveals nothing of the next one.
            noise_key=os.urandom(KEY_BYTES) if job.spec.privacy is not None else b"",
        )

    def build_rule(self, keep_step: Callable[[bytes], None] = lambda payload: None) -> Rule:
        """Build the job's rule; `keep_step` is called with the encoded step of a job with a downlink."""
        noise = Noise(self.noise_key) if self.noise_key else None
        return build_rule(self.spec, seed_of(self.job_id, self.version), noise, keep_step)

    def num_sums(self, rule: Rule, base: ModelFile) -> int:
        """Return the number of partial sums: one, unless the job splits reports over ranks.

        The k-th update is in sum k modulo this number. The bits depend on it, so it is the same wherever they are made.
        """
        pool = self.spec.pool
        split = pool is not None and pool.split == "reports" and rule.gather is None and base.schema.num_floating > 0
        return pool.ranks if pool is not None and split else 1

    def read_scalars(self, rule: Rule, base: ModelFile) -> Mapping[str, float]:
        """Read the numbers that the job's rule remembers; none before its first version."""
        return read_scalars(self.state_path, rule, base.schema.num_floating) if self.state_path else {}

    def read_columns(self, rule: Rule, base: ModelFile, shard: range) -> Columns:
        """Read the columns of the rule's state that belong to a shard."""
        size = base.schema.num_floating
        if not self.state_path:
            return first_columns(rule, len(shard))
        return read_columns(self.state_path, rule, size, shard)

    def open_update(self, update: SpooledUpdate, base: ModelFile) -> Values:
        """Open an update, to be folded."""
        values = container.open_update(update.path, base, self.spec.compression.uplink)
        return rebase(values, ModelFile.open(update.origin_path), base) if update.origin_path else values


class CloseAttempt(msgspec.Struct, tag="close", frozen=True):
    """All updates were sent; these files, which are there and have their size, are to be filled."""

    model: str
    state: str
    payload: str


class AddUpdate(msgspec.Struct, tag="fold", frozen=True):
    """One more update, to be folded."""

    update: SpooledUpdate


class AttemptAggregate(msgspec.Struct, frozen=True):
    """The files are written and synced; or `problem` is the reason against it.

    "refused": the updates have no result, wherever it is computed; "full": there is no room; "failed": anything else.
    """

    kind: Literal["done", "refused", "full", "failed"] = "done"
    problem: str = ""
    num_updates: int = 0
    total_weight: float = 0.0
    published: Mapping[str, float] | None = None
