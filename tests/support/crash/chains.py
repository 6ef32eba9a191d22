"""Chains of crashes: one training whose server dies at one point after the other, each time in its next life.

So the server also dies in the state that another crash has left. The order is drawn from a seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.verify.inspection import verify
from support.crash import points, recompute, scenario
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED, World

POINTS = points.all_points()


def of(*families: str) -> list[str]:
    """Return the points whose names begin with one of these words, in the order of the source text."""
    return [point for point in POINTS if point.startswith(tuple(f"{family}." for family in families))]


def draw(seed: int, *links: str | Sequence[str]) -> list[str]:
    """Return points in an order of this seed; those of a link stay together."""
    drawn = random.Random(seed).sample(links, len(links))
    return list(itertools.chain.from_iterable([link] if isinstance(link, str) else link for link in drawn))


class Chain(World):
    """A world that is checked whenever its server has died."""

    def __init__(self, nursery: Nursery, order: Order) -> None:
        super().__init__(nursery, order)
        self.phases: set[str] = set()
        """Those of attempts when the server has died."""

    @override
    async def _one_life(self, order: Order) -> None:
        await super()._one_life(order)
        if self.statuses[-1] == KILLED:
            await self.check_after_death(order.crash_at)

    async def check_after_death(self, point: str) -> None:
        """Check that nothing is broken: the rest of an interrupted step is no finding."""
        order = self.order
        place = BlobPlace(order.data_dir, order.blobs)
        report = await verify(order.database, order.data_dir, blobs=place, uploads=order.spool)
        assert report.findings == [], f"after the death at {point}"
        if self.job:
            _, attempts = await recompute.read(order.database)
            self.phases |= {attempt.row.phase for attempt in attempts.values()}


async def train(world: World, crash_at: Sequence[str], text: Callable[[int], str], **options: Any) -> None:
    """Train with a death at each point in this order; `text` is the job file for a number of rounds.

    Each life takes no more than a round to its point, so that there are enough of them.
    """
    try:
        await scenario.train(world, text(len(crash_at) + 1), crash_at, **options)
        num_deaths = len(world.statuses) - 1
        assert num_deaths == len(crash_at), f"the training ended before {', '.join(crash_at[num_deaths:])}"
        assert world.statuses == [KILLED] * num_deaths + [0]
    except BaseException as exc:
        exc.add_note(f"died at {', '.join(crash_at[: len(world.statuses)])}; to die at {', '.join(crash_at)}")
        raise
