"""The interface of a backend that computes an attempt's aggregate: updates go in, files come out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from fedplat_server import crash_points
from fedplat_server.storage.blobs import Blob
from fedplat_server.workers.attempt_inputs import SpooledUpdate

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """The result of an attempt: the next version's file and that of the rule's state, which are stored for good.

    `published` are the metrics that are shown of the attempt, None if they are the means of the clients' own; `payload`
    is the encoded step of a job with a downlink. A draft has no digest yet.
    """

    model: Blob
    state: Blob | None
    num_updates: int
    total_weight: float
    published: Mapping[str, float] | None
    payload: bytes = b""


class AggregationBackend(Protocol):
    """Computes the aggregate of one attempt. Its owner calls `close` at last, also after a call was cancelled."""

    @property
    def keeps_updates(self) -> bool:
        """Whether updates must stay readable until the aggregate is made."""
        ...

    async def fold(self, update: SpooledUpdate) -> None:
        """Add an update. Raises `ValueError` when the rule refuses it, and what reading it raises."""
        ...

    async def commit(self, draft: Path | None = None) -> Aggregate:
        """Compute the aggregate and store its files. With a `draft`, the model is written there instead, to be changed.

        Raises `BlobFullError` or `BlobError` when its files cannot be written, `ModelError` when the result is not
        finite, and `ValueError` when the rule has none.
        """
        ...

    async def close(self) -> None:
        """Release files, memory and ranks."""
        ...


async def run_to_the_end(work: Callable[..., _T], *arguments: object) -> _T:
    """Run work in a thread. A task that is cancelled ends after the work: then all of its files are known."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


@contextlib.contextmanager
def store_model() -> Generator[None]:
    """Mark the step in which a version's file is stored: one crash point for all backends."""
    with crash_points.step("commit.model"):
        yield


@contextlib.contextmanager
def store_state() -> Generator[None]:
    """Mark the step in which the rule's state is stored."""
    with crash_points.step("commit.state"):
        yield
