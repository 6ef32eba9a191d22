"""A job with secure aggregation under a real coordinator, with messages that are valid in their form only."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from typing_extensions import override

from fedplat.rounds.events import AssignmentFailed, ClientCheckedIn, UploadStarted
from fedplat.rounds.states import AttemptPhase, Reason
from support.rounds.secure_driver import (
    FEATURES,
    answer_event,
    confirmation_event,
    keys_event,
    report_event,
    shares_event,
)
from support.store.driver import Driver

FILE = """
name = "secret"
population = "demo"
trainer = "digits"
rounds = 3
model.initial = "model.safetensors"
selection = { goal = 5, over_selection = 1.4, min_fraction = 0.6 }
updates = { weighting = "uniform", clip_norm = 1.0 }
retry = { base_s = 1, max_s = 2 }
[secure_aggregation]
threshold = 0.6
confirm = true
"""
PRIVATE = (
    FILE
    + """
[privacy]
trust = "none"
participation = "fixed"
delta = 1e-6
noise_multiplier = 4.0
max_releases = 3
"""
)
CLIENTS = "abcdefg"


class SecureDriver(Driver):
    """A driver whose clients implement secure aggregation."""

    @override
    async def check_in(self, *client_ids: str) -> None:
        installed = frozenset({"digits"})
        found = [ClientCheckedIn(name, "demo", {}, installed, installed, features=FEATURES) for name in client_ids]
        await self.send(*found)

    @property
    def phase(self) -> AttemptPhase:
        (job,) = self.coordinator.jobs.values()
        assert job.attempt is not None
        return job.attempt.phase


async def play(driver: SecureDriver, job_id: str = "one") -> AsyncGenerator[AttemptPhase]:
    """Take an attempt from its first to its last step; yields each phase when it has its last messages.

    Of seven clients "g" fails in training, and "f" is surplus. Of the roster "e" sends no shares, and "d" no update.
    """
    await driver.check_in(*CLIENTS)
    key, _ = driver.cohort(job_id)
    await driver.send(AssignmentFailed(key, "g", Reason.TRAINER_ERROR, "ValueError"))
    for name in "abcd":
        await driver.send(keys_event(key, name))
    yield driver.phase
    await driver.send(keys_event(key, "e"))
    for name in "abcd":
        await driver.send(shares_event(key, name))
    yield driver.phase
    await driver.send(AssignmentFailed(key, "e", Reason.CLIENT_STOPPED))
    await driver.send(UploadStarted(key, "a"))
    for name in "abc":
        driver.now += 1.0
        await driver.send(report_event(key, name))
    yield driver.phase
    await driver.send(AssignmentFailed(key, "d", Reason.CLIENT_STOPPED))
    for name in "ab":
        await driver.send(confirmation_event(key, name))
    yield driver.phase
    await driver.send(confirmation_event(key, "c"))
    for name in "ab":
        await driver.send(answer_event(key, name))
    yield driver.phase


async def finish(driver: SecureDriver, job_id: str = "one") -> None:
    """Let the last survivor answer, and commit."""
    await driver.send(answer_event(driver.cohort(job_id)[0], "c"))
    await driver.aggregate(job_id)
