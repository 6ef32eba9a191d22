"""What a seed stands for: a job, its clients, the servers, and the faults that befall them."""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

from fedplat import codecs
from support.crash import points, scenario

SPAN_S = 25.0
"""Faults begin within this time."""
_SHORT = "[deadlines]\nselection_s = 20\ntraining_s = 20\nupload_s = 20\n"
_ROBUST = (
    '[robust]\nbyzantine = 0\nrule = {name = "krum"}\nbefore = [{name = "bucketing", size = 1}, {name = "nearest"}]\n'
)


class Fault(NamedTuple):
    """One thing that happens: of a kind, for a while, with a strength from 0 to 1.

    It happens at a time, or so long after a crash point is reached for the n-th time.
    """

    kind: str
    at_s: float = 0.0
    lasts_s: float = 0.0
    strength: float = 0.0
    place: int = 0
    point: str = ""
    passage: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is drawn before a simulation begins.

    `keeps_updates`: what was acknowledged must be merged. `side` is that of the model, which makes rows of it and of
    updates, or files; with `has_records`, larger updates become records of segments.
    """

    seed: int
    text: str
    num_clients: int
    num_servers: int
    keeps_updates: bool
    slow_threads: float
    faults: tuple[Fault, ...]
    side: int = scenario.SMALL
    has_records: bool = True

    def describe(self) -> str:
        lines = [
            f"seed {self.seed}: {self.num_servers} servers, {self.num_clients} clients, side {self.side}, "
            f"records {self.has_records}",
            f"job: {' '.join(self.text.split())}",
        ]
        return "\n".join([*lines, *(f"fault: {each}" for each in self.faults)])


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    text, num_clients, keeps = _draw_job(rng)
    num_servers = 2 if rng.random() < 0.35 else 1
    faults = tuple(sorted(_draw_fault(rng, num_servers) for _ in range(rng.randint(3, 10))))
    slow_threads, side = rng.choice((0.0, 0.01, 0.05)), rng.choice((scenario.SMALL, scenario.LARGE))
    has_records = rng.random() < 0.5
    return Plan(seed, text, num_clients, num_servers, keeps, slow_threads, faults, side, has_records)


def _draw_job(rng: random.Random) -> tuple[str, int, bool]:
    """A job file, the number of clients, and whether each acknowledged update must be merged."""
    more, top = "", ""
    if rng.random() < 0.4:
        name, uplink = rng.choice(sorted(codecs.CODECS)), rng.choice(("", "uplink"))
        more += "[compression]\n" + "".join(f'{way} = {{codec = "{name}"}}\n' for way in ("downlink", uplink) if way)
    is_short = rng.random() < 0.3
    if is_short:
        more += _SHORT
    kind = rng.choice(("sync", "sync", "sync", "few", "buffered", "clocks", "memory", "robust"))
    if kind == "buffered":
        return scenario.job_text(rounds=5, goal=2, more=scenario.BUFFERED + more), 4, False
    if kind == "clocks":
        text = scenario.job_text(rounds=7, goal=1, more=scenario.CLOCKS + more)
        return text.replace("min_fraction = 1.0", "min_fraction = 1.0\nwait_for = 3"), 3, False
    if kind == "memory":
        top = 'durability = "memory"\n'
    if kind == "robust":
        more += _ROBUST
    goal = 2 if kind == "few" else 3
    text = top + scenario.job_text(rounds=rng.randint(2, 4), goal=goal, more=more)
    return text, 4 if kind == "few" else 3, kind in ("sync", "robust") and not is_short


DISK_SYNC = "disk.sync"
DATABASE_POINTS = ("database.read.after", "database.write.begun", "database.write.uncommitted", "database.write.after")
OF_THE_SIMULATION = (DISK_SYNC, *DATABASE_POINTS)
"""Points that the simulation itself reaches: before each sync of the disk, and in each transaction."""
POINTS = [
    point
    for point in points.all_points()
    if not point.startswith(("schema.", "object.", "spool_store.", "delivery.", "metrics.", "retention."))
]
_KINDS = {
    "kill": 2.0,
    "power failure": 4.0,
    "kill at a point": 4.0,
    "power failure at a point": 6.0,
    "pause": 2.0,
    "pause at a point": 3.0,
    "storm": 2.0,
    "outage": 1.0,
    "partition": 2.0,
    "lossy network": 1.5,
}


def _draw_fault(rng: random.Random, num_servers: int) -> Fault:
    weights = _KINDS | ({"pause at a point": 10.0} if num_servers > 1 else {})
    kind = rng.choices(list(weights), list(weights.values()))[0]
    lasts_s = rng.choice((rng.uniform(0.01, 1.0), rng.uniform(1.0, 15.0)))
    if kind.endswith("a point"):
        point, lag_s = rng.choice(POINTS), rng.choice((0.0, 0.0, rng.uniform(0.0, 0.5)))
        passage = rng.choice((1, 1, 2, 3, 5, 8, 13))
        if rng.random() < 0.3 or (kind == "pause at a point" and num_servers > 1):
            # Long enough for another server to lead, if there is one.
            point, passage, lasts_s = (
                rng.choice(OF_THE_SIMULATION),
                round(10 ** rng.uniform(0, 2.3)),
                min(10 * lasts_s, 20.0),
            )
        return Fault(kind, lag_s, lasts_s, point=point, passage=passage)
    return Fault(kind, rng.uniform(0.0, SPAN_S), lasts_s, rng.random(), rng.randrange(12))
