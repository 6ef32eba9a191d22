"""The sweep file and its base file: both are read and every configuration is validated before anything runs."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fedplat import extras, local_options, metrics
from fedplat.config import plugins, toml
from fedplat.config.toml import read_record
from fedplat.errors import JobFileError, MissingExtraError
from fedplat.simulation.engines.registry import RayOptions
from fedplat.simulation.scenario import feasible
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.scenario.options import ModelOptions
from fedplat.sweep import plan, schedule
from fedplat.sweep.plan import VIRTUAL_S, Configuration, IntegerRange, Objective, Stopping, SweepOptions

_CONFIG = "config."
_ENGINE = "simulation.engine"


@dataclasses.dataclass(frozen=True)
class SweepFile:
    """A sweep file and the base simulation file that it names. `raw` is the parsed TOML of the sweep file."""

    path: Path
    options: SweepOptions
    raw: dict[str, Any]
    base_path: Path
    base_text: str
    base: SimulationFile
    _parsed: dict[tuple[str, ...], SimulationFile] = dataclasses.field(
        default_factory=dict[tuple[str, ...], SimulationFile]
    )

    @property
    def folder(self) -> Path:
        """The folder of the base file, to which its paths and modules are relative."""
        return self.base_path.parent

    @property
    def seeds(self) -> list[int]:
        """The seeds of each configuration."""
        return self.options.seeds or [self.base.simulation.seed]

    @property
    def num_runs(self) -> int:
        """The number of runs; of a search, the number if no configuration is chosen twice."""
        return plan.num_configurations(self.options) * len(self.seeds)

    @property
    def objective(self) -> Objective:
        """The quantity to optimize. By default, losses and errors are minimized, like seconds."""
        simulation = self.base.simulation
        metric = self.options.metric or simulation.target_metric
        falls = metrics.is_smaller_better(metric) or metric == VIRTUAL_S
        return Objective(
            metric=metric,
            maximize=self.options.direction == "maximize" or (not self.options.direction and not falls),
            best=self.options.score == "best",
            target=simulation.target if metric == simulation.target_metric else 0.0,
        )

    @cached_property
    def configurations(self) -> list[Configuration]:
        """The configurations of the file; those of a search are chosen later, and this is empty."""
        return [] if self.options.search is not None else plan.expand(self.options)

    @cached_property
    def names(self) -> dict[str, str]:
        """The short names of the keys that differ between configurations."""
        return plan.short_names(plan.keys(self.options))

    def describe(self, configuration: Configuration) -> str:
        """Return the values of a configuration in one line."""
        return plan.describe(configuration.values, self.names)

    def changes(self, configuration: Configuration, seed: int | None = None) -> list[str]:
        """Return all changes of the base file for a run, by default with the first seed.

        The engine "auto" becomes "loop": its choice follows measured time, so its last bits may differ.
        """
        changes = [*configuration.changes, f"{files.TABLE}.seed={self.seeds[0] if seed is None else seed}"]
        engine = configuration.values.get(_ENGINE, plugins.name_of(self.base.simulation.engine))
        is_auto = engine == "auto"
        return [*changes, f"{_ENGINE}=loop"] if is_auto else changes

    def parse(self, configuration: Configuration) -> SimulationFile:
        """Return the simulation file of a configuration. Raises `JobFileError`, which names the configuration."""
        changes = tuple(self.changes(configuration))
        if changes not in self._parsed:
            try:
                self._parsed[changes] = files.parse(self.base_text, self.folder, changes)
                feasible.check_supported(self._parsed[changes].job)
                feasible.check_file(self._parsed[changes])
            except JobFileError as exc:
                raise self._error(configuration, str(exc)) from exc
        return self._parsed[changes]

    def check(self, configurations: Sequence[Configuration]) -> list[SimulationFile]:
        """Return the simulation files of configurations. Raises `JobFileError` for the first invalid one."""
        read = [self.parse(configuration) for configuration in configurations]
        for configuration, file in zip(configurations, read, strict=True):
            self._check_engine(configuration, file)
        # Other learners than PyTorch modules check `[config]` themselves.
        trained = [pair for pair in zip(configurations, read, strict=True) if _trains_with_pytorch(pair[1])]
        if trained and importlib.util.find_spec("torch") is None:
            raise MissingExtraError(f"training needs PyTorch; install it with: {extras.install_command('torch')}")
        for configuration, file in trained:
            self._check_training(configuration, file)
        return read

    def _check_training(self, configuration: Configuration, file: SimulationFile) -> None:
        """Check `[config]` as training does: with keys of the trainer's own, a misspelled name would change nothing."""
        try:
            options = local_options.LocalOptions.from_config(file.job.config, file.plugins)
        except JobFileError as exc:
            raise self._error(configuration, str(exc)) from exc
        given = {key.removeprefix(_CONFIG) for key in configuration.values if key.startswith(_CONFIG)}
        changed = {name: file.job.config[name] for name in given - self.base.job.config.keys()}
        for key, hint in options.find_unknown(changed).items():
            text = f"config.{key}: neither the base file nor local training has this key{hint}"
            raise self._error(configuration, text)

    def _check_engine(self, configuration: Configuration, file: SimulationFile) -> None:
        if file.simulation.training and isinstance(file.simulation.engine, RayOptions):
            raise self._error(
                configuration,
                'simulation.engine = "ray": expected an engine of one machine; the option --ray computes the runs of a '
                "sweep on a Ray cluster",
            )

    def _error(self, configuration: Configuration, text: str) -> JobFileError:
        origin = f"{self.path}: configuration {configuration.number} ({self.describe(configuration)})"
        return JobFileError("\n".join(f"{origin}: {line}" for line in text.splitlines()))


def read(path: Path) -> SweepFile:
    """Read a sweep file and its base file, and check every configuration.

    Raises `JobFileError` with the file's name in each line, and `MissingExtraError`.
    """
    with files.naming(path):
        raw = _read_toml(path)
        if "base" not in raw and {"model", "selection"} & raw.keys():
            raise JobFileError(
                f'this is a job file; expected a sweep file, which names it (base = "{path.name}") and the values to '
                'compare, such as [grid] with "config.learning_rate" = [0.1, 1.0]'
            )
        options = read_record(raw, SweepOptions)
    base_path = path.absolute().parent / options.base
    with files.naming(path.parent / options.base):
        base_text = files.read_text(base_path)
        base = files.parse(base_text, base_path.parent)
    file = SweepFile(path, options, raw, base_path, base_text, base)
    with files.naming(path):
        _check_size(file)
        _check_metric(file)
    if duplicate := plan.find_duplicate(file.configurations):
        raise JobFileError(
            f"{path}: configuration {duplicate.number} ({file.describe(duplicate)}) occurs twice; expected different "
            "values"
        )
    checked = schedule.list_corners(options.search) if options.search is not None else file.configurations
    all_read = file.check(checked)
    with files.naming(path):
        _check_rounds(options.stopping, max(each.job.rounds for each in all_read))
    return file


def _check_size(file: SweepFile) -> None:
    if file.num_runs > file.options.max_runs:
        count = plan.num_configurations(file.options)
        raise JobFileError(
            f"{file.num_runs:,} runs ({count:,} configurations, {len(file.seeds)} seeds); expected at "
            f"most max_runs = {file.options.max_runs:,}: use fewer values, or set max_runs"
        )


def _check_metric(file: SweepFile) -> None:
    metric = file.objective.metric
    if "simulation.training" in file.names:
        raise JobFileError('grid: "simulation.training": expected the same value for all configurations')
    if not file.base.simulation.training and metric != VIRTUAL_S:
        raise JobFileError(
            f'metric = "{metric}": the base file has training = false, so no model is scored; expected "{VIRTUAL_S}", '
            "the virtual seconds of the job"
        )
    for key, parameter in (file.options.search.parameters if file.options.search is not None else {}).items():
        if isinstance(parameter, IntegerRange) and parameter.step > parameter.high - parameter.low:
            raise JobFileError(f'search.parameters."{key}".step = {parameter.step}: expected at most high - low')


def _check_rounds(stopping: Stopping | None, most: int) -> None:
    if stopping is not None and stopping.rounds[-1] >= most:
        raise JobFileError(
            f"stopping.rounds = {stopping.rounds}: expected rounds before the last one, and the runs have {most}"
        )


def _trains_with_pytorch(file: SimulationFile) -> bool:
    return file.simulation.training and isinstance(file.simulation.model, ModelOptions)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return toml.loads(files.read_text(path))
    except (ValueError, RecursionError) as exc:
        raise JobFileError(f"the sweep file is not valid TOML: {exc}") from exc
