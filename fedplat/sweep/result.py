"""The output folder of a sweep: its inputs, a folder for each run, the result, and the files written from it.

```
sweep.json      the sweep file and the base file as they were read, the versions of packages, the digests of plugins
runs/NUMBER-seedSEED/   the run folder of each run, and outcome.json: its metric by round
results.json, sweep.csv, best.toml, *.png    written when the sweep is over
```
Only the outcomes determine the results, and each is written as a whole: a sweep may be killed at any time.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.metadata
import io
import json
import shutil
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from fedplat import forks, system, texts
from fedplat.config import decoding, toml
from fedplat.config.plugins import digests
from fedplat.config.toml import read_toml
from fedplat.config.toml_text import change_text, format_key, format_toml
from fedplat.errors import DataError
from fedplat.simulation.api import versions
from fedplat.simulation.recording import folder as folders
from fedplat.sweep import plan, schedule, table, worker
from fedplat.sweep.file import SweepFile
from fedplat.sweep.plan import Outcome

FORMAT = 1
"""The version of the format of a sweep's `results.json`; it changes when a program that reads it would break."""
TABLE, RESULTS, BEST = "sweep.csv", "results.json", "best.toml"
_PATHS = frozenset({"path", "trace", "availability_trace", "initial"})
"""Keys of a simulation file whose values may be paths."""


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """A finished sweep: `rows` has a row for each configuration, the best first."""

    file: SweepFile
    rows: list[table.SweepRow]
    folder: Path

    @classmethod
    def from_evaluated(cls, file: SweepFile, evaluated: list[schedule.Evaluated], folder: Path) -> SweepResult:
        """Return the result of evaluated configurations."""
        return cls(file, table.make_table(evaluated, file.objective), folder)

    @property
    def best(self) -> table.SweepRow | None:
        """The best configuration; None if no configuration has a finite score."""
        return self.rows[0] if self.rows and self.rows[0].score is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as in `results.json`. They depend only on the inputs of the sweep."""
        objective = self.file.objective
        return folders.finite(
            {
                "format": FORMAT,
                "name": self.file.path.stem,
                "metric": objective.metric,
                "direction": "maximize" if objective.maximize else "minimize",
                "score": self.file.options.score,
                "target": objective.target,
                "seeds": self.file.seeds,
                "keys": plan.keys(self.file.options),
                "best": None if self.best is None else self.best.number,
                "rows": json.loads(json.dumps(msgspec.to_builtins(self.rows), default=str)),
            }
        )

    def to_csv(self) -> str:
        """Return the table as CSV, with a column for each key and for the score of each seed."""
        keys, seeds = plan.keys(self.file.options), [str(seed) for seed in self.file.seeds]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        summary = ["status", "stopped_after", "score", "low", "high", "num_reached", "target_rounds", "target_s"]
        writer.writerow(["rank", "number", *keys, *summary, *(f"seed {seed}" for seed in seeds)])
        for row in self.rows:
            values = [value if isinstance(value := row.values[key], str) else format_toml(value) for key in keys]
            numbers = [getattr(row, name) for name in summary]
            writer.writerow([row.rank, row.number, *values, *numbers, *(row.scores[seed] for seed in seeds)])
        return text.getvalue()

    @property
    def needs_base_folder(self) -> bool:
        """True if `best.toml` can only be used in the folder of the base file: `model.initial` has no absolute path."""
        module = self.file.base.job.model.initial.rpartition(":")[0].partition(".")[0]
        return bool(module) and any((self.file.folder / name).exists() for name in (module, f"{module}.py"))

    def best_text(self) -> str | None:
        """Return the best configuration as a simulation file; None if no configuration has a finite score.

        It is the base file with other values. Its relative paths become absolute, because it is in another folder; see
        `needs_base_folder`.
        """
        if (best := self.best) is None or best.score is None:
            return None
        raw = read_toml(self.file.base_text)
        changes = {**dict(_find_paths(raw, self.file.folder)), **best.values}
        place = f"\n# Its modules are in {self.file.folder.resolve()}: run it there." if self.needs_base_folder else ""
        objective = self.file.objective
        values = plan.describe(best.values, self.file.names)
        score = f"{objective.metric} {best.score:.4g}, {texts.format_count(best.num_seeds, 'seed')}"
        head = f"# The best configuration of {self.file.path.name}: {values} ({score})"
        return head + place + "\n" + change_text(self.file.base_text, changes)

    def plot(self, folder: str | Path | None = None) -> list[Path]:
        """Draw the plots into a folder, by default that of the sweep, and return their paths.

        Raises `MissingExtraError` without matplotlib.
        """
        from fedplat.sweep import plots

        return plots.draw(self.file, self.rows, Path(folder) if folder is not None else self.folder)

    def save(self) -> None:
        """Write the table, all numbers and the best configuration to the sweep's folder."""
        contents = {TABLE: self.to_csv(), BEST: self.best_text()}
        contents[RESULTS] = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        for name, text in contents.items():
            if text is not None:
                folders.write(self.folder / name, text.encode())


def _find_paths(tables: Mapping[str, Any], folder: Path, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of relative paths of existing files, and the absolute paths; also of references to functions."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _find_paths(cast(Mapping[str, Any], value), folder, f"{prefix}{format_key(key)}.")
        elif isinstance(value, str) and (absolute := _absolute(key, value, folder)):
            yield f"{prefix}{format_key(key)}", absolute


def _absolute(key: str, value: str, folder: Path) -> str:
    module, colon, name = value.rpartition(":")
    if colon and key == "initial":
        return ""
    if colon:
        file = folder / (module if module.endswith(".py") else f"{module}.py")
        return f"{file.resolve()}:{name}" if module and file.is_file() else ""
    path = folder / value
    return str(path.resolve()) if key in _PATHS and value and path.exists() else ""


SWEEP, RUNS = "sweep.json", "runs"


class SweepFolder:
    """The output folder of a sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outcomes: dict[schedule.RunKey, Outcome] = {}

    @property
    def runs(self) -> Path:
        """The folder of the run folders."""
        return self.folder / RUNS

    def outcome(self, key: schedule.RunKey, until: int) -> Outcome | None:
        """Return the stored outcome of a run if it has reached a round (0: its end). Raises `DataError`."""
        known = self._outcomes.get(key)
        if known is None or not known.covers(until):
            path = self.runs / key.folder / worker.OUTCOME
            try:
                known = msgspec.json.decode(path.read_bytes(), type=decoding.prepare_type(Outcome))
            except FileNotFoundError:
                return None
            except (OSError, msgspec.MsgspecError) as exc:
                raise DataError(f"{path} cannot be read: {exc}; remove its folder to compute the run again") from exc
            self._outcomes[key] = known
        return known if known.covers(until) else None

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the results. Raises `DataError`."""
        try:
            folders.write(self.folder / name, content)
        except OSError as exc:
            raise DataError(f"{self.folder} cannot be written: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def open_folder(folder: Path, file: SweepFile) -> Generator[SweepFolder]:
    """Begin a sweep in a folder or continue the one in it; the folder is locked until the block ends.

    Raises `DataError` if the folder has another sweep, or is in use, or cannot be written.
    """
    inputs = json.loads(json.dumps(_inputs(file), default=str))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = system.open_folder_to_lock(folder)
    except OSError as exc:
        raise DataError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
    store = SweepFolder(folder)
    with forks.keep_descriptor(descriptor):
        try:
            system.lock(descriptor, wait=False)
        except BlockingIOError as exc:
            raise DataError(
                f"another process computes the sweep in {folder}; wait for it, or choose another folder (--dir)"
            ) from exc
        recorded = folders.read_json(folder / SWEEP) if (folder / SWEEP).exists() else None
        if recorded is None and store.runs.exists() and any(store.runs.iterdir()):
            raise DataError(
                f"{store.runs} has files that belong to no sweep, since {folder} has no {SWEEP}: choose another folder "
                "(--dir), or move them away"
            )
        if recorded is not None and _has_work(store.runs):
            _compare(folder, recorded, inputs)
        elif recorded != inputs:
            shutil.rmtree(store.runs, ignore_errors=True)
            store.write(SWEEP, (json.dumps(inputs, indent=2) + "\n").encode())
        yield store


def _has_work(runs: Path) -> bool:
    """Return whether there is any work to lose: a sweep that failed at once may be corrected in the same folder."""
    return any(runs.glob(f"*/{worker.OUTCOME}")) or any(runs.glob(f"*/{folders.JOURNAL}/checkpoint-*"))


def _inputs(file: SweepFile) -> dict[str, Any]:
    """Return all that the results depend on. `max_runs` only refuses sweeps, and `base` is compared by its content."""
    names = {"torch"} | ({"optuna"} if file.options.search is not None else set())
    packages: dict[str, str] = {}
    for name in sorted(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    checked = [file.base, *(file.parse(each) for each in file.configurations)]
    plugins = {
        name: digest
        for read in checked
        for part in (read.job, read.simulation)
        for name, digest in digests(part).items()
    }
    return {
        "sweep": {key: value for key, value in file.raw.items() if key not in ("base", "max_runs")},
        "base": file.base.raw,
        "versions": {**versions(), **packages},
        "plugins": plugins,
    }


def _compare(folder: Path, recorded: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raise `DataError` with the first difference between the inputs of a stored sweep and those of this one."""
    what = {
        "sweep": ("has {0} = {1}, and this file {2}", "the same sweep file"),
        "base": ("has the base file's {0} = {1}, and this one {2}", "the same base file"),
        "versions": ("was computed with {0} {1}, and this is {2}", "the same version"),
        "plugins": ("used another file of the plugin {0}", "the same plugins"),
    }
    for part, (difference, same) in what.items():
        for key, before, now in _differences(recorded.get(part, {}), inputs[part]):
            values = (str(each) if part == "versions" else _format(each) for each in (before, now))
            raise DataError(
                f"the sweep in {folder} {difference.format(key, *values)}; continue with {same}, or choose another "
                "folder (--dir)"
            )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key and both values of each difference of two tables, with the dotted keys of inner tables."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = _differences(cast(Mapping[str, Any], old), cast(Mapping[str, Any], new))
            yield from ((f"{toml.shown_key(key)}.{rest}", *values) for rest, *values in inner)
        elif old != new:
            yield toml.shown_key(key), old, new


def _format(value: Any) -> str:
    if isinstance(value, list) and len(text := str(value)) <= 60:
        return text
    return "nothing" if value is None else toml.format_value(value)
