"""What an attempt's aggregate is made of: plain records, of which the daemon and the ranks of the pool compute it.

Files are named by absolute paths. Nothing here needs the daemon's other parts, nor PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from fedplat.aggregate import (
    Contribution,
    Rule,
    compress_step,
    first_columns,
    read_columns,
    read_scalars,
    rebased,
    seed_of,
)
from fedplat.aggregate.state import Columns
from fedplat.job import JobSpec, build_rule
from fedplat.model import ModelFile, Values
from fedplat.privacy import KEY_BYTES, Noise
from fedplat.rounds import JobState
from fedplat_server import intake
from fedplat_server.blobs import BlobStore


class Update(msgspec.Struct, frozen=True):
    """An update that was accepted: its file, and that of the version its client began with, if the rule wants it."""

    path: str
    contribution: Contribution
    origin: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the updates. `version` is the one that it leads to, `state` the file of the rule's state, if any.

    `noise` is the key of a private job's noise: who computes the aggregate anew gets the same.
    """

    spec: JobSpec
    job_id: str
    version: int
    base: str
    state: str = ""
    noise: bytes = b""

    @classmethod
    def of(cls, job: JobState, blobs: BlobStore) -> Recipe:
        """That of a job's next version."""
        latest = job.latest
        return cls(
            spec=job.spec,
            job_id=job.job_id,
            version=latest.version + 1,
            base=os.path.abspath(blobs.path(latest.digest)),
            state=os.path.abspath(blobs.path(latest.state_digest)) if latest.state_digest else "",
            # Noise that nobody can make again: a release that was thrown away tells nothing of the next one.
            noise=os.urandom(KEY_BYTES) if job.spec.privacy is not None else b"",
        )

    def rule(self, keep: Callable[[bytes], None] = lambda payload: None) -> Rule:
        """Return the job's rule; of a job with a downlink it encodes its steps, and `keep` gets the payloads."""
        seed = seed_of(self.job_id, self.version)
        rule = build_rule(self.spec, seed, Noise(self.noise) if self.noise else None)
        codec = self.spec.compression.downlink
        return rule if codec is None else compress_step(codec.build(), seed, keep)(rule)

    def num_sums(self, rule: Rule, base: ModelFile) -> int:
        """In how many sums the updates are added up, before those are: one, unless the job splits reports over ranks.

        The k-th update is in sum k modulo this number. The bits depend on it, so it is the same wherever they are made.
        """
        pool = self.spec.pool
        split = pool is not None and pool.split == "reports" and rule.gather is None and base.schema.num_floating > 0
        return pool.ranks if pool is not None and split else 1

    def scalars(self, rule: Rule, base: ModelFile) -> Mapping[str, float]:
        """The numbers that the job's rule remembers; none before its first version."""
        return read_scalars(self.state, rule, base.schema.num_floating) if self.state else {}

    def columns(self, rule: Rule, base: ModelFile, shard: range) -> Columns:
        """The columns of the rule's state that belong to a shard."""
        size = base.schema.num_floating
        return read_columns(self.state, rule, size, shard) if self.state else first_columns(rule, len(shard))

    def opened(self, update: Update, base: ModelFile) -> Values:
        """An update, to be folded."""
        values = intake.open_update(Path(update.path), base, self.spec.compression.uplink)
        return rebased(values, ModelFile.open(update.origin), base) if update.origin else values
