"""Attackers of each kind make a few calls beside ten honest clients; `make soak-attackers` runs for minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from faults import attack_verdict, attackers, least_squares, soak_attackers
from hostile import flood, frames, half_sent
from support import transports

CLIENTS = 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("database", "transport"), [("postgres", "grpc"), ("sqlite", "http")])
def test_ten_honest_clients_lose_nothing_beside_attackers(
    tmp_path: Path, database: str, transport: transports.Name
) -> None:
    with flood.stores(database) as found:
        kinds = attackers.kinds_over(transport)
        plan = attack_verdict.Plan(CLIENTS, kinds, None, 3.0, found[database], transport)
        result = soak_attackers.run(tmp_path, plan)
    assert not result["problems"], result["problems"]


def test_clients_alone_would_learn_the_true_model() -> None:
    mean = np.mean([least_squares.solution(number) for number in range(CLIENTS)], axis=0)
    assert 0.0 < least_squares.error(mean) < attack_verdict.MAX_FINAL_ERROR
    assert least_squares.error(-least_squares.TRUE) == pytest.approx(2.0)
    assert least_squares.error(least_squares.TRUE * float("nan")) == float("inf")


GOOD: dict[str, object] = {
    "abandoned": 0,
    "reasons": [],
    "honest_lost": 0,
    "first_lost": [],
    "unreadable": [],
    "attacked_rounds": 200,
    "attacked_minutes": 10.0,
    "rss_calm_mb": 150.0,
    "rss_most_mb": 200.0,
    "rss_second_quarter_mb": 190.0,
    "rss_last_quarter_mb": 195.0,
    "files_second_quarter": 150.0,
    "files_last_quarter": 155.0,
    "database_mb_by_attackers": 10.0,
    "max_error": 0.2,
    "final_error": 0.01,
    "recovered": True,
    "audit_rows": 20,
    "attackers": {"viewer": {"calls": 10, "answers": {"OK": 10}}},
    "operator_failures": [],
    "clients_ended": 0,
    "verify": 0,
    "log_failures": [],
}
BAD: dict[str, object] = {
    "abandoned": 1,
    "honest_lost": 1,
    "unreadable": ["the clients cannot be read"],
    "attacked_rounds": 0,
    "rss_most_mb": 320.0,
    "rss_last_quarter_mb": 220.0,
    "files_last_quarter": 180.0,
    "database_mb_by_attackers": 100.0,
    "max_error": float("inf"),
    "final_error": 0.1,
    "recovered": False,
    "audit_rows": 3000,
    "attackers": {"viewer": {"calls": 10, "answers": {"INTERNAL": 1}}},
    "operator_failures": ["no answer"],
    "clients_ended": 1,
    "verify": 1,
    "log_failures": ["Traceback"],
}


def test_each_harm_is_a_problem() -> None:
    plan = attack_verdict.Plan(100, ("viewer",), 600.0, 120.0)
    assert not attack_verdict.problems_of(GOOD, plan)
    for name, value in BAD.items():
        assert len(attack_verdict.problems_of({**GOOD, name: value}, plan)) == 1, name


def test_a_host_that_never_ends_a_message_keeps_to_the_windows() -> None:
    connection = half_sent.Connection(Counter(), num_streams=3)
    sent = b"".join(connection.more(limit=10**6) for _ in range(5))
    assert sent.count(half_sent.CHALLENGE.encode()) == 3
    assert 65_535 <= len(sent) < 70_000  # the window of the connection, and the heads of frames
    assert not connection.more(limit=10**6)
    connection.take(frames.WINDOW_UPDATE, 0, 0, (10**6).to_bytes(4, "big"))
    connection.take(frames.RST_STREAM, 0, 1, (7).to_bytes(4, "big"))
    assert connection.more(limit=10**6).count(half_sent.CHALLENGE.encode()) == 1
    assert connection.num_opened == 4
