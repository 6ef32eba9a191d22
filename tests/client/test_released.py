"""The record of what has left a client: its line is on the disk before anything is sent, and changes are noticed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from typing_extensions import override

from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, ClientOptions, EvaluateResult, Task, TrainResult
from fedplat_client._state import released
from fedplat_client._state.released import Protection, ReleasedLine, ReleaseRecord
from fedplat_client.commands import main
from support.fake_fleet import FakeFleet, serving

MakeClient = Callable[..., Client]


def line(number: int, **fields: Any) -> ReleasedLine:
    given: dict[str, Any] = {
        **{"time": f"2026-11-28T10:00:0{number}.000+00:00", "job_id": "job-1", "job": "digits", "round": number},
        **{"attempt": 1, "trainer": "digits", "content": "update", "size_bytes": 100 * number, "digest": "ab" * 32},
    }
    return ReleasedLine(**(given | fields))


LINES = [line(1), line(2, content="metrics", metrics={"loss": 0.5}), line(3, protection=Protection(True, 3, 0.5))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "released.jsonl"
    record = ReleaseRecord(path)
    for each in LINES:
        record.add(each)
    return path


def test_lines_are_kept_in_order_over_restarts(path: Path) -> None:
    head = released.verify(path).head
    assert path.stat().st_mode & 0o777 == 0o600
    ReleaseRecord(path).add(line(4))
    assert list(released.read(path)) == [*LINES, line(4)]
    found = released.verify(path)
    assert (found.num_lines, found.wrong, found.is_cut) == (4, 0, False)
    assert found.head != head
    assert json.loads(path.read_bytes().splitlines()[2])["protection"] == {
        "masked": True,
        "min_clients": 3,
        "noise_multiplier": 0.5,
    }


def test_one_changed_byte_is_found_wherever_it_is(path: Path) -> None:
    content = path.read_bytes()
    for place in (*range(0, len(content), 7), *range(len(content) - 80, len(content))):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        found = released.verify(path)
        assert found.wrong or found.is_cut, place
        assert found.num_lines <= content[:place].count(b"\n")


def test_lines_that_are_removed_moved_or_repeated_are_found(path: Path) -> None:
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for lines, wrong in (
        ([second, third], 1),
        ([first, third], 2),
        ([second, first, third], 1),
        ([first, second, second, third], 3),
    ):
        path.write_bytes(b"".join(lines))
        assert released.verify(path).wrong == wrong


def test_a_line_that_a_crash_has_cut_is_replaced(path: Path) -> None:
    content = path.read_bytes()
    for length in (len(content) - 1, len(content) - 30, content.rindex(b"\n", 0, -1) + 2):
        path.write_bytes(content[:length])
        assert released.verify(path) == released.Verification(2, released.verify(path).head, is_cut=True)
        assert list(released.read(path)) == LINES[:2]
        ReleaseRecord(path).add(LINES[2])
        assert path.read_bytes() == content


def test_the_owner_may_move_the_file_aside_while_the_client_runs(tmp_path: Path) -> None:
    path = tmp_path / "released.jsonl"
    record = ReleaseRecord(path)
    record.add(line(1))
    path.rename(tmp_path / "archive.jsonl")
    record.add(line(2))
    assert [released.verify(each).num_lines for each in (path, tmp_path / "archive.jsonl")] == [1, 1]


def test_a_line_that_cannot_be_synced_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, content = ReleaseRecord(path), path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            record.add(line(4))
    assert path.read_bytes() == content
    record.add(line(4))
    assert released.verify(path).num_lines == 4


def test_another_file_is_not_continued(path: Path) -> None:
    for content in (b"something else\n", b"x" * 3_000_000):
        path.write_bytes(content)
        with pytest.raises(OSError, match="move the file aside"):
            ReleaseRecord(path).add(line(1))
        assert path.read_bytes() == content


class WatchingFleet(FakeFleet):
    """Notes which lines the record has when a call arrives."""

    path = Path("unknown")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []

    @override
    def _enter(self, call: str, request: Any, context: Any, *, authenticated: bool = True) -> None:
        if call in ("Upload", "Report", "Fail"):
            self.found.append((call, [each.content for each in released.read(self.path)]))
        super()._enter(call, request, context, authenticated=authenticated)


def run(fleet: FakeFleet, client: Client) -> list[ReleasedLine]:
    """Run the planned tasks with trainers of which the second one fails."""

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:  # pyright: ignore[reportUnusedFunction]
        task.parameters["weight"] += np.float32(1)
        return TrainResult(parameters=task.parameters, num_examples=20, metrics={"loss": 0.25})

    @client.trainer("broken")
    def fail(task: Task) -> TrainResult:  # pyright: ignore[reportUnusedFunction]
        raise ValueError("the patient Smith has no age")

    @client.evaluator("digits")
    def evaluate(task: Task) -> EvaluateResult:  # pyright: ignore[reportUnusedFunction]
        return EvaluateResult(num_examples=5, metrics={"accuracy": 0.5})

    client.run(len(fleet.work))
    return list(released.read(client.released))


@pytest.mark.parametrize("inline", [0, 250_000])
def test_nothing_is_sent_before_its_line_is_there(inline: int, base: Parameters, tmp_path: Path) -> None:
    fleet = WatchingFleet()
    with serving(fleet):
        model = fleet.add_model(base)
        options = ClientOptions(inline_limit_bytes=inline, wait=lambda stop, seconds: stop.is_set())
        client = Client.from_ticket(fleet.ticket.to_text(), data_dir=tmp_path, options=options)
        fleet.path = client.released
        fleet.assign(model)
        fleet.assign(model, task=fleet_pb2.TASK_EVALUATE)
        fleet.assign(model, trainer="broken")
        lines = run(fleet, client)
        digest = fleet.requests["Report"][0].digest
    streamed = [] if inline else ["digest"]
    assert [each.content for each in lines] == ["update", *streamed, "metrics", "failure"]
    kinds = {"Report": 1 + len(streamed), "Upload": 1, "Fail": len(lines)}
    for call, found in fleet.found:
        assert len(found) >= kinds[call]
    update = lines[0]
    assert (update.job_id, update.job, update.round, update.attempt, update.trainer) == (
        *("job-1", "digits", 1, 1, "digits"),
    )
    assert (update.num_examples, update.metrics, update.protection) == (20.0, {"loss": 0.25}, Protection())
    assert lines[len(streamed)].digest == digest
    assert update.size_bytes == len(base.to_bytes())
    assert (lines[-2].num_examples, lines[-2].metrics) == (5.0, {"accuracy": 0.5})
    assert lines[-1].size_bytes > 0
    assert b"Smith" not in client.released.read_bytes()
    assert released.verify(client.released).num_lines == len(lines)


def test_nothing_is_sent_if_the_record_cannot_be_written(
    fleet: FakeFleet, model: model_pb2.ModelRef, make_client: MakeClient
) -> None:
    client = make_client()
    client.released.mkdir(parents=True)
    fleet.assign(model)
    fleet.assign(model, task=fleet_pb2.TASK_EVALUATE)
    with pytest.raises(IsADirectoryError):
        run(fleet, client)
    assert "Upload" not in fleet.calls
    assert "Report" not in fleet.calls
    assert len(fleet.requests["Fail"]) == 2
    for failed in fleet.requests["Fail"]:
        assert failed.reason == model_pb2.REASON_TRANSFER_FAILED
        assert failed.text == (
            "the client's record of what leaves it cannot be written: Is a directory; nothing was sent"
        )


def show(path: Path, *arguments: str) -> Any:
    given = ["released", "--data-dir", str(path.parents[2]), "--server", "s:1", "--population", "p", *arguments]
    return CliRunner().invoke(main, given)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The record of a client that is named by its server and its population."""
    path = Client("s:1", population="p", data_dir=tmp_path / "data").released
    path.parent.mkdir(parents=True)
    record = ReleaseRecord(path)
    for each in (*LINES[:2], line(3, job="=cmd()\x1b[2J", receiver="c-2", protection=Protection(True, 3, 0.5))):
        record.add(each)
    return path


def test_the_command_shows_the_record(kept: Path) -> None:
    table = show(kept)
    assert table.exit_code == 0
    title, first = (each.split() for each in table.stdout.splitlines()[:2])
    assert title == ["time", "(UTC)", "what", "to", "job", "round", "size", "protection", "digest"]
    assert first == ["2026-11-28T10:00:01", "update", "server", "digits", "(job-1)", "1.1", "100", "B", "ab" * 8]
    assert "c-2" in table.stdout.splitlines()[3]
    assert "sums of 3 or more, noise 0.5" in table.stdout
    assert "\x1b" not in table.stdout
    records = [json.loads(each) for each in show(kept, "--json").stdout.splitlines()]
    assert [each["round"] for each in records] == [1, 2, 3]
    rows = show(kept, "--csv", "--limit", "1").stdout.splitlines()
    assert rows[0].startswith("time,content,receiver,job,job_id")
    assert len(rows) == 2
    assert ",'=cmd()" in rows[1]  # a spreadsheet would run it


def test_a_reader_may_stop_early(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(click, "echo", fail)
    result = show(kept, "--json")
    assert result.exit_code == 1
    assert "cannot be read" not in result.output


def test_the_command_checks_the_record(kept: Path) -> None:
    good = show(kept, "--verify")
    assert good.exit_code == 0
    assert good.stdout == f"3 lines, unchanged and in their order; the last hash is {released.verify(kept).head}\n"
    content = kept.read_bytes()
    kept.write_bytes(content[:-20])
    assert "2 lines, unchanged" in (cut := show(kept, "--verify").stdout)
    assert "One more was cut" in cut
    kept.write_bytes(content.replace(b'"round":2', b'"round":9'))
    wrong = show(kept, "--verify")
    assert wrong.exit_code == 1
    assert "line 2 of" in wrong.stderr
    assert "is not as it was written" in wrong.stderr
    kept.write_bytes(b"no record\n")
    assert "cannot be read" in show(kept).stderr
    kept.unlink()
    assert show(kept, "--verify").stdout == "0 lines, unchanged and in their order\n"
    assert len(show(kept).stdout.splitlines()) == 1
