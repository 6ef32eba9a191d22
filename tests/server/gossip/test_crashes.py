"""Silos that crash again and again when they store something, and continue as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from fedplat import durable
from fedplat.config import user_code
from fedplat_client import Client
from support import mtls, silo_clients
from support.daemons import initial_model
from support.silo_clients import SiloClient, gossip_job, make_silos

pytestmark = pytest.mark.slow
Crash = type("Crash", (BaseException,), {})  # no handler of an `Exception` may see it, as none sees SIGKILL


def _is_crash(exc: BaseException) -> bool:
    """Lets a crash pass what guards the client from the owner's code."""
    return isinstance(exc, Crash)


class Crashes:
    """Ends the first run of a silo at its first durable write, the second run at its second one, and so on."""

    def __init__(self, silo: SiloClient, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
        self._silo, self._after = silo, after
        self._counter = itertools.count()
        self.points: list[str] = []
        atomic_write = durable.atomic_write

        @contextlib.contextmanager
        def write(path: Path, *args: Any, **kwargs: Any) -> Generator[BinaryIO]:
            with self._at(path), atomic_write(path, *args, **kwargs) as file:
                yield file

        monkeypatch.setattr(durable, "atomic_write", write)
        monkeypatch.setattr(user_code, "is_interrupt", _is_crash)

    @contextlib.contextmanager
    def _at(self, path: Path) -> Generator[None]:
        is_point = self._silo.data_dir in path.parents and ("silos" in path.parts or "exports" in path.parts)
        crashes = is_point and next(self._counter) == len(self.points)
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
            self._client, self._counter = self._silo.make(), itertools.count()
            with contextlib.suppress(Crash):
                self._client.run()

    _is_stopped = False
    _client: Client

    def stop(self) -> None:
        self._is_stopped = True
        self._client.stop()


@pytest.mark.parametrize("mode", ["neighbours", "ring"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_silo_that_crashes_at_its_writes_loses_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, after: bool
) -> None:
    """The mean of all models is that of silos that do not crash, so each training counts once."""
    lines = f'exchange = "{mode}"\ntolerance = 1.0'
    async with mtls.running(folder) as place:
        job = await place.site.operator.start(gossip_job(4, 2, lines))
        silos = await make_silos(place.site, tmp_path, 4, [True, True, False, True])
        crashes = Crashes(silos[0], monkeypatch, after=after)
        crashing = asyncio.create_task(asyncio.to_thread(crashes.run))
        try:
            async with silo_clients.running(silos[1:]):
                exported = await silo_clients.finish(place.site, job, silos)
        finally:
            crashes.stop()
            await crashing
    assert len(crashes.points) >= 5
    expected = initial_model().to_vector() + 2 * 2.5
    expected[6] += 1 + 2
    np.testing.assert_allclose(exported.to_vector(), expected, rtol=1e-5)
