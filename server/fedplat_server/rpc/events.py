"""The service `Events`: the stored events, as a list and as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from typing_extensions import override

from fedplat.wire.v1 import events_pb2, events_pb2_grpc
from fedplat_server.coordination.event_feed import EventFeed
from fedplat_server.database.sql_events import EventStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert
from fedplat_server.records.events import TYPE_NAMES, EventRow
from fedplat_server.rpc import handlers, pages
from fedplat_server.rpc.job_registry import JobRegistry


class EventsService(events_pb2_grpc.EventsServicer):
    """The handlers of the service."""

    def __init__(self, jobs: JobRegistry, store: EventStore, feed: EventFeed, draining: asyncio.Event) -> None:
        """`draining` is set when the daemon stops."""
        self._jobs = jobs
        self._store = store
        self._feed = feed
        self._draining = draining

    @override
    async def ListEvents(
        self, request: events_pb2.ListEventsRequest, context: handlers.Context
    ) -> events_pb2.ListEventsResponse:
        types, job_id = check_types(request.types), self._find_job(request.job)
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.SEQUENCE)
        found = await self._store.list_events(
            last[0] if last is not None else 0,
            types=types,
            job_id=job_id,
            newest_first=request.newest_first,
            limit=size + 1,
        )
        page, token = pages.cut(found, size, encode_event, lambda row: str(row.sequence))
        return events_pb2.ListEventsResponse(events=page, next_page_token=token)

    @override
    async def WatchEvents(
        self, request: events_pb2.WatchEventsRequest, context: handlers.Context
    ) -> AsyncIterator[events_pb2.Event]:
        types, job_id = check_types(request.types), self._find_job(request.job)
        with self._feed.watch():
            sequence = await self._store.find_last_sequence()
            if request.HasField("after_sequence"):
                sequence = max(sequence, min(request.after_sequence, 2**62))  # within the database's range
                async for row in self._past_events(request.after_sequence, sequence, types, job_id):
                    yield encode_event(row)
            while True:
                changed = self._feed.next_change()
                found = await self._feed.read_after(sequence)
                for row in found:
                    sequence = row.sequence
                    if (not types or row.type in types) and job_id in ("", row.job_id):
                        yield encode_event(row)
                self._refuse_if_draining()
                if not found:
                    await changed.wait()

    async def _past_events(self, after: int, last: int, types: frozenset[str], job_id: str) -> AsyncIterator[EventRow]:
        """Yield the matching events after a number, up to `last`; the database leaves out the others."""
        while after < last:
            found = await self._store.list_events(after, types=types, job_id=job_id)
            for row in found:
                if row.sequence > last:
                    return
                yield row
            if not found:
                return
            after = found[-1].sequence
            self._refuse_if_draining()

    def _refuse_if_draining(self) -> None:
        """Raise an error that callers retry: the end of the stream would mean that there are no more events."""
        if self._draining.is_set():
            raise RefusedError(Code.DRAINING)

    def _find_job(self, name: str) -> str:
        return self._jobs.find(name).state.job_id if name else ""


def check_types(types: Collection[str]) -> frozenset[str]:
    """Return types of events. Raises `RefusedError` for unknown ones."""
    unknown = sorted(set(types) - TYPE_NAMES)
    if unknown:
        text = f"type {unknown[0][:80]!r}: expected one of {', '.join(sorted(TYPE_NAMES))}"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return frozenset(types)


def encode_event(row: EventRow) -> events_pb2.Event:
    """Encode a stored event."""
    return convert.encode(events_pb2.Event, row)
