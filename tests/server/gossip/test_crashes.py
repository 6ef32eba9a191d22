"""Silos that crash at every point at which they store something, and continue as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from fedplat import durable
from fedplat_client import Client
from support import mtls, silo_clients
from support.daemons import initial_model
from support.silo_clients import SiloClient, gossip_job, make_silos

pytestmark = pytest.mark.calm("the storms of `test_sdk` are enough")
Crash = type("Crash", (BaseException,), {})  # no handler of an `Exception` may see it, as none sees SIGKILL


class Crashes:
    """Ends a silo at its durable writes: at all whose number has this parity, just before the write or after it."""

    def __init__(self, silo: SiloClient, monkeypatch: pytest.MonkeyPatch, *, odd: bool, after: bool) -> None:
        self._silo, self._odd, self._after = silo, odd, after
        self._counter = itertools.count()
        self.points: list[str] = []
        write_bytes, atomic_write = durable.write_bytes, durable.atomic_write

        def write(path: Path, content: bytes) -> None:
            with self._at(path):
                write_bytes(path, content)

        @contextlib.contextmanager
        def open_(path: Path) -> Generator[BinaryIO]:
            with self._at(path), atomic_write(path) as file:
                yield file

        monkeypatch.setattr(durable, "write_bytes", write)
        monkeypatch.setattr(durable, "atomic_write", open_)

    @contextlib.contextmanager
    def _at(self, path: Path) -> Generator[None]:
        is_point = self._silo.data_dir in path.parents and ("silos" in path.parts or "exports" in path.parts)
        crashes = is_point and next(self._counter) % 2 == self._odd
        if crashes:
            self.points.append(path.name)
        if crashes and not self._after:
            raise Crash
        yield
        if crashes:
            raise Crash

    def run(self) -> None:
        """Runs the silo until it is stopped, again after each crash."""
        while not self._is_stopped:
            self._client = self._silo.make()
            with contextlib.suppress(Crash):
                self._client.run()

    _is_stopped = False
    _client: Client

    def stop(self) -> None:
        self._is_stopped = True
        self._client.stop()


@pytest.mark.parametrize("mode", ["neighbours", "ring"])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("after", [False, True])
async def test_a_silo_that_crashes_at_its_writes_loses_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, odd: bool, after: bool
) -> None:
    """The mean of all models is that of silos that do not crash, so each training counts once."""
    lines = f'exchange = "{mode}"\ntolerance = 1.0'
    async with mtls.running(folder) as place:
        job = await place.site.operator.start(gossip_job(3, 2, lines))
        silos = await make_silos(place.site, tmp_path, 3, [True, True, False])
        crashes = Crashes(silos[0], monkeypatch, odd=odd, after=after)
        crashing = asyncio.create_task(asyncio.to_thread(crashes.run))
        try:
            async with silo_clients.running(silos[1:]):
                exported = await silo_clients.finish(place.site, job, silos)
        finally:
            crashes.stop()
            await crashing
    assert len(crashes.points) > 6
    expected = initial_model().to_vector() + 2 * 2.0
    expected[6] += 1 + 2
    np.testing.assert_allclose(exported.to_vector(), expected, rtol=1e-5)
