"""Measure the cost of the metrics for Prometheus and of the dashboard: of a scrape, and for rounds that run meanwhile.

    python benchmarks/scrape.py [--clients 4] [--rounds 200] [--json] [--save]

The rounds are those of round_overhead.py: without metrics, with metrics that no one scrapes, with a scrape every 5
seconds, and with 5 open pages of `fedplat dashboard` in addition, in turns. The second table is about one scrape of a
daemon with many jobs and clients, which runs in the event loop: the state is real, but there are no connections.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import prometheus_client
import typer

import report
from dashboard_pages import dashboard
from deployment import Deployment, deploy
from fedplat.job import parse_job
from fedplat.rounds import Change, Context, Coordinator, JobState, ModelVersion
from fedplat.rounds.commands import Command
from fedplat.rounds.events import AttemptAggregated, ClientCheckedIn, Event, JobAction, OperatorCommand, UpdateReported
from fedplat_server.instruments import Instruments
from fedplat_server.metrics.collector import DaemonCollector, LeaderState, PrivacyLosses
from fedplat_server.metrics.job_series import JobSeriesTable, ObservedActor
from models import alike, parameters
from processes import free_port
from round_overhead import WARM_UP, Setting, measure

PARTS = 10
SCRAPE_EVERY_S = 5.0
PAGES = ("/", "/", "/jobs", "/fleet", "/alerts")
SIZES = ((1, 100), (20, 10_000), (100, 100_000))
SCRAPES = 30
GOAL = 10
JOB = """
name = "job-{0}"
population = "population-{0}"
trainer = "noop"
rounds = 100
[model]
initial = "noop.safetensors"
[selection]
goal = {1}
over_selection = 1.0
"""


def main(
    clients: Annotated[int, typer.Option(min=1, help="Number of client processes; all take part in each round.")] = 4,
    rounds: Annotated[int, typer.Option(min=8, help="Number of rounds to measure of each setting.")] = 400,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure a scrape, and rounds with and without scrapes.

    With --json the object has one more key: scrapes, the second table.
    """
    parts = {"scrapes": _scrapes()}
    report.finish(_load(clients, rounds), as_json, save, parts=parts)


def _load(clients: int, rounds: int) -> report.Report:
    model, port = parameters(alike(4096)), free_port()
    settings = [
        Setting("without metrics"),
        Setting("with metrics"),
        Setting("a scrape every 5 s"),
        Setting(f"a scrape every 5 s, and {len(PAGES)} pages of the dashboard"),
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        plain = stack.enter_context(deploy(Path(folder) / "plain", clients))
        options = ("--metrics", f"127.0.0.1:{port}")
        measured = stack.enter_context(deploy(Path(folder) / "measured", clients, options=options))
        for part, setting in itertools.product(range(PARTS), settings):
            del part
            with contextlib.ExitStack() as observers:
                if setting in settings[2:]:
                    observers.enter_context(_scraping(port))
                if setting is settings[3]:
                    observers.enter_context(_open_pages(measured))
                deployment = plain if setting is settings[0] else measured
                measure(deployment, setting, clients, WARM_UP + -(-rounds // PARTS), model)
    plain_s = settings[0].server_s
    return report.Report(
        name="scrape_load",
        title=f"Rounds of {clients} clients with and without metrics and the dashboard",
        columns=("setting", "round, median ms", "server's CPU of a round, ms", "more CPU than without, %"),
        rows=tuple(
            (
                setting.name,
                statistics.median(setting.rounds) * 1e3,
                statistics.median(setting.server_s) * 1e3,
                100.0
                * statistics.median(own / plain - 1.0 for own, plain in zip(setting.server_s, plain_s, strict=True)),
            )
            for setting in settings
        ),
        notes=(
            f"{len(settings[0].rounds)} rounds of each, in {PARTS} parts, in turns. The last column is the median over "
            "the parts.",
        ),
    )


@contextlib.contextmanager
def _scraping(port: int) -> Generator[None]:
    """Scrape at once and every few seconds, in a thread."""
    stopping = threading.Event()

    def scrape() -> None:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                response.read()
            if stopping.wait(SCRAPE_EVERY_S):
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@contextlib.contextmanager
def _open_pages(deployment: Deployment) -> Generator[None]:
    """Run a dashboard, and read the live updates of pages as browsers do."""
    with dashboard(deployment) as pages:
        readers = [threading.Thread(target=pages.read_updates, args=(path,)) for path in PAGES]
        for reader in readers:
            reader.start()
        yield
    for reader in readers:
        reader.join()


class _Idle:
    """An actor for jobs without connections."""

    def act(self, command: Command) -> None:
        """Execute nothing."""

    def on_stored(self, changes: Sequence[Change]) -> None:
        """Observe nothing."""


class _Jobs:
    """Jobs, each with a population, of which one round is committed and one is open. The other clients wait."""

    def __init__(self, num_jobs: int, num_clients: int) -> None:
        instruments = Instruments()
        table = JobSeriesTable(instruments, ("loss", "accuracy"), time.time)
        self._coordinator = Coordinator(max_waiting=num_clients)
        self._actor = ObservedActor(_Idle(), instruments, table, time.monotonic, lambda: None)
        self._rng = np.random.default_rng(0)
        self._numbers = itertools.count()
        collector = DaemonCollector(instruments, table, None, lambda: 0)
        collector.leader = LeaderState(self._coordinator, PrivacyLosses)
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(collector)
        prometheus_client.disable_created_metrics()
        for job in range(num_jobs):
            self._start(job, num_clients // num_jobs)

    def _do(self, *events: Event) -> None:
        proposal = self._coordinator.propose(events, Context(time.monotonic(), self._rng, self._new_token))
        self._coordinator.accept(proposal)
        self._actor.on_stored(proposal.changes)

    def _new_token(self) -> tuple[str, bytes]:
        token = str(next(self._numbers))
        return token, token.encode()

    def _start(self, job: int, num_clients: int) -> None:
        first = ModelVersion(version=0, round=0, attempt=0, digest="initial", size_bytes=4)
        self._coordinator.add(JobState(f"j-{job}", parse_job(JOB.format(job, GOAL)), first))
        trainers, population = frozenset({"noop"}), f"population-{job}"
        self._do(
            *(ClientCheckedIn(f"{job}-{n}", population, trainers=trainers) for n in range(num_clients)),
            OperatorCommand(f"j-{job}", JobAction.START),
        )
        attempt = self._coordinator.jobs[f"j-{job}"].attempt
        assert attempt is not None
        scores = {"loss": 0.5, "accuracy": 0.5}
        self._do(*(UpdateReported(attempt.key, name, "digest", 1.0, scores) for name in attempt.assignments))
        version = ModelVersion(
            version=1, round=1, attempt=1, digest="next", size_bytes=4, num_updates=GOAL, total_weight=float(GOAL)
        )
        self._do(AttemptAggregated(attempt.key, version))


def _scrapes() -> report.Report:
    rows: list[tuple[report.Cell, ...]] = []
    for num_jobs, num_clients in SIZES:
        registry, times, text = _Jobs(num_jobs, num_clients).registry, list[float](), b""
        for _ in range(SCRAPES):
            started = time.perf_counter()
            text = prometheus_client.generate_latest(registry)
            times.append(time.perf_counter() - started)
        num_series = sum(not line.startswith(b"#") for line in text.splitlines())
        state = f"{num_jobs:,} job{'s' * (num_jobs > 1)}, {num_clients:,} clients"
        rows.append((state, *_milliseconds(times), num_series, len(text) / 1024))
    return report.Report(
        name="scrapes",
        title="One scrape, which runs in the event loop",
        columns=("state", "median ms", "worst ms", "series", "KiB"),
        rows=tuple(rows),
        notes=(f"{SCRAPES} scrapes of each. Series of calls and of the process are not included.",),
    )


def _milliseconds(times: Sequence[float]) -> tuple[float, float]:
    return statistics.median(times) * 1e3, max(times) * 1e3


if __name__ == "__main__":
    typer.run(main)
