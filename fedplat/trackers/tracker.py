"""The contract of experiment trackers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

RunStatus = Literal["FINISHED", "FAILED", "KILLED", "RUNNING"]
"""The status of a tracked run when its tracker is closed. RUNNING: the run goes on without this process."""


@dataclasses.dataclass(frozen=True)
class RoundMetrics:
    """The metrics of a round by name, such as `clients/loss`. `time_s`: when the round ended.

    The time is in seconds since 1970, or in virtual seconds.
    """

    round: int
    time_s: float
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """What a tracker records of a run besides its rounds.

    `key` identifies the run: a tracker that is opened again with the same key continues the same run. Runs of one
    `experiment` are compared with each other. `params` are the fields of the job file, in dotted names.
    """

    key: str
    name: str
    experiment: str
    params: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Tracker(Protocol):
    """Records the rounds of one run.

    >>> class Printer(Tracker):
    ...     def log(self, rounds):
    ...         for each in rounds:
    ...             print(each.round, dict(each.values))
    ...
    ...     def close(self, status):
    ...         print(status)
    >>> printer = Printer()
    >>> printer.log([RoundMetrics(1, 12.5, {"clients/loss": 0.5})])
    1 {'clients/loss': 0.5}
    >>> printer.close("FINISHED")
    FINISHED
    """

    def log(self, rounds: Sequence[RoundMetrics]) -> None:
        """Record rounds. Repeating a call records nothing twice. Raises `TrackerError` if the tracker fails."""
        ...

    def close(self, status: RunStatus) -> None:
        """Record the status of the run and release what the tracker holds. Raises `TrackerError` if that fails."""
        ...


def flatten(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of nested tables as text by dotted name, such as `selection.goal`.

    >>> flatten({"rounds": 3, "config": {"layers": [8, 2]}})
    {'rounds': '3', 'config.layers': '[8, 2]'}
    """
    return dict(_fields(table, ""))


def _fields(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _fields(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        elif isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", json.dumps(value, default=_describe)


def _describe(value: object) -> str:
    """Return a text for a value that JSON does not have: the name of a function, which has no address in memory."""
    return getattr(value, "__qualname__", None) or str(value)
