"""Secure aggregation: the sum of masked updates, from which the masks are removed when the attempt commits.

Masked updates are added as they arrive, modulo 2^modulus, in one vector for each group, and mean nothing before. The
masks of a group are removed with the answers of its members (Bonawitz et al. 2017, section 4, round 4), which are in
the job's state by then; the cores of this machine share the work, with or without a worker pool. The mean of all groups
is one update for the job's rule, as that of other jobs with robust rules or privacy.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.aggregate import Contribution
from fedplat.errors import SecureAggregationError
from fedplat.job.secure import mean_update
from fedplat.model import ModelFile
from fedplat.model.values import VectorValues
from fedplat.rounds import Attempt, JobState
from fedplat.secure_aggregation import encoding, unmasking
from fedplat.secure_aggregation.encoding import Decoded
from fedplat_server import logs
from fedplat_server.aggregation import backend
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend, LocalAggregation
from fedplat_server.aggregation.secure_attempts import RosterGroup, SecureAttempts
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate


class _MaskedSum(NamedTuple):
    """The sum of the masked updates of a group, modulo 2^modulus, and the positions of the clients that are in it."""

    total: npt.NDArray[np.uint32]
    positions: set[int]


class _Unmasked(NamedTuple):
    """The sum of a group without masks, and the clients that gave wrong shares."""

    decoded: Decoded
    wrong: Sequence[str]


class MaskedAggregation(AggregationBackend):
    """A backend that learns the sum of the updates of each group, and nothing else about them.

    `find_job` returns the job as it is when the attempt commits: with the answers of the clients.
    """

    def __init__(
        self, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore, secure: SecureAttempts
    ) -> None:
        self._find_job = find_job
        self._inputs = inputs
        self._secure = secure
        self._local = LocalAggregation(inputs, blobs)
        self._sums: dict[int, _MaskedSum] = {}

    @property
    @override
    def keeps_updates(self) -> bool:
        return False

    @override
    async def fold(self, update: SpooledUpdate) -> None:
        job = self._find_job()
        assert job.open_attempt is not None
        part = job.open_attempt.assignments[update.contribution.client_id].secure
        assert part is not None
        setup = await self._secure.setup(job, job.open_attempt.key)
        if part.group not in self._sums:
            self._sums[part.group] = _MaskedSum(np.zeros(setup.encoding.length, np.uint32), set())
        masked = self._sums[part.group]
        await backend.run_to_the_end(encoding.add_file, Path(update.path), setup, masked.total)
        masked.positions.add(part.position)

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        job = self._find_job()
        attempt = job.open_attempt
        assert attempt is not None
        groups, started = await self._secure.groups(job), time.perf_counter()
        unmasked = await backend.run_to_the_end(self._unmask, attempt, groups)
        logs.get().info(
            "the masks of all groups were removed",
            survivors=[each.decoded.num_survivors for each in unmasked],
            seconds=round(time.perf_counter() - started, 3),
        )
        if wrong := [client_id for each in unmasked for client_id in each.wrong]:
            await self._secure.note_wrong_shares(attempt.key, wrong)
        result = functools.reduce(encoding.merge, [each.decoded for each in unmasked])
        await backend.run_to_the_end(self._fold_mean, result)
        aggregate = await self._local.commit(draft)
        return dataclasses.replace(
            aggregate, num_updates=result.num_survivors, total_weight=result.weight, published=result.metrics
        )

    @override
    async def close(self) -> None:
        await self._local.close()

    def _unmask(self, attempt: Attempt, groups: Sequence[RosterGroup]) -> list[_Unmasked]:
        """Remove the masks of all groups, on all cores."""
        num_cores = len(os.sched_getaffinity(0))
        num_threads = min(len(groups), num_cores)
        unmask = functools.partial(self._unmask_group, attempt, groups, max(1, num_cores // num_threads))
        with ThreadPoolExecutor(num_threads, "unmask") as threads:
            return list(threads.map(unmask, range(len(groups))))

    def _unmask_group(self, attempt: Attempt, groups: Sequence[RosterGroup], workers: int, number: int) -> _Unmasked:
        group, masked = groups[number], self._sums.get(number)
        survivors = group.survivors(attempt)
        setup, num_survivors = group.setup, len(survivors.survivors)
        if masked is None or masked.positions != {*survivors.survivors}:
            raise SecureAggregationError(f"the sum of group {number} has other updates than those of its survivors")
        if num_survivors < max(setup.minimum, group.graph.threshold):
            raise SecureAggregationError(
                f"group {number} has {num_survivors} survivors; expected {setup.minimum} or more, so it stays masked"
            )
        wrong = unmasking.remove_masks(
            setup,
            group.members,
            group.sent_shares(attempt),
            survivors,
            group.answers(attempt),
            masked.total,
            workers,
        )
        decoded = encoding.decode(setup.encoding, masked.total, num_survivors)
        return _Unmasked(decoded, [group.members[position].client_id for position in sorted(wrong)])

    def _fold_mean(self, result: Decoded) -> None:
        """Give the mean of all updates to the job's rule, as one update of weight 1."""
        base = ModelFile.open(self._inputs.base_path)
        self._local.fold_values(VectorValues(base, mean_update(self._inputs.spec, result)), Contribution(1.0))
