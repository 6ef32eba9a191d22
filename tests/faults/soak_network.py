"""A network for the soak test in which, all the time, some connections are cut, slow or dead for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator

from faults import proxy

PERIOD_S = 5.0
DELAY_S = 0.5


class FaultyNetwork:
    """A proxy; in each period of five seconds each connection has a fault with the probability `rate`."""

    def __init__(self, network: proxy.Proxy, rate: float, rng: random.Random) -> None:
        self.address = network.address
        self.counts: Counter[str] = Counter()
        self._network = network
        self._rate = rate
        self._rng = rng

    async def run(self) -> None:
        """Makes faults, forever."""
        faults: list[tuple[str, Callable[[proxy.Link], None]]] = [
            ("cut", proxy.Link.cut),
            ("cut_after_bytes", self._cut_later),
            ("delayed", lambda link: link.set(proxy.Weather(*[proxy.Way(delay_s=self._rng.uniform(0, DELAY_S))] * 2))),
            ("dead_for_a_while", lambda link: link.set(proxy.BLACKHOLE)),
            ("deaf_for_a_while", lambda link: link.set(proxy.ONLY_TO_CLIENT)),
            ("mute_for_a_while", lambda link: link.set(proxy.ONLY_TO_SERVER)),
        ]
        while True:
            self._network.set(proxy.CLEAR)
            for link in list(self._network.links):
                if self._rng.random() < self._rate:
                    name, harm = self._rng.choice(faults)
                    harm(link)
                    self.counts[name] += 1
            await asyncio.sleep(PERIOD_S)

    def _cut_later(self, link: proxy.Link) -> None:
        more = self._rng.randrange(1, 500_000)
        link.set(
            proxy.Weather(
                proxy.Way(cut_after=link.passed["to_server"] + more),
                proxy.Way(cut_after=link.passed["to_client"] + more),
            )
        )


@contextlib.contextmanager
def faulty_network(target: str, rate: float, seed: int) -> Generator[FaultyNetwork]:
    """A faulty network in front of `host:port`, in a thread of its own."""

    @contextlib.asynccontextmanager
    async def made() -> AsyncGenerator[FaultyNetwork]:
        async with proxy.running(target) as network:
            faulty = FaultyNetwork(network, rate, random.Random(seed))
            making = asyncio.create_task(faulty.run())
            yield faulty
            making.cancel()

    with proxy.held_in_thread(made()) as faulty:
        yield faulty
