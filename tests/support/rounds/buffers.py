"""Jobs with a buffer, for tests."""

from __future__ import annotations

from typing import Any

from fedplat.rounds import AttemptKey
from support.rounds.driver import Driver, make_job, make_spec

FIRST, SECOND, THIRD = (AttemptKey("j", round_, 1) for round_ in (1, 2, 3))


def buffered(num_clients: int, concurrency: int = 3, goal: int = 2, rounds: int = 9, **sections: Any) -> Driver:
    """A job whose clients c0, c1, ... have begun, as many as may; the others wait."""
    mode = {"kind": "buffered", "concurrency": concurrency} | sections.pop("mode", {})
    spec = make_spec(goal, rounds, mode=mode, **sections)
    return Driver(make_job(spec=spec)).start(num_clients)


def carried(driver: Driver) -> dict[str, str]:
    """Whom the job carries, and how far they have come."""
    return {name: str(each.state) for name, each in driver.job.carried_over.assignments.items()}


def staleness(driver: Driver) -> dict[str, int]:
    """Of the updates that the last attempt has taken in."""
    return {name: each.staleness for name, each in driver.attempt.assignments.items() if each.folded_into == driver.key}


def play(driver: Driver, *client_ids: str) -> Any:
    """These report, and a version is made of it."""
    driver.report(*client_ids)
    proposal = driver.commit()
    driver.check_in(*client_ids)
    return proposal
