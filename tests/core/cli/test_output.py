from __future__ import annotations

import math
from datetime import datetime

import pytest

from fedplat.cli import formats
from fedplat.cli.job_lists import job_fields
from fedplat.cli.output import to_record
from fedplat.wire.v1 import admin_pb2


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (36_966, "36.1 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes(num_bytes: int, text: str):
    assert formats.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (-1.0, "0 ms"),
        (0.2304, "230 ms"),
        (0.9996, "1.0 s"),
        (2.14, "2.1 s"),
        (59.96, "1 min 0 s"),
        (185.4, "3 min 5 s"),
        (9_600.0, "2 h 40 min"),
        (3 * 86_400 + 4 * 3600, "3 d 4 h"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_durations(seconds: float, text: str):
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "total", "text", "sentence"),
    [
        (3, 10, "3/10", "3 of 10 committed"),
        (12, 10, "10+2/10", "10 of 10 committed, and 2 without training"),
        (3, 0, "3", "3 committed"),
    ],
)
def test_rounds(number: int, total: int, text: str, sentence: str):
    job = admin_pb2.Job(round=number, num_rounds=total)
    assert formats.rounds(number, job) == text
    assert job_fields(job)["rounds"] == sentence


def test_moments_are_local_time():
    moment = datetime(2026, 7, 23, 14, 3, 5)
    assert formats.moment(moment.timestamp()) == "2026-07-23 14:03:05"
    for unix_s in (0.0, math.nan, 1e300):
        assert formats.moment(unix_s) == "-"


def test_metrics():
    assert formats.metrics({"loss": 0.31214, "auc": 1.0}, {}) == "auc 1, loss 0.3121"
    assert formats.metrics({}, {"accuracy": 0.912}) == "server: accuracy 0.912"
    assert formats.metrics({"loss": 0.5}, {"accuracy": 0.9}) == "server: accuracy 0.9; clients: loss 0.5"
    assert formats.metrics({}, {}) == ""


def test_every_enum_value_has_a_short_name():
    for enum in (admin_pb2.JobStatus, admin_pb2.AttemptKind, admin_pb2.AttemptPhase):
        names = [formats.name_of(enum.DESCRIPTOR, number) for number in enum.values()]
        assert "UNSPECIFIED" in names
        assert not any(name.startswith(("JOB_", "ATTEMPT_")) for name in names)
    assert formats.job_status(99) == "99"


def test_text_from_devices_cannot_move_the_cursor():
    assert formats.printable("a\x1b[2J\n\r\x07\u202eé✓") == "a\\x1b[2J\\n\\r\\x07\\u202eé✓"


def test_a_record_has_every_field_with_plain_values():
    job = admin_pb2.Job(job_id="j", status=admin_pb2.JOB_STATUS_RUNNING)
    job.current.client_metrics["loss"] = math.nan
    job.current.client_metrics["auc"] = 0.5
    record = to_record(job)
    assert set(record) == {field.name for field in admin_pb2.Job.DESCRIPTOR.fields}
    assert record["status"] == "RUNNING"
    assert record["model"] is None
    assert record["current"]["client_metrics"] == {"auc": 0.5, "loss": None}
    assert to_record(admin_pb2.JobEvent(sequence=2**63))["sequence"] == 2**63
    assert to_record(admin_pb2.GetStatusResponse(evaluators=["a"]))["evaluators"] == ["a"]
