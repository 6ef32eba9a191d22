"""What operators ask about privacy costs the data path nothing: uploads and reports never wait for accounting."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from fedplat.privacy import Charge, accounting
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination import job_checks
from support.daemons import Operator, Site, initial_model, update_of
from support.jobs import job_file
from support.private_jobs import private
from support.raw_client import PATIENCE_S

pytestmark = pytest.mark.calm  # they look at threads, not at the store
CALLS = 12
"""More than the event loop's default executor has threads (cores + 4) on a machine of up to 7 cores, and fewer than
one operator may send at a time (16)."""


class Blocked:
    """Accounting that begins, and continues when the test allows it."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.threads = set[str]()

    def __call__(self, charges: Any, delta: float) -> float:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return self._real(charges, delta)


@pytest.fixture(autouse=True)
def _nothing_cached() -> Generator[None]:
    job_checks.epsilon.cache_clear()
    job_checks.epsilon_rdp.cache_clear()
    yield
    job_checks.epsilon.cache_clear()
    job_checks.epsilon_rdp.cache_clear()


def show(operator: Operator) -> asyncio.Task[admin_pb2.ShowPrivacyResponse]:
    async def ask() -> admin_pb2.ShowPrivacyResponse:
        return await operator.privacy.ShowPrivacy(admin_pb2.ShowPrivacyRequest())

    return asyncio.create_task(ask())


@pytest.mark.fault("F49")
async def test_uploads_and_reports_do_not_wait_for_accounting(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole round of another job completes while many operators' calls are in the middle of their arithmetic."""
    await site.operator.create(private())
    blocked = Blocked(accounting.epsilon_rdp)
    monkeypatch.setattr(accounting, "epsilon_rdp", blocked)
    shown = [show(site.operator) for _ in range(CALLS)]
    try:
        assert await asyncio.to_thread(blocked.begun.wait, PATIENCE_S)
        job = await site.operator.start(job_file("plain").replace('"demo"', '"others"'))
        clients = [await site.enroll("others") for _ in range(2)]
        for number, (client, work) in enumerate(zip(clients, await site.assign(clients), strict=True)):
            response = await client.deliver(work.token, update_of(initial_model(), number))
            assert response.HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        assert not any(call.done() for call in shown), "the accounting ended before the round"
    finally:
        blocked.may_go_on.set()
    answers = await asyncio.gather(*shown)
    assert {len(answer.jobs) for answer in answers} == {1}
    assert len(blocked.threads) == 1
    assert blocked.threads.pop().startswith("accounting")


async def test_concurrent_calls_compute_each_cost_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = Counter[tuple[str, tuple[Charge, ...], float]]()
    for name in ("epsilon", "epsilon_rdp"):
        real = getattr(accounting, name)

        def counted(charges: Any, delta: float, name: str = name, real: Any = real) -> float:
            computed[name, tuple(charges), delta] += 1
            return real(charges, delta)

        monkeypatch.setattr(accounting, name, counted)
    for number, noise in enumerate((10.0, 11.0, 12.0)):
        await site.operator.create(private(f"noise_multiplier = {noise}", name=f"private-{number}"))
    computed.clear()
    job_checks.epsilon.cache_clear()
    answers = await asyncio.gather(*(show(site.operator) for _ in range(16)))
    assert len({answer.SerializeToString(deterministic=True) for answer in answers}) == 1
    planned = {charges for _, charges, _ in computed if charges}
    assert len(planned) == 3
    assert set(computed.values()) == {1}, computed
    assert sum(computed.values()) == 2 * (3 + 1), "expected each plan, and the case without releases, by both methods"


@pytest.mark.slow
def test_what_is_remembered_is_bounded() -> None:
    mechanism = accounting.Mechanism("fixed", 10.0)
    for releases in range(1, job_checks.CACHED + 100):
        job_checks.epsilon((Charge(mechanism, releases),), 1e-6)
        job_checks.epsilon_rdp((), 1.0 / (releases + 1))
    assert job_checks.epsilon.cache_info().currsize == job_checks.CACHED
    assert job_checks.epsilon_rdp.cache_info().currsize == job_checks.CACHED


async def test_work_of_a_call_that_was_given_up_does_not_begin() -> None:
    held, begun, done = threading.Event(), threading.Event(), list[str]()
    own = job_checks.Accountant()

    def hold() -> None:
        begun.set()
        assert held.wait(PATIENCE_S)

    first = asyncio.create_task(own.run(hold))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    second = asyncio.create_task(own.run(done.append, "given up"))
    await asyncio.sleep(0)  # it is queued
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    held.set()
    await first
    await own.run(done.append, "wanted")
    own.close()
    assert done == ["wanted"]
