"""Simulating a Flower app: `run_app("path/to/app")`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec

from fedplat.errors import EngineError
from fedplat.flower.app import FlowerApp, check_version, read_app
from fedplat.simulation.api import Run, SimulatedRun, versions
from fedplat.simulation.clients import build_fleet
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report import progress, summary
from fedplat.simulation.run import Simulation, drive
from fedplat.simulation.run_folder import RunFolderOptions, open_run_folder
from fedplat.simulation.scenario import flower_file
from fedplat.simulation.scenario.file import SimulationFile


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
    file = flower_file.read(app, num_clients=options.num_clients, seed=options.seed, workers=options.workers)
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
    return asked or len(os.sched_getaffinity(0))


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
