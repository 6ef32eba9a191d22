"""What computes an attempt's aggregate, wherever it is: updates go in, files come out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from fedplat_server import crash
from fedplat_server.attempts.recipe import Update
from fedplat_server.blobs import Blob

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """What the updates came to: the next version's file and that of the rule's state, which are stored for good.

    `published` are the metrics that are shown of the attempt, None if they are the means of the clients' own; `payload`
    is the encoded step of a job with a downlink. A draft has no digest yet.
    """

    model: Blob
    state: Blob | None
    num_updates: int
    total_weight: float
    published: Mapping[str, float] | None
    payload: bytes = b""


class Folding(Protocol):
    """One attempt. Whoever has made it calls `close` at last, also when one of the others was cancelled."""

    @property
    def keeps_updates(self) -> bool:
        """Whether updates must stay readable until the aggregate is made."""
        ...

    async def fold(self, update: Update) -> None:
        """Adds an update. Raises `ValueError` when the rule refuses it, and what reading it raises."""
        ...

    async def commit(self, draft: Path | None = None) -> Aggregate:
        """Ends the attempt. With a `draft`, the model is written there and stored by nobody yet: it will be changed.

        Raises `BlobFullError` or `BlobError` when its files cannot be written, `ModelError` when the result is not
        finite, and `ValueError` when the rule has none.
        """
        ...

    async def close(self) -> None:
        """Gives back what it holds."""
        ...


async def to_the_end(work: Callable[..., _T], *arguments: object) -> _T:
    """Does work in a thread. When the task is cancelled, it ends after the work: then all of its files are known."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


@contextlib.contextmanager
def storing_model() -> Generator[None]:
    """The step in which a version's file is stored; that is one crash point wherever the file was made."""
    with crash.step("commit.model"):
        yield


@contextlib.contextmanager
def storing_state() -> Generator[None]:
    """The step in which the rule's state is stored."""
    with crash.step("commit.state"):
        yield
