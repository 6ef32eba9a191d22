"""The runner with a store that is held up or fails at the moments that matter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fedplat.rounds import Change, Verdict
from fedplat.rounds.commands import Assign, Command, Refuse
from fedplat.rounds.events import ClientCheckedIn, JobAction, OperatorCommand, TimerFired, UpdateReported
from fedplat.rounds.states import JobStatus
from fedplat_server.coordination import gathering
from fedplat_server.errors import ParticipationError, StaleRevisionError, StoreError, StoreUnavailableError
from support.daemons import Gate
from support.runner_bench import PATIENCE_S, bench, settle


async def test_a_refusal_for_an_earlier_call_does_not_reach_a_later_one() -> None:
    async with bench() as it:
        await it.act(JobAction.START)
        gates = [Gate() for _ in range(4)]
        order = iter(gates)

        async def held() -> None:
            await next(order)()

        it.store.before["save"] = held
        acts = [asyncio.create_task(it.act(JobAction.PAUSE))]
        await gates[0].reached.wait()
        first = it.wait_for_work(0.0)
        await settle()
        acts.append(asyncio.create_task(it.act(JobAction.RESUME)))
        await settle()
        gates[0].open()  # next batch: check in, resume
        await gates[1].reached.wait()
        acts.append(asyncio.create_task(it.act(JobAction.PAUSE)))
        await settle()
        gates[1].open()  # next: pause; the first call's time is over, and its `leave` waits
        await gates[2].reached.wait()
        await settle()
        acts.append(asyncio.create_task(it.act(JobAction.RESUME)))
        await settle()
        gates[2].open()  # next: leave, resume
        await gates[3].reached.wait()
        second = it.wait_for_work(PATIENCE_S)
        await settle()
        del it.store.before["save"]
        gates[3].open()
        await asyncio.gather(*acts)
        assert isinstance(await first, Refuse)
        await settle()
        assert not second.done()
        assert list(it.runner.coordinator.room.clients) == ["c"]
        await it.act(JobAction.START, "toy")
        assert isinstance(await second, Assign)


async def test_a_cancelled_call_leaves_the_room_wherever_it_was() -> None:
    async with bench() as it:
        for steps in range(12):
            call = it.wait_for_work(PATIENCE_S)
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await settle()
            assert not it.runner.coordinator.room.clients


async def test_an_outage_tells_callers_and_changes_nothing() -> None:
    async with bench() as it:
        waiting = it.wait_for_work(PATIENCE_S)
        await settle()
        it.store.outage = True
        with pytest.raises(StoreUnavailableError):
            await it.act(JobAction.START, "toy")
        assert not waiting.done()
        assert it.runner.coordinator.jobs["toy"].status is JobStatus.DRAFT
        assert it.actor.changes == []
        await it.back()
        await it.act(JobAction.START, "toy")
        assert isinstance(await waiting, Assign)


async def test_a_check_in_that_could_not_be_stored_is_not_in_the_room() -> None:
    async with bench() as it:
        await it.act(JobAction.START, "toy")
        it.store.outage = True
        with pytest.raises(StoreUnavailableError):
            await it.wait_for_work(PATIENCE_S)
        await settle()
        assert not it.runner.coordinator.room.clients
        await it.back()
        assert isinstance(await it.wait_for_work(PATIENCE_S), Assign)


async def test_a_command_runs_after_what_follows_stored_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the spool expects an update before its client gets the assignment."""
    async with bench() as it:
        await it.act(JobAction.START, "toy")
        order: list[str] = []
        act, on_stored = it.actor.act, it.actor.on_stored

        async def note_save() -> None:
            order.append("saved")

        def note_changes(changes: Sequence[Change]) -> None:
            order.append("followed")
            on_stored(changes)

        def note_command(command: Command) -> None:
            order.append(type(command).__name__)
            act(command)

        it.store.after["save"] = note_save
        monkeypatch.setattr(it.actor, "on_stored", note_changes)
        monkeypatch.setattr(it.actor, "act", note_command)
        assert isinstance(await it.wait_for_work(PATIENCE_S), Assign)
        assert order == ["saved", "followed", "Assign"]


async def test_reports_wait_for_those_that_come_until_one_closes_their_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """So there is one transaction for them; an event of another kind ends the wait, and so does the end of a call."""
    for name, value in {"GATHER_S": PATIENCE_S, "COMING_S": PATIENCE_S, "GAP_S": 0.0}.items():
        monkeypatch.setattr(gathering, name, value)
    async with bench() as it:
        await it.add("two", "demo", goal=4)
        await it.act(JobAction.START, "two")
        for client_id in "abcd":
            await it.runner.submit(ClientCheckedIn(client_id, "demo", trainers=frozenset({"toy"})))
        key = it.runner.coordinator.assignment_of("a")
        assert key is not None
        saves = it.store.calls["save"]

        def report(client_id: str) -> asyncio.Task[Verdict]:
            return asyncio.create_task(it.runner.submit(UpdateReported(key, client_id, client_id * 64, 1.0)))

        assert (await report("a")).accepted  # alone
        assert it.store.calls["save"] == saves + 1
        with it.runner.expect_report("c"), it.runner.expect_report("idle"):
            second = report("b")
            await settle()
            assert (second.done(), it.store.calls["save"], it.runner.has_events) == (False, saves + 1, True)
            await it.act(JobAction.START, "other")
            assert (await second).accepted
            assert it.store.calls["save"] == saves + 2
            third = report("d")
            await settle()
            assert not third.done()
        assert (await third).accepted  # the call of the client c has ended without a report
        assert it.store.calls["save"] == saves + 3
        with it.runner.expect_report("d"):  # it sends its report again
            assert (await report("c")).accepted
        assert it.store.calls["save"] == saves + 4


async def test_own_events_are_tried_until_they_are_stored() -> None:
    async with bench() as it:
        await it.act(JobAction.START, "toy")
        it.clock.ahead_s = 10_000.0
        failed, tries = asyncio.Event(), 0

        async def fail_twice() -> None:
            nonlocal tries
            tries += 1
            if tries <= 2:
                raise StoreUnavailableError("away")
            failed.set()

        it.store.before["save"] = fail_twice
        it.runner.post(TimerFired("toy"))  # no client came: the selection is over
        await failed.wait()
        assert tries == 3


async def test_an_event_that_the_database_refuses_harms_no_other_caller() -> None:
    async with bench() as it:
        await it.act(JobAction.START)
        poison = asyncio.Event()
        save = it.store.inner.jobs.save

        async def picky(changes: Sequence[Change], now: float, **more: Any) -> None:
            if any(change.job.job_id == "toy" for change in changes):
                poison.set()
                raise StoreError("refused for good")
            await save(changes, now, **more)

        it.store.inner.jobs.save = picky  # pyright: ignore[reportAttributeAccessIssue]
        results = await asyncio.gather(it.act(JobAction.START, "toy"), it.act(JobAction.PAUSE), return_exceptions=True)
        assert isinstance(results[0], StoreError)
        assert results[1] is None
        assert poison.is_set()
        assert it.runner.coordinator.jobs["other"].status is JobStatus.PAUSED
        assert it.task is not None
        assert not it.task.done()


async def test_an_own_event_that_the_database_refuses_ends_the_runner() -> None:
    async with bench() as it:
        await it.act(JobAction.START, "toy")

        async def refuse() -> None:
            raise StoreError("refused for good")

        it.store.before["save"] = refuse
        it.runner.post(OperatorCommand("toy", JobAction.PAUSE))
        assert it.task is not None
        await asyncio.wait([it.task])
        assert isinstance(it.task.exception(), StoreError)


async def test_another_writer_in_the_database_ends_the_runner_with_advice() -> None:
    async with bench() as it:

        async def stale() -> None:
            raise StaleRevisionError("job toy is not at revision 0 any more")

        it.store.before["save"] = stale
        waiting = it.wait_for_work(PATIENCE_S)
        calls = await asyncio.gather(it.act(JobAction.START, "toy"), it.act(JobAction.START), return_exceptions=True)
        assert all(isinstance(answer, StoreUnavailableError) for answer in calls)
        assert it.task is not None
        with pytest.raises(StaleRevisionError, match="on SQLite, stop the other fedplat-server"):
            await it.task
        with pytest.raises(StoreUnavailableError, match="the server is stopping"):  # no caller waits forever
            await it.act(JobAction.START)
        waiting.cancel()


async def test_a_memory_that_the_database_contradicts_ends_the_runner() -> None:
    """Only a restart repairs it: the memory is read back when the next daemon leads."""
    async with bench() as it:

        async def refuse() -> None:
            raise ParticipationError("toy round 3 attempt 1 must not have client c")

        it.store.before["save"] = refuse
        with pytest.raises(StoreUnavailableError, match="the server is stopping"):
            await it.act(JobAction.START)
        assert it.task is not None
        with pytest.raises(ParticipationError, match="client c; restart the server"):
            await it.task


async def test_stopping_in_the_middle_of_a_write_lets_it_end() -> None:
    async with bench() as it:
        gate = Gate()
        it.store.before["save"] = gate
        act = asyncio.create_task(it.act(JobAction.START, "toy"))
        await gate.reached.wait()
        assert it.runner.has_events
        assert it.task is not None
        it.task.cancel()
        await settle()
        assert not it.task.done()
        gate.open()
        await asyncio.gather(it.task, act, return_exceptions=True)
        assert (await it.store.inner.jobs.load_jobs())[0].state.status is JobStatus.RUNNING


async def test_nothing_grows_with_the_number_of_calls() -> None:
    async with bench() as it:
        for _ in range(50):
            assert isinstance(await it.wait_for_work(0.0), Refuse)
        await settle()
        assert not it.runner.coordinator.room.clients
        assert vars(it.actor.long_polls) == {"_waiting": {}, "_working": {}, "_steps": {}}
