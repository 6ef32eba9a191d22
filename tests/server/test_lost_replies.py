"""The database commits, but the runner does not learn of it."""

from __future__ import annotations

import asyncio

import pytest

from fedplat.rounds.commands import Assign
from fedplat.rounds.events import JobAction, OperatorCommand, TimerFired
from fedplat.rounds.states import JobStatus
from fedplat_server.errors import StoreUnavailableError
from support.daemons import Gate
from support.runner_bench import PATIENCE_S, Bench, bench, settle


class LostReplies:
    """The database commits the next saves but seems to be away; it reveals their outcome when `open` is set."""

    def __init__(self, it: Bench, count: int = 1) -> None:
        self.open, self.asked, self.left = asyncio.Event(), asyncio.Event(), count
        it.store.after["save"] = self._lose
        it.store.before["find_last_save"] = self._hide

    async def _lose(self) -> None:
        if self.left:
            self.left -= 1
            raise StoreUnavailableError("the connection broke")

    async def _hide(self) -> None:
        self.asked.set()
        if not self.open.is_set():
            raise StoreUnavailableError("away")


@pytest.mark.fault("F10")
async def test_our_own_commit_is_found_and_applied_once() -> None:
    async with bench() as it:
        lost = LostReplies(it)
        with pytest.raises(StoreUnavailableError):
            await it.act(JobAction.START, "toy")
        await lost.asked.wait()
        assert it.runner.in_doubt
        lost.open.set()
        await it.back()
        (record, _) = await it.store.inner.jobs.load_jobs()
        assert record.state.revision == it.runner.coordinator.jobs["toy"].revision
        assert it.runner.coordinator.jobs["toy"].status is JobStatus.RUNNING
        assert [change.job.job_id for change in it.actor.changes] == ["toy"] * len(it.actor.changes)
        await it.act(JobAction.START, "toy")  # repeated by the operator, who was told to try again: already done
        assert isinstance(await it.wait_for_work(PATIENCE_S), Assign)
        rows = [
            record.row.to_state
            for record in await it.store.inner.jobs.list_history("toy")
            if record.row.entity == "job"
        ]
        assert rows == ["DRAFT", "RUNNING"]
        assert it.task is not None
        assert not it.task.done()


@pytest.mark.fault("F10")
async def test_a_save_that_did_not_happen_is_done_again_by_who_asked_for_it() -> None:
    async with bench() as it:
        failures = iter([True])

        async def fail_before() -> None:
            if next(failures, False):
                raise StoreUnavailableError("away")

        it.store.before["save"] = fail_before
        with pytest.raises(StoreUnavailableError):
            await it.act(JobAction.START, "toy")
        await it.back()
        assert it.runner.coordinator.jobs["toy"].status is JobStatus.DRAFT
        await it.act(JobAction.START, "toy")
        assert it.runner.coordinator.jobs["toy"].status is JobStatus.RUNNING


@pytest.mark.fault("F9", "F10")
async def test_while_in_doubt_callers_are_told_at_once_and_own_events_wait() -> None:
    async with bench() as it:
        await it.act(JobAction.START, "toy")
        lost, gate = LostReplies(it), Gate()
        it.store.before["save"] = gate
        first = asyncio.create_task(it.act(JobAction.START))
        await gate.reached.wait()
        queued = asyncio.create_task(it.act(JobAction.PAUSE, "toy"))
        await settle()
        it.runner.post(OperatorCommand("toy", JobAction.CANCEL))
        gate.open()
        for call in (first, queued):
            with pytest.raises(StoreUnavailableError):
                await call
        with pytest.raises(StoreUnavailableError):
            await it.act(JobAction.PAUSE)
        with pytest.raises(StoreUnavailableError):
            await it.wait_for_work(PATIENCE_S)
        assert it.runner.coordinator.jobs["toy"].status is JobStatus.RUNNING
        lost.open.set()
        await it.back()
        await it.act(JobAction.START)  # already done; the events before it are stored first
        assert it.runner.coordinator.jobs["toy"].status is JobStatus.CANCELLED
        assert it.runner.coordinator.jobs["other"].status is JobStatus.RUNNING
        assert not it.runner.coordinator.room.clients


@pytest.mark.fault("F10")
async def test_a_client_that_was_assigned_in_a_lost_reply_gets_its_work_when_it_asks_again() -> None:
    async with bench() as it:
        await it.act(JobAction.START, "toy")
        lost = LostReplies(it)
        with pytest.raises(StoreUnavailableError):
            await it.wait_for_work(PATIENCE_S)
        lost.open.set()
        await it.back()
        assert it.runner.coordinator.assignment_of("c") is not None
        answer = await it.wait_for_work(PATIENCE_S)
        assert isinstance(answer, Assign)
        assert answer.key.number == 1


@pytest.mark.fault("F10")
async def test_many_lost_replies_never_look_like_another_server() -> None:
    async with bench() as it:
        lost = LostReplies(it, count=20)
        lost.open.set()
        for action in (JobAction.START, *(JobAction.PAUSE, JobAction.RESUME) * 8):
            while True:
                try:
                    await it.act(action)
                    break
                except StoreUnavailableError:
                    await it.back()
        assert it.runner.coordinator.jobs["other"].status is JobStatus.RUNNING
        (_, record) = await it.store.inner.jobs.load_jobs()
        assert record.state.revision == it.runner.coordinator.jobs["other"].revision
        rows = [record.row for record in await it.store.inner.jobs.list_history("other") if record.row.entity == "job"]
        assert [row.from_state for row in rows[1:]] == [row.to_state for row in rows[:-1]]


@pytest.mark.fault("F9", "F10")
async def test_a_deadline_that_strikes_while_in_doubt_is_handled_afterwards() -> None:
    async with bench() as it:
        await it.act(JobAction.START, "toy")
        lost = LostReplies(it)
        with pytest.raises(StoreUnavailableError):
            await it.act(JobAction.START)
        await lost.asked.wait()
        it.clock.ahead_s = 10_000.0
        it.runner.post(TimerFired("toy"))  # no client came: the selection is over
        lost.open.set()
        await it.back()
        await it.act(JobAction.START)  # already done; the events before it are stored first
        assert it.runner.coordinator.jobs["toy"].failures == 1


async def test_stopping_while_in_doubt_stops() -> None:
    async with bench() as it:
        lost = LostReplies(it)
        with pytest.raises(StoreUnavailableError):
            await it.act(JobAction.START, "toy")
        await lost.asked.wait()
        assert it.task is not None
        it.task.cancel()
        await asyncio.wait([it.task])
        assert it.task.cancelled()
