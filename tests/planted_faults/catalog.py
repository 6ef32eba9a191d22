"""The list of planted faults: `faults.toml`, and what the list must satisfy.

A fault is a change of one place of the product that tests must notice: the text `old` of a file becomes `new`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")
Area = Literal["crash", "sql", "protocol", "server", "core", "tools", "attack"]
"""What a fault concerns: crashes and durability, SQL, the client and its protocol, the rest of the server, the pure
core, commands, dashboard, simulation and training libraries, or what docs/security.md says about attackers."""
QUOTAS: Mapping[Area, int] = {
    "crash": 10,
    "sql": 10,
    "protocol": 10,
    "server": 10,
    "core": 10,
    "tools": 5,
    "attack": 10,
}
"""The smallest number of faults of each area."""
NUM_FAULTS = 60


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. `breaks` is the promise that it breaks, `tests` are the files and folders that must catch it."""

    name: str
    area: Area
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.area not in get_args(Area):
            raise ValueError(f"{self.name}: the area is {self.area!r}; expected one of {', '.join(get_args(Area))}")
        if self.old == self.new or not self.tests or not self.breaks:
            raise ValueError(f"{self.name}: a fault has a change, tests, and a line on what it breaks")

    def find_problem(self, root: Path) -> str:
        """Return why the fault cannot be planted in a checkout; empty if it can."""
        path = root / self.file
        if not path.is_file():
            return f"there is no file {self.file}"
        count = path.read_text("utf-8").count(self.old)
        return "" if count == 1 else f"its text occurs {count} times in {self.file}"


def read_faults(path: Path = LIST) -> list[Fault]:
    """Return all faults. Raises `ValueError` or `TypeError` for a fault that is not as expected."""
    tables = tomllib.loads(path.read_text("utf-8"))["fault"]
    return [Fault(**(table | {"tests": tuple(table["tests"])})) for table in tables]


def find_missing(faults: Iterable[Fault]) -> dict[Area, int]:
    """Return how many faults each area lacks."""
    counts = Counter(fault.area for fault in faults)
    return {area: quota - counts[area] for area, quota in QUOTAS.items() if counts[area] < quota}
