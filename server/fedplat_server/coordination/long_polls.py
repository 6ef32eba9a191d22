"""Who waits for the server to say something: free clients for work, working clients for an order to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

from fedplat.rounds import AttemptKey
from fedplat.rounds.commands import Abort, Assign, Refuse

Answer = Assign | Refuse
_Name = tuple[AttemptKey, str]


class PendingCheckIn:
    """Where one call of a client waits. It hears what the coordinator says once it knows of this call.

    What was said before that was meant for an earlier call: its token is dead, or its refusal is out of date. Ten
    thousand of them exist at a time: a future and a timer each, no task of its own.
    """

    __slots__ = ("_answer", "_is_answered", "_is_open", "_waked")

    def __init__(self) -> None:
        self._waked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: Answer | None = None
        self._is_answered = False
        self._is_open = False

    def open(self) -> None:
        """The coordinator has seen this call's check-in."""
        self._is_open = True

    @property
    def is_answered(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self._is_answered

    @property
    def answer(self) -> Answer | None:
        """What was said; None if nothing was, or if the client was sent away."""
        return self._answer

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is an answer, or when the time is over; good for one wait."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._wake)
        try:
            await self._waked
        finally:
            timer.cancel()

    def deliver(self, answer: Answer) -> None:
        """Hears an answer, if it is meant for this call."""
        if self._is_open and not self._is_answered:
            self._answer = answer
            self.release()

    def release(self) -> None:
        """Ends the waiting, without an answer unless there is one."""
        self._is_answered = True
        self._wake()

    def _wake(self) -> None:
        if not self._waked.done():
            self._waked.set_result(None)


class LongPolls:
    """Connects commands with the calls that wait for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, PendingCheckIn] = {}
        self._working: dict[_Name, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def waiting(self, client_id: str) -> Generator[PendingCheckIn]:
        """A place to wait for work; the client's earlier call, if there is one, is sent away."""
        place = PendingCheckIn()
        if (earlier := self._waiting.get(client_id)) is not None:
            earlier.release()
        self._waiting[client_id] = place
        try:
            yield place
        finally:
            if self._waiting.get(client_id) is place:
                del self._waiting[client_id]

    def is_latest(self, client_id: str, place: PendingCheckIn) -> bool:
        """Whether this is the call by which the client waits."""
        return self._waiting.get(client_id) is place

    def deliver(self, answer: Answer) -> None:
        """Answers a waiting client; one that is gone will ask again."""
        if (place := self._waiting.get(answer.client_id)) is not None:
            place.deliver(answer)

    def release(self) -> None:
        """Ends all waiting for work."""
        for place in self._waiting.values():
            place.release()

    def cancel(self, client_id: str) -> None:
        """Ends all calls by which a client waits, whether free or at work."""
        if (place := self._waiting.get(client_id)) is not None:
            place.release()
        for (_, worker), events in self._working.items():
            if worker == client_id:
                for event in events:
                    event.set()

    @contextlib.contextmanager
    def working(self, key: AttemptKey, client_id: str) -> Generator[asyncio.Event]:
        """An event that is set when the client shall stop its work."""
        name, event = (key, client_id), asyncio.Event()
        self._working.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            calls = self._working[name]
            calls.remove(event)
            if not calls:
                del self._working[name]

    def stop(self, command: Abort) -> None:
        """Wakes every heartbeat that a working client has pending, so that it hears at once."""
        for event in self._working.get((command.key, command.client_id), ()):
            event.set()
