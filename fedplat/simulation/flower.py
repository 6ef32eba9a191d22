"""Simulating a Flower app, `run_app("path/to/app")`, and the file `fedplat.toml` next to its `pyproject.toml`.

The file is optional, and so is every key. It has tables of a job (`[selection]`, `[deadlines]`, `[retry]`, ...) and of
its simulation (`[simulation]`, `[simulation.fleet]`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from fedplat import system
from fedplat.config.toml import read_toml, shown_key
from fedplat.config.toml_text import write_toml
from fedplat.errors import EngineError, JobFileError
from fedplat.flower.app import FlowerApp, check_version, read_app
from fedplat.job.checks import NO_PRIVACY
from fedplat.model import Parameters
from fedplat.simulation.api import Run, SimulatedRun, versions
from fedplat.simulation.clients import build_fleet
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report import progress, summary
from fedplat.simulation.run import Simulation, drive
from fedplat.simulation.run_folder import RunFolderOptions, open_run_folder
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import TABLE, SimulationFile


class MessageSetResult(msgspec.Struct, frozen=True, kw_only=True):
    """A set of messages whose replies have arrived: a round of the job, or an attempt at it that was abandoned.

    `failures` are those of the app itself, texts such as `client 3: ...` in the order in which clients reported, and
    `num_failed` counts the simulated failures too. `metrics` are those that the
    app's strategy has returned or, if it has none, the means of those of the replies.
    """

    round: int
    message_type: str
    num_messages: int
    num_replies: int
    num_late: int
    num_failed: int
    failures: tuple[str, ...]
    metrics: dict[str, float]
    at_s: float
    problem: str = ""


OnMessages = Callable[[MessageSetResult], object]


@dataclasses.dataclass(frozen=True)
class AppOptions:
    """Options of a run besides those of the app's files: 0 clients or workers, and no seed, stand for the file's.

    `run_config` are texts such as `lr=0.1`. With `shows_logs`, the log lines of `flwr` are shown.
    """

    run_config: Sequence[str] = ()
    num_clients: int = 0
    seed: int | None = None
    workers: int | None = None
    shows_logs: bool = False


def run_app(
    folder: str | Path,
    options: AppOptions = AppOptions(),
    *,
    on_messages: OnMessages = lambda sent: None,
    run_folder: RunFolderOptions | None = None,
) -> Run:
    """Run a Flower app with simulated clients, in virtual time. The model of the run is the app's final model.

    `on_messages` is called with each set of messages whose replies have arrived. Raises `FlowerError`, `JobFileError`,
    `UserCodeError` if the app raises an exception, and `MissingExtraError` without flwr.
    """
    app, file = read(folder, options)
    return execute(app, file, on_messages, run_folder, shows_logs=options.shows_logs)


def read(folder: str | Path, options: AppOptions = AppOptions()) -> tuple[FlowerApp, SimulationFile]:
    """Read an app and its optional `fedplat.toml`, without importing the app. Raises as `run_app` does."""
    app = read_app(Path(folder)).with_run_config(options.run_config)
    check_version()
    file = read_file(app, num_clients=options.num_clients, seed=options.seed, workers=options.workers)
    return app, file


def execute(
    app: FlowerApp,
    file: SimulationFile,
    on_messages: OnMessages = lambda sent: None,
    run_folder: RunFolderOptions | None = None,
    *,
    shows_logs: bool = False,
) -> Run:
    """Run an app that was read. Raises as `run_app` does."""
    options = file.simulation
    fleet = build_fleet(options.fleet, options.seed, 0, file.folder)
    simulation = Simulation(spec=file.job, fleet=fleet, seed=options.seed, until_s=options.until_s)
    inputs = {"simulation": file.raw, "versions": versions(), "plugins": {}}
    with _quiet(shows_logs), contextlib.ExitStack() as stack:
        # After the logger is quiet, and only now: the command line needs none of it for its own mistakes.
        from fedplat import randomness
        from fedplat.flower.apps import ClientAppRunner
        from fedplat.simulation.engines.client_apps import LoopAnswers, PooledAnswers
        from fedplat.simulation.federated.flower import FlowerTraining

        # An app's modules may look for accelerators when they are imported. This way of looking survives a fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        randomness.seed_generators(options.seed)
        runner = ClientAppRunner(app)
        app.load_server_app()  # before the workers are forked, which then need not import it again
        workers = min(_choose_workers(app, options.workers), fleet.num_clients)
        answers = (
            LoopAnswers(runner, fleet.num_clients)
            if workers == 1
            else PooledAnswers(runner, fleet.num_clients, workers)
        )
        stack.enter_context(contextlib.closing(answers))
        randomness.seed_generators(options.seed)
        training = FlowerTraining(app, file.job, fleet, answers, options.seed)
        stack.enter_context(contextlib.closing(training))

        def observe(record: AttemptResult) -> None:
            if (log := training.log.get(record.round)) is None:
                return
            failures, log.failures = log.failures, []
            on_messages(
                MessageSetResult(
                    round=record.round,
                    message_type=log.message_type,
                    num_messages=log.num_messages,
                    num_replies=record.num_updates,
                    num_late=record.counts.get("LATE", 0),
                    num_failed=progress.count_failed(record.counts),
                    failures=tuple(f"client {each.client}: {each.text}" for each in failures),
                    metrics=record.metrics,
                    at_s=record.ended_at,
                    problem=record.reason,
                )
            )

        with open_run_folder(run_folder, inputs, observe, resumable=False) as (hooks, pace):
            result = drive(simulation, fleet, training, hooks)
        result = dataclasses.replace(result, model=training.final_model)
        seconds = pace.seconds()
    computed = SimulatedRun(
        engine="processes" if workers > 1 else "loop",
        workers=workers,
        wall_s=seconds,
        updates=pace.updates,
        updates_per_s=pace.updates / seconds if seconds else 0.0,
        versions=versions(),
    )
    run = Run(file=file, result=result, summary=summary.summarize(result), computed=computed)
    if run_folder is not None:
        run.save(run_folder.folder)
    return run


_NOT_FORKED = {"jax": "JAX", "tensorflow": "TensorFlow"}
"""Libraries whose threads do not exist in forked processes, so that these would wait for them forever."""


def _choose_workers(app: FlowerApp, asked: int) -> int:
    """Return the number of processes for clients, after the app was imported; 0 asks for the default.

    Raises `EngineError` if several were asked for, and the app imports a library that needs one.
    """
    for module, name in _NOT_FORKED.items():
        if module in sys.modules:
            if asked > 1:
                raise EngineError(f"{app.name} imports {name}, which cannot run in worker processes; use --workers 1")
            return 1
    if not system.has_forked_workers():
        if asked > 1:
            raise EngineError(f"--workers {asked}: worker processes of apps need Linux; use --workers 1 here")
        return 1
    return asked or system.num_cores()


@contextlib.contextmanager
def _quiet(shows_logs: bool) -> Generator[None]:
    """Hide the log lines of `flwr` within the block but its warnings, unless they are wanted."""
    logger = logging.getLogger("flwr")

    def is_wanted(record: logging.LogRecord) -> bool:  # the import of flwr sets the level of its logger
        return shows_logs or record.levelno >= logging.WARNING

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


FILE = "fedplat.toml"
INITIAL = "flower.safetensors"
"""The `model.initial` of such a job, which no one reads: its first version comes from the app."""
MAX_ROUNDS = 1_000_000
"""The app itself decides when the job is complete."""
FILE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "selection": {"over_selection": 1.0, "min_fraction": 1e-9},
    "deadlines": {"selection_s": 3600.0, "training_s": 3600.0},
    "retry": {"max_attempts": 3},
}
"""Values that differ from those of other jobs: every client that the app draws is waited for, as by Flower."""
SERVER_DEFAULTS = {**FILE_DEFAULTS, "deadlines": {"selection_s": 60.0, "training_s": 3600.0}}
"""The same on a server, where a client that does not return within a minute counts as lost, as in Flower."""
_OF_APP = {
    "model": "",
    "rounds": "",
    "trainer": "",
    "config": "; set values in pyproject.toml, or with --run-config",
    "selection.goal": "",
    "flower.app": "",
    "flower.run_config": "; set values in pyproject.toml, or with --run-config",
    "simulation.data": "",
    "simulation.partition": "",
    "simulation.model": "",
    "simulation.held_out": "",
    "simulation.training": "",
    "simulation.model_bytes": "",
    "simulation.target": "",
    "simulation.target_metric": "",
    "simulation.engine": "; --workers 1 runs all clients in one process",
}
"""Keys of a simulation file that the app itself decides about, and what to do instead."""


def read_file(
    app: FlowerApp,
    *,
    num_clients: int = 0,
    seed: int | None = None,
    workers: int | None = None,
    population: str | None = None,
    on_server: bool = False,
) -> SimulationFile:
    """Return the job and the environment of an app: its `fedplat.toml`, if there is one, with changes.

    The number of clients is `num_clients`, or that of the file, or that of the app. A job `on_server` needs a
    `population`, here or in the file, and waits for its clients for a minute only. Raises `JobFileError` with a line
    for each mistake.
    """
    path = app.folder / FILE
    try:
        raw = read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raw = {}
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise JobFileError(f"{path} cannot be read: {reason}") from exc
    except JobFileError as exc:
        raise JobFileError(_name_file(path, exc)) from exc
    mistakes = [_refuse(key, hint) for key, hint in _OF_APP.items() if _has(raw, key)]
    if mistakes := [*mistakes, *([NO_PRIVACY] if "privacy" in raw else [])]:
        raise JobFileError("\n".join(f"{path}: {line}" for line in mistakes))
    if population is not None:
        raw["population"] = population
    if on_server and "population" not in raw:
        raise JobFileError(f"there is no population of clients; expected --population NAME, or the key in {path}")
    _complete(raw, app, SERVER_DEFAULTS if on_server else FILE_DEFAULTS)
    simulation, fleet = raw.setdefault(TABLE, {}), {}
    if isinstance(simulation, dict):
        table = cast(dict[str, Any], simulation)
        table |= {key: value for key, value in (("seed", seed), ("workers", workers)) if value is not None}
        fleet = table.setdefault("fleet", {})
    if isinstance(fleet, dict):
        given = cast(dict[str, Any], fleet)
        given["num_clients"] = num_clients or given.get("num_clients") or app.num_clients
    try:
        return files.parse(write_toml(raw), app.folder)
    except JobFileError as exc:
        raise JobFileError(_name_file(path, exc)) from exc


def make_initial() -> Parameters:
    """Return the model that is uploaded with such a job, since each job has one."""
    return Parameters.from_arrays({"unused": np.zeros(1, np.float32)})


def _complete(raw: dict[str, Any], app: FlowerApp, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the keys that a job needs, in place; the checks of the file find any other value."""
    name = re.sub(r"[^\w.-]+", "-", app.name, flags=re.ASCII).strip("._-")[:63] or "app"
    needed: dict[str, Any] = {"name": name, "population": "simulation", "trainer": name, "rounds": MAX_ROUNDS}
    for key, value in needed.items():
        raw.setdefault(key, value)
    tables = {
        **defaults,
        "model": {"initial": INITIAL},
        "flower": {"app": name, **({"run_config": dict(app.run_config)} if app.run_config else {})},
    }
    for key, values in tables.items():
        table = raw.setdefault(key, {})
        if isinstance(table, dict):
            raw[key] = {**values, **cast(dict[str, Any], table)}
    if isinstance(raw["selection"], dict):
        raw["selection"]["goal"] = 1  # the app draws the clients


def _has(raw: Mapping[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    table = raw.get(first)
    return rest in table if rest and isinstance(table, Mapping) else not rest and first in raw


def _refuse(key: str, hint: str) -> str:
    return f"{'.'.join(map(shown_key, key.split('.')))}: the Flower app decides about it; expected no such key{hint}"


def _name_file(path: Any, exc: JobFileError) -> str:
    return "\n".join(f"{path}: {line}" for line in str(exc).splitlines())
