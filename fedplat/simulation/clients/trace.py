"""Traces of measured fleets: files with one device, or one spell of availability, a line.

Both are CSV files with a header, or JSON lines (`.jsonl`) of objects.

- Devices: `speed` (examples a second), `download`, `upload` (bytes a second), `latency_s`, `examples`, all optional;
  every column `label.NAME` is a label; `client` names the device for the other file. Unknown columns are errors.
- Spells: `client`, `begin_s`, `end_s`, in seconds since the trace began.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedplat.errors import JobFileError
from fedplat.simulation.clients.availability import Clients, Intervals
from fedplat.simulation.clients.distributions import Floats

NUMBERS = ("speed", "download", "upload", "latency_s", "examples")
_SPELL = ("client", "begin_s", "end_s")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The columns that a file of devices has."""

    numbers: Mapping[str, Floats] = dataclasses.field(default_factory=dict[str, Floats])
    labels: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict[str, Sequence[str]])
    names: Sequence[str] = ()
    num_devices: int = 0


def read_devices(path: Path) -> Devices:
    """Read a file of devices. Raises `JobFileError` with the line of the mistake."""
    numbers: dict[str, list[float]] = {}
    labels: dict[str, list[str]] = {}
    names: list[str] = []
    count = 0
    for line, row in _rows(path):
        for column, value in row.items():
            if column in NUMBERS:
                numbers.setdefault(column, []).append(_number(path, line, column, value, above=column != "latency_s"))
            elif column.startswith("label."):
                labels.setdefault(column.removeprefix("label."), []).append(str(value))
            elif column == "client":
                names.append(str(value))
            else:
                known = ", ".join((*NUMBERS, "client", "label.NAME"))
                raise JobFileError(f"{path}, line {line}: there is no column {column!r}; known columns: {known}")
        count += 1
        if uneven := [name for name, values in {**numbers, **labels}.items() if len(values) != count]:
            raise JobFileError(
                f"{path}, line {line}: {uneven[0]} is missing in this line or an earlier one; expected it in all lines"
            )
    if not count:
        raise JobFileError(f"{path}: the file has no devices; expected at least one")
    return Devices({name: np.array(values) for name, values in numbers.items()}, labels, names, count)


def read_intervals(
    path: Path, names: Sequence[str], rows: Clients, count: int, repeat_s: float, rng: np.random.Generator
) -> Intervals:
    """Read a file of spells.

    With device `names`, client i behaves like device `rows[i]`. Without, it behaves like a trace client: a different
    one each if the trace has `count` of them, else one drawn at random. Raises `JobFileError` with the line of the
    mistake.
    """
    by_client: dict[str, list[tuple[float, float]]] = {}
    for line, row in _rows(path):
        if set(row) != set(_SPELL):
            raise JobFileError(f"{path}, line {line}: it has {', '.join(row)}; expected {', '.join(_SPELL)}")
        begin, end = (_number(path, line, column, row[column], above=False) for column in _SPELL[1:])
        if not begin < end or (repeat_s and end > repeat_s):
            raise JobFileError(
                f"{path}, line {line}: the spell is from {begin:g} to {end:g}; expected begin_s < end_s"
                + (f" <= repeat_s = {repeat_s:g}" if repeat_s else "")
            )
        by_client.setdefault(str(row["client"]), []).append((begin, end))
    if not by_client:
        raise JobFileError(f"{path}: the file has no spells; expected at least one")
    order = list(names) if names else sorted(by_client)
    spells = [spell for name in order for spell in _merge_spells(by_client.get(name, []))]
    sizes = [len(_merge_spells(by_client.get(name, []))) for name in order]
    first = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    drawn = np.arange(count) if len(order) == count else rng.integers(len(order), size=count)
    who = rows if names else drawn
    begins, ends = np.array(spells, np.float64).reshape(-1, 2).T
    return Intervals(first, begins.copy(), ends.copy(), who, repeat_s or np.inf)


def _merge_spells(spells: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort spells, and merge those that touch or overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spells):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a file with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                for line, text in enumerate(file, 1):
                    if text.strip():
                        yield line, msgspec.json.decode(text, type=dict[str, Any])
                return
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise JobFileError(f"{path}, line {reader.line_num}: expected as many cells as in the first line")
                yield reader.line_num, row
    except OSError as exc:
        raise JobFileError(f"the trace {path} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, csv.Error, msgspec.MsgspecError) as exc:
        raise JobFileError(f"{path} is not a trace: {exc}; expected CSV with a header, or .jsonl") from exc


def _number(path: Path, line: int, column: str, value: Any, *, above: bool) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0.0 or (above and number == 0.0):
        wanted = "a number above 0" if above else "a number of at least 0"
        raise JobFileError(f"{path}, line {line}: {column} is {value!r}; expected {wanted}")
    return number
