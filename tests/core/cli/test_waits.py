"""For whom an open round waits, and until when, in words."""

from __future__ import annotations

import pytest

from fedplat.admin import descriptions
from fedplat.wire.v1 import admin_pb2

SIX = [f"c-{at}" for at in range(6)]


@pytest.mark.parametrize(
    ("num_busy", "waits", "text"),
    [
        (0, {"until_unix_s": 60.0}, "waits for clients to check in until 60"),
        (2, {"client_ids": SIX[:2], "silent_client_ids": ["c-1"]}, "waits for c-0, c-1 (silent)"),
        (1, {"client_ids": ["c-0"], "until_unix_s": 60.0}, "waits for c-0 until 60"),
        (6, {"client_ids": SIX[:5], "until_unix_s": 60.0}, "waits for 6 clients until 60"),
        (6, {"client_ids": SIX[:5], "silent_client_ids": ["c-2"]}, "waits for 6 clients, of which c-2 is silent"),
    ],
)
def test_a_wait_names_its_clients_and_its_end(num_busy: int, waits: dict[str, object], text: str) -> None:
    attempt = admin_pb2.Round(busy=num_busy)
    attempt.waiting.MergeFrom(admin_pb2.AttemptWait(**waits))  # pyright: ignore[reportArgumentType]
    assert descriptions.describe_wait(attempt, lambda moment: f"{moment:g}") == text


def test_an_attempt_that_has_ended_waits_for_nothing() -> None:
    assert descriptions.describe_wait(admin_pb2.Round(), str) == ""
