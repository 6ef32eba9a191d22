"""Alarms of many clients, compared with a dictionary; and the order of what is done at one moment."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.simulation.clients.idle import Alarms, EventQueue


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("span_s", [0.5, 7.0, 1000.0])
def test_alarms_ring_in_order_whatever_is_set_meanwhile(seed: int, span_s: float) -> None:
    rng = np.random.default_rng(seed)
    alarms, expected, now = Alarms(50, span_s), dict[int, float](), 0.0
    for _ in range(300):
        clients = rng.choice(50, int(rng.integers(1, 6)), replace=False)
        # Whole numbers now and then, so that several ring at the same moment.
        at = now + np.where(rng.random(len(clients)) < 0.5, rng.integers(0, 9, len(clients)), rng.exponential(9.0))
        if rng.random() < 0.2:
            alarms.clear(clients)
            expected = {client: moment for client, moment in expected.items() if client not in clients}
        else:
            alarms.set(clients, at)
            expected |= dict(zip(clients.tolist(), at.tolist(), strict=True))
        assert alarms.first() == min(expected.values(), default=np.inf)
        now += float(rng.exponential(2.0))
        found, moments = alarms.due(now)
        due = sorted((moment, client) for client, moment in expected.items() if moment <= now)
        assert list(zip(moments.tolist(), found.tolist(), strict=True)) == due
        expected = {client: moment for client, moment in expected.items() if moment > now}


def test_what_is_to_be_done_at_one_moment_is_done_in_the_order_in_which_it_was_put() -> None:
    agenda: EventQueue[str] = EventQueue()
    for at, item in [(2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")]:
        agenda.put(at, item)
    done: list[str] = []
    for item in agenda.due(2.0):
        done.append(item)
        if item == "a":
            agenda.put(2.0, "last")
    assert done == ["a", "b", "c", "last"]
    assert agenda.first() == 3.0
