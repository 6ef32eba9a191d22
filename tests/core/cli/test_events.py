"""What `fedplat events` prints, and where its watch begins and continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from fedplat.admin import AdminClient
from fedplat.admin.patience import Patience
from fedplat.cli.events import EventReader, describe
from fedplat.cli.output import Output, OutputFormat
from fedplat.errors import ServerUnreachableError
from fedplat.wire.v1 import events_pb2


class FakeLog:
    """A server's events, numbered from 1; a watch breaks after two of them."""

    def __init__(self, *types: str) -> None:
        self.events = [events_pb2.Event(sequence=n, type=name, unix_s=n) for n, name in enumerate(types, 1)]
        self.watched_after: list[int] = []

    def iter_events(
        self, limit: int, *, types: Sequence[str] = (), job: str = "", newest_first: bool = False
    ) -> Iterator[events_pb2.Event]:
        assert newest_first
        assert not job
        return iter([event for event in self.events[::-1] if not types or event.type in types][:limit])

    def watch_events(self, after: int, *, types: Sequence[str], job: str) -> Iterator[events_pb2.Event]:
        self.watched_after.append(after)
        matching = [event for event in self.events if event.sequence > after and (not types or event.type in types)]
        yield from matching[:2]
        raise ServerUnreachableError("gone", reason="gone")


def reader(log: FakeLog, *types: str) -> EventReader:
    return EventReader(cast(AdminClient, log), Output(as_json=False), list(types), "")


def numbers(text: str) -> list[int]:
    return [int(line.split()[0]) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("number", "shown", "note"),
    [(0, [], ""), (2, [3, 4], "only the latest 2 events are shown"), (4, [1, 2, 3, 4], ""), (9, [1, 2, 3, 4], "")],
)
def test_the_latest_events_are_shown_the_oldest_first(
    number: int, shown: list[int], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reader(FakeLog("a.b", "c.d", "a.b", "c.d")).show_latest(number)
    output, errors = capsys.readouterr()
    assert numbers(output) == shown
    assert errors.startswith(note)
    assert bool(errors) is bool(note)


def test_events_since_a_time_in_the_formats_of_lists(capsys: pytest.CaptureFixture[str]) -> None:
    log = cast(AdminClient, FakeLog("a.b", "c.d", "a.b", "c.d"))

    def show(form: OutputFormat, since_unix_s: float = 0.0) -> str:
        EventReader(log, Output(form=form), [], "").show_latest(3, since_unix_s)
        return capsys.readouterr().out

    assert numbers(show(OutputFormat.WIDE, 3.0)) == [3, 4]
    assert show(OutputFormat.NAME, 3.5) == "4\n"
    assert [event["sequence"] for event in json.loads(show(OutputFormat.JSON))] == [2, 3, 4]
    assert (show(OutputFormat.JSON, 5.0), show(OutputFormat.JSONL, 5.0)) == ("[]\n", "")
    assert [json.loads(line)["type"] for line in show(OutputFormat.JSONL).splitlines()] == ["c.d", "a.b", "c.d"]


def test_a_watch_shows_each_event_once_over_interruptions(capsys: pytest.CaptureFixture[str]) -> None:
    log = FakeLog(*["a.b"] * 7)
    watching = reader(log)
    watching.show_latest(1)
    for _ in range(4):
        with pytest.raises(ServerUnreachableError):
            watching.follow(Patience(0.0, print))
    log.events += [events_pb2.Event(sequence=8, type="a.b", unix_s=8.0)]
    with pytest.raises(ServerUnreachableError):
        watching.follow(Patience(0.0, print))
    assert numbers(capsys.readouterr().out) == [7, 8]
    assert log.watched_after == [7] * 5


def test_a_watch_without_a_match_begins_with_new_events(capsys: pytest.CaptureFixture[str]) -> None:
    log = FakeLog("a.b", "a.b", "a.b")
    watching = reader(log, "c.d")
    watching.show_latest(5)
    with pytest.raises(ServerUnreachableError):
        watching.follow(Patience(0.0, print))
    assert log.watched_after == [3]
    assert capsys.readouterr().err == "there are no such events\n"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"type": "job.failed", "job_id": "j-1", "job_name": "toy", "text": "why"}, "job.failed  job toy  why"),
        ({"type": "round.committed", "job_id": "j-1", "round": 3, "attempt": 2}, "job j-1  round 3 attempt 2"),
        ({"type": "client.revoked", "client_id": "c-1"}, "client.revoked  client c-1"),
        ({"type": "alert.raised", "subject": "disk_full", "text": "no room"}, "alert.raised  disk_full  no room"),
        ({"type": "operator.added", "subject": "anna", "text": "anna was added"}, "operator.added  anna was added"),
    ],
)
def test_an_event_is_one_line(fields: dict[str, Any], line: str) -> None:
    assert describe(events_pb2.Event(sequence=7, unix_s=5.0, **fields)).endswith(line)
