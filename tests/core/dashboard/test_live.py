"""Live updates: one watch for all pages of a job, streams that end, and what they send."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from unittest.mock import Mock

import grpc
import pytest

from fedplat.dashboard import app, rendering
from fedplat.dashboard.app import Dashboard
from fedplat.dashboard.live import LiveUpdates
from fedplat.dashboard.source import PageSource
from fedplat.web import sessions
from fedplat.web.sessions import BrowserSession
from support.dashboard.fake_server import JOB_ID, FakeServer, away, refused
from support.dashboard.visitor import FakeClock, Visitor, until


async def read_stream(visitor: Visitor, dashboard: Dashboard, path: str) -> str:
    """What a stream sends until the dashboard stops; the dashboard must be told to stop."""
    response = await visitor.get(f"{path}?live=1")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert dashboard.updates.num_watches == 0
    return response.text


async def test_listeners_of_a_job_share_one_watch(server: FakeServer) -> None:
    updates = LiveUpdates()
    session: BrowserSession[PageSource] = BrowserSession(server, 0.0, 0.0)
    async with updates.listen(session, JOB_ID) as one, updates.listen(session, JOB_ID) as two:

        def is_watched() -> bool:
            return len(server.watches) == 1

        await until(is_watched, "a watch")
        before = updates.version(JOB_ID)
        server.watches[0].change()
        await asyncio.gather(one.wait(60.0), two.wait(60.0))
        assert updates.version(JOB_ID) > before
        assert updates.num_watches == len(server.watches) == 1
    assert updates.num_watches == 0
    assert server.watches[0].is_closed


async def test_a_stream_sends_the_live_parts_and_ends_with_the_dashboard(
    visitor: Visitor, server: FakeServer, dashboard: Dashboard
) -> None:
    stream = asyncio.create_task(read_stream(visitor, dashboard, f"/jobs/{JOB_ID}"))

    def is_watched() -> bool:
        return len(server.watches) == 1

    await until(is_watched, "the stream's watch")
    server.jobs[0].round = 19
    server.watches[0].change()

    def is_read_again() -> bool:
        return server.calls.count("show_job") >= 2

    await until(is_read_again, "another rendering")
    dashboard.updates.stop()
    events = (await stream).split("\n\n")
    parts = re.findall(r'hx-target="#(live_\w+)"', events[0])
    page = (await visitor.get(f"/jobs/{JOB_ID}")).text
    assert parts
    assert all(f'id="{name}"' in page for name in parts)
    assert any("19 <span" in event for event in events)


async def test_a_new_page_never_goes_back_to_what_an_older_one_was_sent(
    visitor: Visitor, server: FakeServer, dashboard: Dashboard, clock: FakeClock
) -> None:
    older = asyncio.create_task(read_stream(visitor, dashboard, "/"))
    await until(lambda: "status" in server.calls, "a rendering")
    server.num_clients = 77
    clock.now += 0.01  # less than the time for which streams share what was rendered
    server.calls.clear()
    newer = asyncio.create_task(read_stream(visitor, dashboard, "/"))
    await until(lambda: "status" in server.calls, "another rendering")
    dashboard.updates.stop()
    assert "77" in (await newer).split("\n\n")[0]
    assert "77" not in (await older).split("\n\n")[0]


async def test_a_session_never_gets_what_was_rendered_for_another_one(
    visitor: Visitor, server: FakeServer, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that has ended may have had the same place in memory, which is its `id`."""
    sent: list[bytes] = []
    format_event = rendering.format_event

    def format_and_note(parts: Mapping[str, str]) -> bytes:
        sent.append(format_event(parts))
        return sent[-1]

    monkeypatch.setattr(app, "format_event", format_and_note)
    monkeypatch.setattr(app, "id", Mock(return_value=7), raising=False)
    first = asyncio.create_task(read_stream(visitor, dashboard, "/"))
    await until(lambda: len(sent) == 1, "an event")
    other = FakeServer()
    other.num_clients = 77
    visitor.client.cookies.clear()
    visitor.client.cookies.set(app.COOKIE, dashboard.sessions.open(other))
    second = asyncio.create_task(read_stream(visitor, dashboard, "/"))
    await until(lambda: len(sent) == 2, "an event for the other session")
    dashboard.updates.stop()
    await asyncio.gather(first, second)
    assert b"77" in sent[1]
    assert b"77" not in sent[0]


async def test_a_stream_without_a_session_says_so(stranger: Visitor) -> None:
    assert (await stranger.get(f"/jobs/{JOB_ID}?live=1")).text == "event: signed-out\ndata: 1\n\n"


async def test_the_stream_of_a_removed_operator_ends(
    visitor: Visitor, server: FakeServer, dashboard: Dashboard
) -> None:
    server.error = refused(grpc.StatusCode.UNAUTHENTICATED)
    assert "signed-out" in (await visitor.get("/?live=1")).text
    assert len(dashboard.sessions) == 0


async def test_a_stream_shows_that_the_server_is_away(
    visitor: Visitor, server: FakeServer, dashboard: Dashboard
) -> None:
    server.error = away()
    stream = asyncio.create_task(read_stream(visitor, dashboard, "/"))
    await until(lambda: len(server.calls) == 2, "the status, for the page and for its frame")
    dashboard.updates.stop()
    text = await stream
    assert "The server does not answer" in text
    assert "live_tiles" not in text


def test_the_streams_of_a_session_are_bounded(server: FakeServer, clock: FakeClock) -> None:
    session = BrowserSession(server, clock(), clock())
    counts = [session.count_stream() for _ in range(sessions.MAX_STREAMS + 1)]
    assert [each.__enter__() for each in counts] == [True] * sessions.MAX_STREAMS + [False]
    for each in counts:
        each.__exit__(None, None, None)
    assert session.num_streams == 0
