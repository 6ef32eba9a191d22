"""The folder of a run: what it was given, a line for each attempt while it runs, and its results.

```
run.json        the simulation file as it was read, the program's versions, how training is computed
rounds.jsonl    one attempt a line, as it ends
results.json    everything, once the run is over; participation.safetensors: of every client
model.safetensors, *.png, tensorboard/
journal/        what a run that was stopped goes on from, until it is over
```
Files are replaced as a whole; `rounds.jsonl` grows by whole lines, and a run that goes on writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import msgspec

from fedplat import durable
from fedplat.errors import DataError
from fedplat.simulation.recording.result import AttemptResult
from fedplat.toml import format_value

RUN, ROUNDS, RESULTS, MODEL, PARTICIPATION, EVENTS, JOURNAL = (
    "run.json",
    "rounds.jsonl",
    "results.json",
    "model.safetensors",
    "participation.safetensors",
    "tensorboard",
    "journal",
)

ANYWHERE = frozenset({"simulation.engine", "simulation.workers"})
"""Keys that may change when a run goes on: where it is computed."""


def write(path: Path, content: bytes) -> None:
    """Write a file of a run, whole or not at all, as public as the umask allows."""
    durable.write_bytes(path, content, 0o666)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run. Raises `DataError`."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc


def finite(value: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity: those become null."""
    if isinstance(value, float) and not -1.8e308 < value < 1.8e308:
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class Lines:
    """`rounds.jsonl`, begun anew."""

    def __init__(self, folder: Path) -> None:
        self._file: TextIO = (folder / ROUNDS).open("w", encoding="utf-8")

    def add(self, record: AttemptResult) -> None:
        """Adds an attempt that has ended; whoever follows the file sees it at once."""
        self._file.write(line_of(record))
        self._file.flush()

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._file.close()


def line_of(record: AttemptResult) -> str:
    """An attempt as one line of JSON."""
    return json.dumps(finite(msgspec.to_builtins(record, str_keys=True)), allow_nan=False) + "\n"


def begin(folder: Path, given: Mapping[str, Any]) -> None:
    """Makes a run's folder, and says in it what the run was given. Raises `DataError` where there is a run already."""
    if (folder / RUN).exists():
        raise DataError(f"{folder} has a run already; go on with it (--resume), or choose another folder (--output)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / RUN, (json.dumps(given, indent=2, default=str) + "\n").encode())
    except OSError as exc:
        raise DataError(f"{folder} cannot be written: {exc.strerror or exc}") from exc


def resume(folder: Path, given: Mapping[str, Any]) -> None:
    """Sees that a folder has a run of the same file that is not over. Raises `DataError`."""
    if not (folder / RUN).exists():
        raise DataError(f"there is no run in {folder} to go on with; start one without --resume")
    if (folder / RESULTS).exists():
        raise DataError(f"the run in {folder} is over, and its results are there; start another one without --resume")
    before = dict(_flat(read_json(folder / RUN).get("simulation", {})))
    now = dict(_flat(json.loads(json.dumps(given["simulation"], default=str))))
    for key in sorted((before.keys() | now.keys()) - ANYWHERE):
        if before.get(key) != now.get(key):
            raise DataError(
                f"the run in {folder} has {key} = {format_value(before.get(key))}, "
                f"and this one {format_value(now.get(key))}; go on with the same file, seed and changes"
            )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def free(default: Path) -> Path:
    """The first of `default`, `default-2`, `default-3` ... that is no run's folder yet."""
    number, folder = 1, default
    while (folder / RUN).exists():
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    return folder


def latest(default: Path) -> Path:
    """The last of `default`, `default-2` ... that is a run's folder; `default` where there is none."""
    last, number = default, 2
    while (following := default.with_name(f"{default.name}-{number}")) and (following / RUN).exists():
        last, number = following, number + 1
    return last
