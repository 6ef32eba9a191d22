"""The interface of a backend that computes an attempt's aggregate from updates and stores it as files."""

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
    """The result of an attempt: the files of the next version and of the rule's state, which are durable.

    `published` is the attempt's published metrics, None for the means of the clients' metrics. `payload` is the
    encoded step of a job with a downlink. The `model` of a draft has no digest yet. `cohort` are the clients that a
    Flower app has drawn for the next round, and `refused` those whose updates it could not use, and why.
    """

    model: Blob
    state: Blob | None
    num_updates: int
    total_weight: float
    published: Mapping[str, float] | None
    payload: bytes = b""
    cohort: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class AggregationBackend(Protocol):
    """A backend for one attempt. Its owner calls `close` in the end, also after a call was cancelled."""

    @property
    def keeps_updates(self) -> bool:
        """True if updates must stay readable until the aggregate is computed."""
        ...

    async def fold(self, update: SpooledUpdate) -> None:
        """Add an update. Raises `ValueError` if the rule refuses it, and the errors of reading it."""
        ...

    async def commit(self, draft: Path | None = None) -> Aggregate:
        """Compute the aggregate and store its files; with a `draft`, write the model there to be trained further.

        Raises `BlobFullError` or `BlobError` if its files cannot be written, `ModelError` if the result is not finite,
        and `ValueError` if the rule has no result.
        """
        ...

    async def close(self) -> None:
        """Release files, memory and ranks."""
        ...


async def run_to_the_end(function: Callable[..., _T], *arguments: object) -> _T:
    """Run a function in a thread. If cancelled, wait for its end first, so that all files that it makes are known."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # cancelled again
                await asyncio.wait([task])
        raise


@contextlib.contextmanager
def store_model() -> Generator[None]:
    """Surround the storing of a version's file with its crash points, which all backends share."""
    with crash_points.step("commit.model"):
        yield


@contextlib.contextmanager
def store_state() -> Generator[None]:
    """Surround the storing of the rule's state with its crash points."""
    with crash_points.step("commit.state"):
        yield
