"""The result of a sweep: its table, and the files that are written from it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from fedplat import texts
from fedplat.config.toml import read_toml
from fedplat.config.toml_text import change_text, format_key, format_toml
from fedplat.simulation.recording import folder as folders
from fedplat.sweep import plan, schedule, table
from fedplat.sweep.file import SweepFile

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
