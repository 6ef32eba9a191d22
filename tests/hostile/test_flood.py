"""A small flood of malformed messages; `make hostile` makes a large one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hostile import attacks, broken_requests, flood, frames
from support import transports

NUM_MESSAGES = 3000


@pytest.mark.slow
@pytest.mark.fault("F22", "F23", "F24", "F25", "F26", "F27")
@pytest.mark.parametrize(("database", "transport"), [("sqlite", "grpc"), ("postgres", "grpc"), ("sqlite", "http")])
def test_a_daemon_continues_in_a_storm(tmp_path: Path, database: str, transport: transports.Name) -> None:
    seed = random.SystemRandom().randrange(2**32)
    with flood.stores(database) as found:
        outcome = flood.run(tmp_path, NUM_MESSAGES, seed, found[database], transport)
    assert not outcome.wrong, "\n".join([f"seed {seed}", *outcome.lines()])
    assert outcome.num_sent == NUM_MESSAGES
    assert outcome.num_completed > 0


def test_the_same_seed_makes_the_same_storm() -> None:
    for seed in range(20):
        one, two = (attacks.draw(random.Random(seed)) for _ in range(2))
        assert one == two
        for draw in (frames.draw, broken_requests.draw):
            assert draw(random.Random(seed)) == draw(random.Random(seed))


def test_a_storm_that_did_harm_is_told() -> None:
    outcome = flood.Outcome(num_completed=1, rss_bytes=[2**28, 2**28])
    outcome.judge("all is well", is_alive=True)
    assert not outcome.wrong
    for log, is_alive, rss in (
        ("x", False, 0),
        ("a call failed", True, 0),
        ("Traceback (most", True, 0),
        ("", True, 2**29),
    ):
        bad = flood.Outcome(num_completed=1, rss_bytes=[2**28, 2**28 + rss])
        bad.judge(log, is_alive=is_alive)
        assert len(bad.wrong) == 1
        assert bad.wrong[0] in bad.lines()[-1]
