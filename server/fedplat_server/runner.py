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
import random
import secrets
from collections.abc import Callable, Coroutine, Sequence
from hashlib import sha256
from typing import Protocol

import numpy as np

from fedplat.rounds import Change, Context, Coordinator, Proposal, Verdict
from fedplat.rounds.commands import Command, SetTimer
from fedplat.rounds.events import ClientCheckedIn, ClientLeft, Event, TimerFired
from fedplat_server import logs
from fedplat_server.audit import AuditEntry
from fedplat_server.errors import (
    LeadershipLostError,
    ParticipationError,
    StaleRevisionError,
    StoreError,
    StoreUnavailableError,
)
from fedplat_server.store.ports import Store

MAX_BATCH = 1000
STORE_RETRY_S = 0.5
"""The first pause before a database that did not answer is asked again; the pauses double."""
LONGEST_STORE_RETRY_S = 5.0


def hash_secret(secret: str) -> bytes:
    """What the database keeps of a token or a credential. Both are random, so that a plain hash is enough."""
    return sha256(secret.encode()).digest()


def new_token() -> tuple[str, bytes]:
    """A fresh secret of 256 random bits, and its hash."""
    secret = secrets.token_urlsafe(32)
    return secret, hash_secret(secret)


def new_rng() -> np.random.Generator:
    """What a batch of events draws from, seeded anew, for 15 microseconds.

    Clients see who is drawn for ordinary jobs, and could learn from many such draws what one long sequence draws next;
    the samples of private jobs must stay secret.
    """
    return np.random.default_rng(secrets.randbits(128))


class Actor(Protocol):
    """Carries out commands, and hears of every stored change. Neither may block or fail."""

    def act(self, command: Command) -> None:
        """Carries out a command (all but `SetTimer`)."""
        ...

    def stored(self, changes: Sequence[Change]) -> None:
        """Hears of changes, after they are stored and before their commands are carried out."""
        ...


@dataclasses.dataclass(slots=True)
class _Item:
    event: Event
    answer: asyncio.Future[Verdict] | None = None
    when_stored: Callable[[], None] | None = None
    audit: Sequence[AuditEntry] = ()


class Runner:
    """Owns the coordinator; nobody else moves it."""

    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        self.coordinator = coordinator
        self._store = store
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._in_hand: list[_Item] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._ended: BaseException | None = None
        self._doubt: StoreUnavailableError | None = None

    @property
    def now(self) -> float:
        """The moment on the clock that deadlines run on."""
        return self._clock()

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
        """No deadline strikes any more."""
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    async def _do(self, batch: list[_Item], actor: Actor) -> None:
        context = Context(now=self._clock(), rng=new_rng(), new_token=new_token)
        proposal = self.coordinator.propose([item.event for item in batch], context)
        verdicts = zip(batch, proposal.verdicts, strict=True)
        audit = [entry for item, verdict in verdicts if verdict.accepted for entry in item.audit]
        save_id = secrets.token_hex(8)
        try:
            if proposal.changes:
                # A cancellation must not leave open whether the changes were stored.
                await _finish(self._store.jobs.save(proposal.changes, context.now, save_id=save_id, audit=audit))
        except StoreUnavailableError as exc:
            if not await self._was_saved(proposal, save_id, batch, exc):
                self.coordinator.reject(proposal)
                for item in batch:
                    self._put_off(item, exc)
                return
        except StoreError as exc:
            self.coordinator.reject(proposal)
            await self._refused(batch, actor, exc)
            return
        self.coordinator.accept(proposal)
        self._answer(batch, proposal)
        actor.stored(proposal.changes)
        for command in proposal.commands:
            if isinstance(command, SetTimer):
                self._set_timer(command)
            else:
                actor.act(command)

    def _answer(self, batch: list[_Item], proposal: Proposal) -> None:
        for item, verdict in zip(batch, proposal.verdicts, strict=True):
            if item.when_stored is not None:
                item.when_stored()
            if item.answer is not None and not item.answer.done():
                item.answer.set_result(verdict)

    async def _was_saved(
        self, proposal: Proposal, save_id: str, batch: list[_Item], exc: StoreUnavailableError
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
        pause_s = STORE_RETRY_S
        while True:
            try:
                last = await self._store.jobs.find_last_save(proposal.changes[0].job.job_id)
                break
            except StoreUnavailableError:
                await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, LONGEST_STORE_RETRY_S)
        self._doubt = None
        logs.get().info("the database answers again", saved=last == save_id)
        return last == save_id

    async def _refused(self, batch: list[_Item], actor: Actor, exc: StoreError) -> None:
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
            asyncio.get_running_loop().call_later(STORE_RETRY_S, self._queue.put_nowait, item)
        _tell(item, exc)

    def _end(self, exc: BaseException) -> None:
        """Nobody shall wait for a verdict that never comes."""
        self._ended = exc
        left, self._in_hand = self._in_hand, []
        while not self._queue.empty():
            left.append(self._queue.get_nowait())
        for item in left:
            _tell(item, StoreUnavailableError(f"the server stops: {exc}"))

    def _set_timer(self, command: SetTimer) -> None:
        if (handle := self._timers.pop(command.job_id, None)) is not None:
            handle.cancel()
        if command.at is not None:
            loop = asyncio.get_running_loop()
            self._timers[command.job_id] = loop.call_at(command.at, self.post, TimerFired(command.job_id))


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
