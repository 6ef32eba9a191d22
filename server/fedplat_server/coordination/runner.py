"""The runner of the coordinator with a real clock: events are queued, stored in batches, and then acted upon.

See the loop in `Runner.run`. All waiting events are one batch and one transaction, so a thousand reports cost a few
commits. Reports also wait for others that are on their way (`gathering`), unless they close their attempt. The caller
of an event receives its verdict after it is stored. If the database refuses a batch permanently, each event is stored
separately, so that one caller's event cannot fail those of others.

If the database does not answer, the batch may have been stored or not (only the reply may have been lost). The callers
receive an error at once, and the runner queries the database, which stores the id of each save, until it answers
whether the batch was stored. Until then the runner does nothing else, so that no change is applied twice, and no change
is based on a state that is not the stored one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from fedplat.rounds import Change, Context, Coordinator, Proposal, Verdict, commands, events
from fedplat_server import logs, retries
from fedplat_server.auth.client_directory import new_token
from fedplat_server.coordination.gathering import ComingReports, Gathering
from fedplat_server.database.sql_contents import NO_CONTENTS, SmallContents
from fedplat_server.database.store import Store
from fedplat_server.errors import (
    LeadershipLostError,
    ParticipationError,
    StaleRevisionError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from fedplat_server.records.audit import AuditEntry

Result = TypeVar("Result")
MAX_BATCH = 1000
NO_ANSWER = "the server's database does not answer"
FULL = "the disk of the server's database is full"
LOG_EVERY_S = 60.0
"""The interval of lines about a database that still stores nothing, which is tried twice a second."""


def new_rng() -> np.random.Generator:
    """Return a freshly seeded generator for a batch of events; this takes 15 microseconds.

    Clients observe which of them are drawn for ordinary jobs, and could predict one long sequence from many such draws;
    but the samples of private jobs must stay secret.
    """
    return np.random.default_rng(secrets.randbits(128))


def new_context(now: float) -> Context:
    """Return the context of a batch of events at a time: fresh randomness, and secret tokens."""
    return Context(now=now, rng=new_rng(), new_token=new_token)


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


class Clock(Protocol):
    """The clock of all deadlines. Every event loop is one."""

    def time(self) -> float:
        """Return the time in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call a function at a time; at once if that has passed."""
        ...


class StoredObserver(Protocol):
    """A part that follows stored changes. It must not block or fail."""

    def on_stored(self, changes: Sequence[Change]) -> None:
        """Handle changes after they are stored and before their commands are executed."""


class Actor(StoredObserver, Protocol):
    """The executor of commands, which also observes stored changes. Its methods must not block or fail."""

    def act(self, command: commands.Command) -> None:
        """Execute a command."""


@dataclasses.dataclass(slots=True)
class _Item:
    event: events.Event
    answer: asyncio.Future[Verdict] | None = None
    when_stored: Callable[[], None] | None = None
    audit: Sequence[AuditEntry] = ()
    contents: SmallContents = NO_CONTENTS


class Runner:
    """The owner of the coordinator, which no one else may change.

    `new_context` returns the context of a batch of events at a time of `clock`. `store_retry_s` is the first delay
    before a retry if the database does not answer; the delays double.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        clock: Clock,
        new_context: Callable[[float], Context] = new_context,
        store_retry_s: float = retries.STORE_RETRY_S,
    ) -> None:
        self.coordinator = coordinator
        self._store = store
        self._clock = clock
        self._new_context = new_context
        self._store_retry_s = store_retry_s
        self._queue: deque[_Item] = deque()
        self._moved = asyncio.Event()  # an event was queued, or an expected report ended otherwise
        self._coming = ComingReports()
        self._batch: list[_Item] = []
        self._timers: dict[str, Timer] = {}
        self._ended: BaseException | None = None
        self._doubt: StoreUnavailableError | None = None
        self._problem_since = -math.inf
        self.problem = ""
        """Why the last changes could not be stored; empty if they were."""

    @property
    def now(self) -> float:
        """The time on the clock of all deadlines."""
        return self._clock.time()

    def post(self, event: events.Event, contents: SmallContents = NO_CONTENTS) -> None:
        """Queue an event of the server itself, which is retried until it is stored; `contents` as for `submit`."""
        self._put(_Item(event, contents=contents))

    async def submit(
        self,
        event: events.Event,
        when_stored: Callable[[], None] | None = None,
        audit: Sequence[AuditEntry] = (),
        contents: SmallContents = NO_CONTENTS,
    ) -> Verdict:
        """Queue a caller's event, and return its verdict when it is stored. Raises `StoreError` if it is not stored.

        `when_stored` is called after the event is stored and before its commands are executed. `audit` and `contents`,
        the bytes that the event makes necessary, are written in the same transaction, if the event is accepted. They
        are dropped with an event that is not stored.
        """
        if self._ended is not None:
            raise StoreUnavailableError(f"the server is stopping: {self._ended}") from self._ended
        if self._doubt is not None:
            raise StoreUnavailableError(str(self._doubt)) from self._doubt
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._put(_Item(event, answer, when_stored, audit, contents))
        return await answer

    @contextlib.contextmanager
    def expect_report(self, client_id: str) -> Generator[None]:
        """Let the reports of a client's job wait for the one that the client is sending, while the block runs."""
        key = self.coordinator.assignment_of(client_id)
        if key is None:
            yield
            return
        with self._coming.expect(key.job_id, client_id, self.now):
            try:
                yield
            finally:
                self._moved.set()

    async def run(self, actor: Actor) -> None:
        """Store batches of events until cancelled, or until an error that requires a restart."""
        try:
            while True:
                await self._wait_for_events()
                await self._gather_reports()
                await self._process(self._batch, actor)
                self._batch = []
        except BaseException as exc:
            self._end(exc)
            raise

    @property
    def in_doubt(self) -> bool:
        """True if the database does not answer, so that it is unknown whether the last batch was stored."""
        return self._doubt is not None

    @property
    def has_events(self) -> bool:
        """True if events are waiting to be stored, or are being stored."""
        return bool(self._batch or self._queue)

    def stop_timers(self) -> None:
        """Cancel the timers of all deadlines."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        if isinstance(item.event, events.UpdateReported):
            self._coming.on_queued(item.event, self.now)
        self._moved.set()

    async def _wait_for_events(self) -> None:
        while not self._queue:
            self._moved.clear()
            await self._moved.wait()
        self._take_waiting()

    def _take_waiting(self) -> None:
        while self._queue and len(self._batch) < MAX_BATCH:
            self._batch.append(self._queue.popleft())

    async def _gather_reports(self) -> None:
        """Wait for the reports that follow, as long as nothing else waits for the events of the batch."""
        gathering, num_added = Gathering(self.coordinator, self._coming, self.now), 0
        while all(gathering.add(item.event) for item in self._batch[num_added:]) and len(self._batch) < MAX_BATCH:
            num_added = len(self._batch)
            if (left_s := gathering.left_s(self.now)) <= 0.0:
                return
            self._moved.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._moved.wait()
            except TimeoutError:
                return
            self._take_waiting()

    async def _process(self, batch: list[_Item], actor: Actor) -> None:
        context = self._new_context(self.now)
        proposal = self.coordinator.propose([item.event for item in batch], context)
        accepted = [item for item, verdict in zip(batch, proposal.verdicts, strict=True) if verdict.accepted]
        audit = [entry for item in accepted for entry in item.audit]
        contents = SmallContents.merge(item.contents for item in accepted)
        save_id = secrets.token_hex(8)
        try:
            if proposal.changes:
                # After a cancellation, too, it must be known whether the changes were stored.
                saving = self._store.jobs.save(
                    proposal.changes, context.now, save_id=save_id, audit=audit, contents=contents
                )
                await finish(saving, _note_unsaved)
        except StoreUnavailableError as exc:
            if not await self._was_saved(proposal, save_id, batch, exc, context.rng):
                self.coordinator.reject(proposal)
                for item in batch:
                    self._postpone(item, exc)
                return
        except StoreError as exc:
            self.coordinator.reject(proposal)
            await self._on_refused(batch, actor, exc)
            return
        if proposal.changes and self.problem:
            logs.get().info("the database stores changes again")
            self.problem = ""
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
        self, proposal: Proposal, save_id: str, batch: list[_Item], exc: StoreUnavailableError, rng: np.random.Generator
    ) -> bool:
        """Query the database until it answers whether the changes were stored. Meanwhile callers receive the error."""
        self._note_problem(batch, exc)
        self._doubt = exc
        waiting = list(self._queue)
        self._queue.clear()
        for item in (*batch, *waiting):
            _fail(item, exc)
        for item in waiting:
            if item.answer is None:
                self._put(item)
        find = functools.partial(self._store.jobs.find_last_save, proposal.changes[0].job.job_id)
        pauses = retries.grow_pauses(self._store_retry_s, rng)
        last = await retries.retry(find, StoreUnavailableError, pauses)
        self._doubt = None
        logs.get().debug("the database answers again", saved=last == save_id)
        return last == save_id

    def _note_problem(self, batch: list[_Item], exc: StoreUnavailableError) -> None:
        """Keep the reason, and log it."""
        name = FULL if isinstance(exc, StoreFullError) else NO_ANSWER
        if name != self.problem or self.now - self._problem_since >= LOG_EVERY_S:
            logs.get().error(name, events=len(batch), error=str(exc))
            self._problem_since = self.now
        self.problem = name

    async def _on_refused(self, batch: list[_Item], actor: Actor, exc: StoreError) -> None:
        if isinstance(exc, StaleRevisionError):
            raise StaleRevisionError(
                f"{exc}: another process changed the job; on SQLite, stop the other fedplat-server; then start this one"
            ) from exc
        if isinstance(exc, ParticipationError):
            # The participations in memory are wrong, and only a start reads them from the database.
            logs.get().error("the database refused assignments", error=str(exc))
            raise ParticipationError(f"{exc}; restart the server, which then reads the participations again") from exc
        if isinstance(exc, LeadershipLostError):
            raise exc
        if len(batch) > 1:
            for item in batch:
                await self._process([item], actor)
        elif batch[0].answer is None:
            raise exc
        else:
            self._postpone(batch[0], exc)

    def _postpone(self, item: _Item, exc: StoreError) -> None:
        if isinstance(item.event, events.ClientCheckedIn | events.ClientLeft):
            # The client does not wait any more: its check-in fails. A later retry of `ClientLeft` could remove a
            # client that has checked in again.
            self.coordinator.room.leave(item.event.client_id)
        elif item.answer is None:
            self._clock.call_at(self.now + self._store_retry_s, functools.partial(self._put, item))
        _fail(item, exc)

    def _end(self, exc: BaseException) -> None:
        """Fail all waiting events, whose callers would otherwise wait forever."""
        self._ended = exc
        remaining, self._batch = [*self._batch, *self._queue], []
        self._queue.clear()
        for item in remaining:
            _fail(item, StoreUnavailableError(f"the server is stopping: {exc}"))

    def _set_timer(self, job_id: str, deadline_at: float | None) -> None:
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer.cancel()
        if deadline_at is not None:
            fire = functools.partial(self.post, events.TimerFired(job_id))
            self._timers[job_id] = self._clock.call_at(deadline_at, fire)


def _fail(item: _Item, exc: StoreError) -> None:
    if item.answer is not None and not item.answer.done():
        item.answer.set_exception(type(exc)(str(exc)))


async def finish(call: Coroutine[None, None, Result], note: Callable[[BaseException], None]) -> Result:
    """Await a call to its end, even if this task is cancelled meanwhile; then `note` gets the error of the call."""
    task = asyncio.create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (exc := task.exception()) is not None:
            note(exc)
        raise


def _note_unsaved(exc: BaseException) -> None:
    logs.get().error("the last changes were not stored", error=str(exc))
