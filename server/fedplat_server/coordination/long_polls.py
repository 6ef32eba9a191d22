"""Pending long polls: check-ins of free clients, and heartbeats of working clients, which an abort answers.

Clients also wait for the input of their steps (`fedplat_server/protocols/steps.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping
from typing import TypeVar

from fedplat.rounds import AttemptKey
from fedplat.rounds.commands import Abort, Assign, Refuse, RetryWindow
from fedplat.rounds.events import ClientCheckedIn, ClientLeft
from fedplat.rounds.states import Reason
from fedplat_server.auth.client_directory import ClientDirectory, Offer
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord

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
    """Notes that a client is there, and free."""

    def __init__(self, clients: ClientDirectory, availability: AvailabilityTracker, progress: ProgressTracker) -> None:
        self._clients = clients
        self._availability = availability
        self._progress = progress

    async def note(self, client: ClientRecord, labels: Mapping[str, str], version: str, offer: Offer) -> ClientRecord:
        """Store the labels and the software of a client that checks in; return its record as it is now."""
        client = await self._clients.update(client, labels, version)
        self._clients.record_offer(client.client_id, offer)
        self._availability.record(client.client_id, client.population)
        self._progress.drop_overdue(client.client_id)
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
