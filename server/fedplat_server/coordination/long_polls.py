"""Callers that wait: check-ins of free clients, heartbeats of working ones, and watchers of events.

Clients also wait for the input of their steps (`fedplat_server/protocols/half.py`).

A watcher only keeps the number of the last event that it has seen. One that is further behind than the feed reads the
database itself, a page at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar

from fedplat.rounds import AttemptKey
from fedplat.rounds.commands import Abort, Assign, Refuse, RetryWindow
from fedplat.rounds.events import ClientCheckedIn, ClientLeft
from fedplat.rounds.states import Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import errors, logs
from fedplat_server.auth.client_directory import ClientDirectory, Offer
from fedplat_server.coordination.approvals import ApprovalBoards
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import ClientRecord
from fedplat_server.database.sql_audit import EventStore
from fedplat_server.records.events import EventRow

Answer = Assign | Refuse
_Key = TypeVar("_Key")


class PendingCheckIn:
    """A check-in that waits for an answer. It ignores answers issued before the coordinator saw this call.

    Those belong to an earlier call: their token is invalid, or their refusal is out of date. There may be ten thousand
    check-ins at a time: each costs a future and a timer, but no task.
    """

    __slots__ = ("_answer", "_is_answered", "_is_open", "_woken")

    def __init__(self) -> None:
        self._woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: Answer | None = None
        self._is_answered = False
        self._is_open = False

    def open(self) -> None:
        """Accept answers from now on: the coordinator has seen this check-in."""
        self._is_open = True

    @property
    def is_answered(self) -> bool:
        """True if the call has an answer or was released."""
        return self._is_answered

    @property
    def answer(self) -> Answer | None:
        """The answer; None before there is one, or if the call was released without one."""
        return self._answer

    async def wait(self, timeout_s: float) -> None:
        """Wait until the call is answered or released, for up to `timeout_s`. May be called once."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._wake)
        try:
            await self._woken
        finally:
            timer.cancel()

    def deliver(self, answer: Answer) -> None:
        """Answer the call, if the answer belongs to it."""
        if self._is_open and not self._is_answered:
            self._answer = answer
            self.release()

    def release(self) -> None:
        """End the wait."""
        self._is_answered = True
        self._wake()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


@contextlib.contextmanager
def list_event(events: dict[_Key, set[asyncio.Event]], key: _Key, event: asyncio.Event) -> Generator[asyncio.Event]:
    """Yield an event, which is listed under a key within the block."""
    events.setdefault(key, set()).add(event)
    try:
        yield event
    finally:
        events[key].remove(event)
        if not events[key]:
            del events[key]


class LongPolls:
    """The pending calls, which commands of the coordinator answer."""

    def __init__(self) -> None:
        self._waiting: dict[str, PendingCheckIn] = {}
        self._working: dict[tuple[AttemptKey, str], set[asyncio.Event]] = {}
        self._steps: dict[AttemptKey, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def open_check_in(self, client_id: str) -> Generator[PendingCheckIn]:
        """Open a check-in of a client; release its earlier one, if there is one."""
        check_in = PendingCheckIn()
        if (earlier := self._waiting.get(client_id)) is not None:
            earlier.release()
        self._waiting[client_id] = check_in
        try:
            yield check_in
        finally:
            if self._waiting.get(client_id) is check_in:
                del self._waiting[client_id]

    def is_latest(self, client_id: str, check_in: PendingCheckIn) -> bool:
        """Return whether this is the client's latest check-in."""
        return self._waiting.get(client_id) is check_in

    def deliver(self, answer: Answer) -> None:
        """Answer a waiting client. A client that has left will check in again."""
        if (check_in := self._waiting.get(answer.client_id)) is not None:
            check_in.deliver(answer)

    def release(self) -> None:
        """End all check-ins without an answer."""
        for check_in in self._waiting.values():
            check_in.release()

    def cancel(self, client_id: str) -> None:
        """End all long polls of a client, whether free or working."""
        if (check_in := self._waiting.get(client_id)) is not None:
            check_in.release()
        for (_, working_client), events in self._working.items():
            if working_client == client_id:
                for event in events:
                    event.set()

    def open_heartbeat(self, key: AttemptKey, client_id: str) -> contextlib.AbstractContextManager[asyncio.Event]:
        """Yield an event that is set when the client has to stop its work on an attempt."""
        return list_event(self._working, (key, client_id), asyncio.Event())

    @contextlib.contextmanager
    def open_step(self, key: AttemptKey, client_id: str) -> Generator[asyncio.Event]:
        """Yield an event that is set when the attempt begins a phase or ends, or the client has to stop."""
        with self.open_heartbeat(key, client_id) as event, list_event(self._steps, key, event):
            yield event

    def advance(self, key: AttemptKey) -> None:
        """Wake all clients that wait for the next step of an attempt."""
        for event in self._steps.get(key, ()):
            event.set()

    def stop(self, command: Abort) -> None:
        """Wake the pending heartbeats and steps of a working client, which answer that it has to stop."""
        for event in self._working.get((command.key, command.client_id), ()):
            event.set()


RETRY_SOON = RetryWindow(0.0, 1.0)


class Presence:
    """Notes that a client is there, and free, and what its owner has decided."""

    def __init__(
        self,
        clients: ClientDirectory,
        availability: AvailabilityTracker,
        progress: ProgressTracker,
        boards: ApprovalBoards,
    ) -> None:
        self._boards = boards
        self._clients = clients
        self._availability = availability
        self._progress = progress

    async def note(
        self,
        client: ClientRecord,
        labels: Mapping[str, str],
        version: str,
        offer: Offer,
        approvals: fleet_pb2.OwnerApprovals,
    ) -> ClientRecord:
        """Store the labels and the software of a client that checks in; return its record as it is now."""
        client = await self._clients.update(client, labels, version)
        self._clients.record_offer(client.client_id, offer)
        self._availability.record(client.client_id, client.population)
        self._progress.drop_overdue(client.client_id)
        await self._boards.note(client, approvals)
        return client


async def wait_for_work(
    runner: Runner, long_polls: LongPolls, event: ClientCheckedIn, wait_s: float
) -> Assign | Refuse:
    """Return the client's assignment as soon as it has one, or a refusal after `wait_s`. Raises `StoreError`.

    The client leaves the coordinator's waiting room in every case.
    """
    client_id = event.client_id
    with long_polls.open_check_in(client_id) as check_in:
        try:
            await runner.submit(event, check_in.open)
            await check_in.wait(wait_s)
            if not check_in.is_answered:
                # Timed out; but the coordinator may assign the client at this moment.
                await runner.submit(ClientLeft(client_id))
        finally:
            if check_in.answer is None and long_polls.is_latest(client_id, check_in):
                runner.post(ClientLeft(client_id))  # the connection was lost, or the daemon released the call
        return check_in.answer or Refuse(client_id, Reason.NOT_SELECTED, RETRY_SOON)


POLL_S = 2.0
"""Interval in which the feed looks for events that it was not notified of: those of other processes."""
NUM_KEPT = 1000
PAGE = 250


class EventFeed:
    """The latest events. It reads the database only while there are watchers."""

    def __init__(self, events: EventStore, poll_s: float = POLL_S) -> None:
        self._events = events
        self._poll_s = poll_s
        self._kept: deque[EventRow] = deque(maxlen=NUM_KEPT)
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Keep the feed running for a watcher."""
        self._num_watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="event feed")
        try:
            yield
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._task.cancel()
                self._task = None
                self._kept.clear()

    def next_change(self) -> asyncio.Event:
        """Return an event that is set when there are new events, or when the watchers must end."""
        return self._changed

    async def read_after(self, sequence: int) -> Sequence[EventRow]:
        """Return some events after a number; an empty list if there is no new one."""
        if self._kept and self._kept[0].sequence <= sequence + 1:
            start = sequence + 1 - self._kept[0].sequence
            return list(self._kept)[start : start + PAGE]
        return await self._events.list_events(sequence, limit=PAGE)

    def wake(self) -> None:
        """Wake all watchers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """End the task, whose watchers have ended or are being cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        last = None
        while True:
            appended = self._events.next_append()
            try:
                last, found = await self._read(last)
            except errors.LeadershipLostError:
                return  # the daemon ends the calls of all watchers
            except errors.StoreError as exc:
                logs.get().warning("watchers of events wait for the database", error=str(exc))
                found = []
            if found:
                self._kept.extend(found)
                self.wake()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(appended.wait(), self._poll_s)

    async def _read(self, last: int | None) -> tuple[int, Sequence[EventRow]]:
        """Return the number of the last event that is known, and the events after the one known before."""
        if last is None:
            last = await self._events.find_last_sequence()
            self.wake()  # watchers read the events before this one themselves
            return last, []
        found = await self._events.list_events(last, limit=PAGE)
        return found[-1].sequence if found else last, found
