"""Drives the coordinator with a real clock: events in a queue, stored in batches, then acted upon.

The loop in `run` is the whole of it. All events that wait are one batch and one transaction, so a thousand
reports cost a few commits. Whoever submits an event learns its verdict after it is stored. When the database
refuses a batch for good, each event is tried alone, so that what one caller sent harms nobody else.

When it does not answer, the batch may have been stored or not (the reply may be all that was lost). Callers are told
at once, and the runner asks until the database says which: it knows each save by its id. Only then does anything else
happen, so that nothing is applied twice and nothing is built on a state that is not the stored one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

import numpy as np

from fedplat.rounds import Change, Context, Coordinator, Proposal, Verdict
from fedplat.rounds.commands import Command
from fedplat.rounds.events import ClientCheckedIn, ClientLeft, Event, TimerFired
from fedplat_server import logs
from fedplat_server.auth.tokens import new_token
from fedplat_server.database.ports import Store
from fedplat_server.errors import (
    LeadershipLostError,
    ParticipationError,
    StaleRevisionError,
    StoreError,
    StoreUnavailableError,
)
from fedplat_server.records.audit import AuditEntry

MAX_BATCH = 1000
STORE_RETRY_S = 0.5
"""The first pause before a database that did not answer is asked again; the pauses double."""
MAX_STORE_RETRY_FACTOR = 10
"""The longest pause, as a multiple of the first one."""


def new_rng() -> np.random.Generator:
    """What a batch of events draws from, seeded anew, for 15 microseconds.

    Clients see who is drawn for ordinary jobs, and could learn from many such draws what one long sequence draws next;
    the samples of private jobs must stay secret.
    """
    return np.random.default_rng(secrets.randbits(128))


def new_context(now: float) -> Context:
    """Return what a batch of events is lent at a moment: fresh randomness, and secret tokens."""
    return Context(now=now, rng=new_rng(), new_token=new_token)


class Timer(Protocol):
    """A call that is to be made at some moment."""

    def cancel(self) -> None:
        """Give the call up."""
        ...


class Clock(Protocol):
    """The clock that deadlines are moments of. Every event loop is one."""

    def time(self) -> float:
        """Return the moment, in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call a function at a moment; at once if that has passed."""
        ...


class Actor(Protocol):
    """Carries out commands, and sees every stored change. Neither may block or fail."""

    def act(self, command: Command) -> None:
        """Carry out a command."""
        ...

    def on_stored(self, changes: Sequence[Change]) -> None:
        """See changes after they are stored and before their commands are carried out."""
        ...


@dataclasses.dataclass(slots=True)
class _Item:
    event: Event
    answer: asyncio.Future[Verdict] | None = None
    when_stored: Callable[[], None] | None = None
    audit: Sequence[AuditEntry] = ()


class Runner:
    """Owns the coordinator, and is the only one to move it.

    `new_context` makes what each batch of events is lent at a moment of `clock`. After `store_retry_s` seconds a
    database that did not answer is asked again; the pauses double.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        clock: Clock,
        new_context: Callable[[float], Context] = new_context,
        store_retry_s: float = STORE_RETRY_S,
    ) -> None:
        self.coordinator = coordinator
        self._store = store
        self._clock = clock
        self._new_context = new_context
        self._store_retry_s = store_retry_s
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._in_hand: list[_Item] = []
        self._timers: dict[str, Timer] = {}
        self._ended: BaseException | None = None
        self._doubt: StoreUnavailableError | None = None

    @property
    def now(self) -> float:
        """The moment on the clock that deadlines run on."""
        return self._clock.time()

    def post(self, event: Event) -> None:
        """Hands an event of the server's own over; it is tried until it can be stored."""
        self._queue.put_nowait(_Item(event))

    async def submit(
        self, event: Event, when_stored: Callable[[], None] | None = None, audit: Sequence[AuditEntry] = ()
    ) -> Verdict:
        """Hands a caller's event over and returns its verdict, stored. Raises `StoreError`.

        `when_stored` is called after the event is stored and before its commands are carried out. `audit` is noted
        in the same transaction, if the event is accepted.
        """
        if self._ended is not None:
            raise StoreUnavailableError(f"the server stops: {self._ended}") from self._ended
        if self._doubt is not None:
            raise StoreUnavailableError(str(self._doubt)) from self._doubt
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Item(event, answer, when_stored, audit))
        return await answer

    async def run(self, actor: Actor) -> None:
        """The main loop; ends when it is cancelled, or by an error that only a restart mends."""
        try:
            while True:
                self._in_hand = [await self._queue.get()]
                while not self._queue.empty() and len(self._in_hand) < MAX_BATCH:
                    self._in_hand.append(self._queue.get_nowait())
                await self._do(self._in_hand, actor)
                self._in_hand = []
        except BaseException as exc:
            self._end(exc)
            raise

    @property
    def in_doubt(self) -> bool:
        """Whether the database did not answer, so that it is not known what it holds."""
        return self._doubt is not None

    @property
    def has_events(self) -> bool:
        """Whether events wait to be stored, or are being stored."""
        return bool(self._in_hand) or not self._queue.empty()

    def stop_timers(self) -> None:
        """Cancel all timers: no deadline is noticed from now on."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def _do(self, batch: list[_Item], actor: Actor) -> None:
        context = self._new_context(self.now)
        proposal = self.coordinator.propose([item.event for item in batch], context)
        verdicts = zip(batch, proposal.verdicts, strict=True)
        audit = [entry for item, verdict in verdicts if verdict.accepted for entry in item.audit]
        save_id = secrets.token_hex(8)
        try:
            if proposal.changes:
                # A cancellation must not leave open whether the changes were stored.
                await _finish(self._store.jobs.save(proposal.changes, context.now, save_id=save_id, audit=audit))
        except StoreUnavailableError as exc:
            if not await self._was_saved(proposal, save_id, batch, exc, context.rng):
                self.coordinator.reject(proposal)
                for item in batch:
                    self._put_off(item, exc)
                return
        except StoreError as exc:
            self.coordinator.reject(proposal)
            await self._on_refused(batch, actor, exc)
            return
        self.coordinator.accept(proposal)
        self._answer(batch, proposal)
        actor.on_stored(proposal.changes)
        for command in proposal.commands:
            actor.act(command)
        for job_id, deadline_at in proposal.timers.items():
            self._set_timer(job_id, deadline_at)

    def _answer(self, batch: list[_Item], proposal: Proposal) -> None:
        for item, verdict in zip(batch, proposal.verdicts, strict=True):
            if item.when_stored is not None:
                item.when_stored()
            if item.answer is not None and not item.answer.done():
                item.answer.set_result(verdict)

    async def _was_saved(
        self,
        proposal: Proposal,
        save_id: str,
        batch: list[_Item],
        exc: StoreUnavailableError,
        rng: np.random.Generator,
    ) -> bool:
        """Asks the database until it says whether it has the changes. Meanwhile callers are sent away."""
        logs.get().error("the database does not answer", events=len(batch), error=str(exc))
        self._doubt = exc
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for item in (*batch, *waiting):
            _tell(item, exc)
        for item in waiting:
            if item.answer is None:
                self._queue.put_nowait(item)
        pause_s = self._store_retry_s
        while True:
            try:
                last = await self._store.jobs.find_last_save(proposal.changes[0].job.job_id)
                break
            except StoreUnavailableError:
                await asyncio.sleep(rng.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, MAX_STORE_RETRY_FACTOR * self._store_retry_s)
        self._doubt = None
        logs.get().info("the database answers again", saved=last == save_id)
        return last == save_id

    async def _on_refused(self, batch: list[_Item], actor: Actor, exc: StoreError) -> None:
        if isinstance(exc, StaleRevisionError):
            raise StaleRevisionError(
                f"{exc}; does another fedplat-server use this database? Only one may: stop it, and start this one again"
            ) from exc
        if isinstance(exc, ParticipationError):
            # What is remembered here of who took part is wrong, and is read back at the next start only.
            logs.get().error("the database refused assignments", error=str(exc))
            raise ParticipationError(f"{exc}; start the server again: it reads back who took part in what") from exc
        if isinstance(exc, LeadershipLostError):
            raise exc
        if len(batch) > 1:
            for item in batch:
                await self._do([item], actor)
        elif batch[0].answer is None:
            raise exc
        else:
            self._put_off(batch[0], exc)

    def _put_off(self, item: _Item, exc: StoreError) -> None:
        if isinstance(item.event, ClientCheckedIn | ClientLeft):
            # Nobody waits: the caller of a check-in hears of the failure, and a later retry of "it has left" could
            # throw out a client that is back by then.
            self.coordinator.room.leave(item.event.client_id)
        elif item.answer is None:
            self._clock.call_at(self.now + self._store_retry_s, functools.partial(self._queue.put_nowait, item))
        _tell(item, exc)

    def _end(self, exc: BaseException) -> None:
        """Nobody shall wait for a verdict that never comes."""
        self._ended = exc
        left, self._in_hand = self._in_hand, []
        while not self._queue.empty():
            left.append(self._queue.get_nowait())
        for item in left:
            _tell(item, StoreUnavailableError(f"the server stops: {exc}"))

    def _set_timer(self, job_id: str, deadline_at: float | None) -> None:
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer.cancel()
        if deadline_at is not None:
            fire = functools.partial(self.post, TimerFired(job_id))
            self._timers[job_id] = self._clock.call_at(deadline_at, fire)


def _tell(item: _Item, exc: StoreError) -> None:
    if item.answer is not None and not item.answer.done():
        item.answer.set_exception(type(exc)(str(exc)))


async def _finish(save: Coroutine[None, None, None]) -> None:
    """Awaits a write to its end, even when this task is cancelled meanwhile."""
    task = asyncio.create_task(save)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (exc := task.exception()) is not None:
            logs.get().error("the last changes were not stored", error=str(exc))
        raise
