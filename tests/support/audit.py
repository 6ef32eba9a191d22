"""Measures what releases promise: the daemon's aggregation, run many times with one client's report and without it.

Nothing of the code that makes the promise is used. Of the differences between releases with the client and without
it, the mean is what the client changes, and the spread is the noise; their ratio is the noise multiplier.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import structs

from fedplat.aggregate import Contribution, read_scalars
from fedplat.aggregate.clipping import CLIP_NORM
from fedplat.job import JobSpec, build_rule, find_mechanism
from fedplat.model import Parameters
from fedplat.privacy import tree_sensitivity
from fedplat.rounds import AssignmentId, AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat_server.aggregation.backend import LocalAggregation
from fedplat_server.aggregation.service import Aggregation, AggregationParts
from fedplat_server.database.sql_contents import SmallContents
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.spool import Spool
from support.raw_client import digest_of

CLIP = 0.5
SENT = {"zeros": 0.0, "the norm": 1.0, "against the others": -1.0, "far too much": 1e6}
"""What the one client sends, in multiples of the norm along the first entry."""
OTHERS = {"a": 3.0, "b": 10.0, "c": 25.0, "d": 40.0, "e": 50.0, "f": 800.0}
"""How many examples the others have. All push the first entry up, so that a divisor that depends on reports shows."""
_SPOOL = AttemptKey("spool", 0, 0)
Values = npt.NDArray[np.float64]
Reports = tuple[str, ...]
"""The clients whose reports are merged in an attempt; all other reports were missing, late or rejected."""


def base_model() -> Parameters:
    """200 entries of three floating-point types, and counters that every client has moved."""
    return Parameters.from_arrays(
        {
            "weight": np.zeros(100, np.float32),
            "half": np.zeros((5, 10), np.float16),
            "brain": np.zeros(50, ml_dtypes.bfloat16),
            "steps": np.array([7, 8, 9], np.int64),
        }
    )


def entries(model: Parameters) -> Values:
    """The floating-point entries: "weight", and then those of 16 bits."""
    return np.concatenate([model[name].astype(np.float64).ravel() for name in ("weight", "half", "brain")])


def _sent_by_others(seed: int) -> Parameters:
    update, rng = base_model(), np.random.default_rng(seed)
    for name in ("weight", "half", "brain"):
        update[name][...] = (0.02 * CLIP * rng.normal(size=update[name].shape)).astype(update[name].dtype)
    update["weight"][0] = CLIP * (0.9 + 0.4 * seed)  # most are beyond the norm, and clipped
    update["steps"][:] = 1000 + seed
    return update


def _sent_by_one(multiple: float) -> Parameters:
    update = base_model()
    update["weight"][0] = multiple * CLIP
    update["steps"][:] = 10**6
    return update


LOCAL = AggregationParts(lambda job, find_job, inputs, blobs: LocalAggregation(inputs, blobs))
"""This process aggregates for all jobs."""


class Daemon:
    """A daemon's aggregation over real stores. Updates are received once, and folded in as many attempts as wanted."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self.spec = spec
        self.blobs = BlobStore(folder / "blobs")
        self.spool = Spool(folder / "uploads")
        self.aggregation = Aggregation(self.blobs, self.spool, self._find_version, self._on_ended, LOCAL)
        content = base_model().to_bytes()
        self.first = ModelVersion(0, 0, 0, self.blobs.put_chunks([content]).digest, len(content))
        self._jobs = (f"job-{number}" for number in itertools.count())
        self._ended: dict[AttemptKey, asyncio.Future[AttemptAggregated | AggregationFailed]] = {}
        self._received: dict[str, tuple[str, Contribution]] = {}
        for seed, (name, examples) in enumerate(OTHERS.items()):
            self.receive(name, _sent_by_others(seed), examples)
        for name, multiple in SENT.items():
            self.receive(name, _sent_by_one(multiple), 5000.0)

    def receive(self, name: str, update: Parameters, examples: float) -> Path:
        """Puts an update into the spool; returns its file."""
        content = update.to_bytes()
        key, digest = AssignmentId(_SPOOL, name), digest_of(content)
        self.spool.expect([key])
        upload = self.spool.open(key, digest, len(content), 0)
        upload.write(content)
        upload.close()
        self._received[name] = digest, Contribution(self.spec.weight(examples), examples)
        path = self.spool.complete(key, digest)
        assert path is not None
        return path

    async def attempt(self, job: JobState, reports: Reports) -> AttemptAggregated | AggregationFailed:
        """The outcome of a job's next round."""
        key = AttemptKey(job.job_id, job.round + 1, 1)
        self._ended[key] = asyncio.get_running_loop().create_future()
        for name in reports:
            digest, contribution = self._received[name]
            self.aggregation.submit(job, Fold(key, AssignmentId(_SPOOL, name), digest, contribution, 0))
        self.aggregation.submit(job, Commit(key, 0, len(reports)))
        return await asyncio.wait_for(self._ended[key], 60.0)

    async def releases(self, rounds: Sequence[Reports]) -> list[Values]:
        """What a new job releases in each round: model entries, and the logarithm of its clip norm if it adapts."""
        job, released = JobState(next(self._jobs), self.spec, self.first), list[Values]()
        for reports in rounds:
            ended = await self.attempt(job, reports)
            assert isinstance(ended, AttemptAggregated), ended
            job = structs.replace(job, latest=ended.version, round=job.round + 1)
            model = Parameters.open(self.blobs.path(ended.version.digest))
            assert model["steps"].tolist() == [7, 8, 9]  # whatever the clients' counters were
            released.append(np.append(entries(model), self._log_clip_norm(ended.version)))
        return released

    def _log_clip_norm(self, version: ModelVersion) -> Sequence[float]:
        if self.spec.updates.adaptive_clip is None:
            return []
        size = base_model().schema.num_floating
        return [math.log(read_scalars(self.blobs.path(version.state_digest), build_rule(self.spec), size)[CLIP_NORM])]

    def _on_ended(self, ended: AttemptAggregated | AggregationFailed, _: SmallContents) -> None:
        self._ended.pop(ended.key).set_result(ended)

    async def _find_version(self, job_id: str, version: int) -> ModelVersion | None:
        raise AssertionError("no test asks for older versions")


@asynccontextmanager
async def daemon(folder: Path, spec: JobSpec) -> AsyncGenerator[Daemon]:
    """A daemon's aggregation, ended with the block."""
    running = Daemon(folder, spec)
    try:
        yield running
    finally:
        await running.aggregation.close()


@dataclasses.dataclass(frozen=True)
class Audit:
    """The measurements. Entries are those of all rounds' nodes, one after the other; see `nodes_of`.

    `moved` [senders][entries] is what the client changes by what it sends; `deviations` [entries] is the noise, pooled
    over entries that have the same noise.
    """

    moved: dict[str, Values]
    deviations: Values
    noise: Values
    """Single entries of the noise, [samples, entries], each of one run less the means."""

    def multiplier(self, sender: str) -> float:
        """The noise multiplier of all releases together: the noise over what the client changes (L2)."""
        length = float(np.linalg.norm(self.moved[sender] / self.deviations))
        return 1.0 / length


def drop_outs(num_runs: int) -> list[Reports]:
    """The clients whose reports are merged in each run, from few to nearly all."""
    rng = np.random.default_rng(6)
    shares = rng.choice([0.0, 0.3, 0.6, 0.95], num_runs)
    return [tuple(name for name in OTHERS if rng.random() < share) for share in shares]


class Releases(Protocol):
    """What is audited."""

    async def releases(self, rounds: Sequence[Reports]) -> list[Values]:
        """What a new job releases in each round, from the clients that report in it."""
        ...


async def audit(running: Releases, patterns: Sequence[Reports], num_rounds: int = 1) -> Audit:
    """Runs jobs of `num_rounds` rounds. In each run the others report in all rounds, the one client in the first."""

    async def run(others: Reports) -> list[Values]:
        cohorts = [others, *((*others, sender) for sender in SENT)]
        rounds = [[first, *[others] * (num_rounds - 1)] for first in cohorts]
        return [nodes_of(found) for found in await asyncio.gather(*(running.releases(each) for each in rounds))]

    found = np.array([await run(others) for others in patterns])  # [runs, cohorts, entries]
    moved = (found[:, 1:] - found[:, :1]).mean(axis=0)
    # All cohorts of a run have the same others, and all runs the same updates of the client: the rest is noise.
    rest = found - found.mean(axis=0, keepdims=True) - found.mean(axis=1, keepdims=True) + found.mean(axis=(0, 1))
    freedom = (1.0 - 1.0 / len(patterns)) * (1.0 - 1.0 / (1 + len(SENT)))
    noise = rest.reshape(-1, rest.shape[-1]) / math.sqrt(freedom)
    return Audit(dict(zip(SENT, moved, strict=True)), _pooled(noise), noise)


def nodes_of(released: Sequence[Values]) -> Values:
    """The releases of a job as those of independent noise: after round t, what is new since round t less its last bit.

    Without a tree there is one round, and one release. With it, model t is the sum of the tree's nodes whose sizes are
    the bits of t, and of what was trained; so each difference has the noise of one node.
    """
    before: list[Any] = [np.zeros_like(released[0]), *released]
    return np.concatenate([before[t] - before[t & (t - 1)] for t in range(1, len(before))])


def _pooled(noise: Values) -> Values:
    size = base_model().schema.num_floating
    variances = np.square(noise).mean(axis=0)
    for begin in range(0, len(variances) - size + 1, size):
        variances[begin : begin + size] = variances[begin : begin + size].mean()
    return np.sqrt(variances)


def claimed(spec: JobSpec, num_rounds: int) -> float:
    """The noise multiplier of all releases together, as the accountant is told."""
    mechanism = find_mechanism(spec)
    assert mechanism is not None
    if mechanism.kind != "tree":
        return mechanism.noise_multiplier
    participations = mechanism.participations(num_rounds)
    return mechanism.noise_multiplier / tree_sensitivity(num_rounds, mechanism.separation, participations)
