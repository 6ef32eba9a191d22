"""The folder of a run: its inputs, a line for each attempt while it runs, and its results.

```
run.json        the simulation file as it was read, and the versions of fedplat, Python, NumPy and PyTorch
rounds.jsonl    one attempt a line, written when it ends
results.json    all numbers, when the run is over; participation.safetensors: those of every client
model.safetensors, *.png, tensorboard/
mlflow.json     the key by which a resumed run finds its run in MLflow
journal/        the data to resume a stopped run from, removed when the run is over
```
Files are replaced as a whole; `rounds.jsonl` grows by whole lines, and a resumed run writes it from the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import msgspec

from fedplat import durable
from fedplat.config.toml import format_value
from fedplat.errors import DataError
from fedplat.packed.index import open_regular
from fedplat.simulation.recording.result import AttemptResult

OUTCOME, FILES = "procedure.json", "files"
"""The result of a procedure, and the folder of its files."""
RUN, ROUNDS, RESULTS, MODEL, PARTICIPATION, EVENTS, MLFLOW, JOURNAL = (
    "run.json",
    "rounds.jsonl",
    "results.json",
    "model.safetensors",
    "participation.safetensors",
    "tensorboard",
    "mlflow.json",
    "journal",
)

MAX_BYTES = 2**28
"""The largest file of a run that is read."""
CHANGEABLE_KEYS = re.compile(r"simulation\.(engine|workers|secure_aggregation)(\.|$)")
"""Keys that may change when a run is resumed: they determine only where training is computed, and which secrets are."""


def write(path: Path, content: bytes) -> None:
    """Write a file of a run atomically, with the permissions that the umask allows."""
    durable.write_bytes(path, content, 0o666)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run, which a stranger may have written. Raises `DataError` if it cannot be read."""
    try:
        with open_regular(path, "a file of a run") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise DataError(f"{path} is too large; expected at most {MAX_BYTES >> 20} MiB")
        found: object = json.loads(content.decode())
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise DataError(f"{path} cannot be read: it has no table; expected a file of a run")
    return cast("dict[str, Any]", found)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None (null), because JSON does not have them."""
    if isinstance(value, float) and not -1.8e308 < value < 1.8e308:
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def describe(value: object) -> str:
    """Return a text for a value that JSON does not have: the name of a function, which has no address in memory."""
    return getattr(value, "__qualname__", None) or str(value)


class Lines:
    """The file `rounds.jsonl`, written from the start."""

    def __init__(self, folder: Path) -> None:
        self._file: TextIO = (folder / ROUNDS).open("w", encoding="utf-8")

    def add(self, record: AttemptResult) -> None:
        """Write an attempt that has ended, and flush, so that readers of the file see it at once."""
        self._file.write(format_line(record))
        self._file.flush()

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._file.close()


def format_line(record: AttemptResult) -> str:
    """Format an attempt as one line of JSON."""
    return json.dumps(finite(msgspec.to_builtins(record, str_keys=True)), allow_nan=False) + "\n"


def begin(folder: Path, inputs: Mapping[str, Any], *, resumable: bool = True) -> None:
    """Create the folder of a run and record the inputs of the run.

    Raises `DataError` if the folder has a run, or files that the run would replace.
    """
    if (folder / RUN).exists():
        advice = "resume it (--resume), or choose" if resumable else "choose"
        raise DataError(f"{folder} has a run already; {advice} another folder (--dir)")
    if found := [
        name for name in (ROUNDS, RESULTS, MODEL, OUTCOME, PARTICIPATION, JOURNAL) if (folder / name).exists()
    ]:
        raise DataError(
            f"{folder} has {', '.join(found)} and no {RUN}, so they are not of a run or it was lost, and a run would "
            "replace them; choose another folder (--dir)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / RUN, (json.dumps(inputs, indent=2, default=describe) + "\n").encode())
    except OSError as exc:
        raise DataError(f"{folder} cannot be written: {exc.strerror or exc}") from exc


def resume(folder: Path, inputs: Mapping[str, Any]) -> None:
    """Check that a folder has an unfinished run of the same file. Raises `DataError`."""
    if not (folder / RUN).exists():
        raise DataError(f"there is no run to resume in {folder}; start one without --resume")
    if (folder / RESULTS).exists():
        raise DataError(f"the run in {folder} is over and has results; start another one without --resume")
    recorded = read_json(folder / RUN)
    before = dict(_flatten(recorded.get("simulation", {})))
    now = dict(_flatten(json.loads(json.dumps(inputs["simulation"], default=describe))))
    for key in sorted(before.keys() | now.keys()):
        if not CHANGEABLE_KEYS.match(key) and before.get(key) != now.get(key):
            raise DataError(
                f"the run in {folder} has {key} = {format_value(before.get(key))}, "
                f"and this one {format_value(now.get(key))}; resume with the same file, seed and changes"
            )
    for name, digest in recorded.get("plugins", {}).items():
        if inputs["plugins"].get(name) != digest:
            raise DataError(f"the file of the plugin {name} has changed since the run in {folder} began")


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def free(default: Path) -> Path:
    """Return the first of `default`, `default-2`, `default-3` ... without a run."""
    number, folder = 1, default
    while (folder / RUN).exists():
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    return folder


def latest(default: Path) -> Path:
    """Return the last of `default`, `default-2` ... with a run; `default` if none of them has one."""
    last, number = default, 2
    while (following := default.with_name(f"{default.name}-{number}")) and (following / RUN).exists():
        last, number = following, number + 1
    return last
