"""Scrapes of metrics, and Debian's programs of Prometheus."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from fedplat.rounds import Change, Context, Coordinator, JobState, Proposal
from fedplat.rounds.commands import Command
from fedplat.rounds.events import Event, UpdateReported
from fedplat_server.instruments import Instruments
from fedplat_server.metrics.collector import DaemonCollector, LeaderState, PrivacyLosses
from fedplat_server.metrics.job_series import JobSeriesTable, ObservedActor
from support import programs
from support.rounds.driver import Tokens, make_aggregated

DECLARED = ("loss", "accuracy")


def promtool(*arguments: str | Path, text: str = "") -> str:
    """What promtool prints; it must succeed."""
    command = [programs.require("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


async def scrape(port: int) -> str:
    """The metrics that a daemon serves on a port of this host."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            return response.read().decode()

    return await asyncio.to_thread(fetch)


class Samples:
    """The samples of a scrape."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of the time series that have these labels."""
        return [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        (value,) = self.values(name, **labels)
        return value

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The sums of the time series with these labels, by the values of one more label; without zeros."""
        sums: dict[str, float] = {}
        for each in self.samples:
            if each.name == name and labels.items() <= each.labels.items():
                sums[each.labels[label]] = sums.get(each.labels[label], 0.0) + each.value
        return {value: total for value, total in sums.items() if total}

    def label_values(self, label: str) -> set[str]:
        return {each.labels[label] for each in self.samples if label in each.labels}


class Stage:
    """A coordinator whose changes are observed as in a daemon, without sockets and a database, at a time that we set.

    Jobs of different populations can be played at once: `play_round` has all clients of a job report.
    """

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.instruments = Instruments()
        self.table = JobSeriesTable(self.instruments, DECLARED, lambda: self.now)
        self.coordinator = Coordinator(max_waiting=100_000)
        self.losses = PrivacyLosses()
        self.num_releases = 0
        self.collector = DaemonCollector(self.instruments, self.table, None, lambda: 0)
        self.collector.leader = LeaderState(self.coordinator, lambda: self.losses)
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(self.collector)
        prometheus_client.disable_created_metrics()
        self._actor = ObservedActor(self, self.instruments, self.table, lambda: self.now, self._note_release)
        self._rng = np.random.default_rng(0)
        self._new_token = Tokens()

    def act(self, command: Command) -> None:
        """Nothing executes the commands."""

    def on_stored(self, changes: Sequence[Change]) -> None:
        """Nothing else happens."""

    def _note_release(self) -> None:
        self.num_releases += 1

    def add(self, job: JobState) -> None:
        self.coordinator.add(job)

    def do(self, *events: Event) -> Proposal:
        proposal = self.coordinator.propose(events, Context(self.now, self._rng, self._new_token))
        self.coordinator.accept(proposal)
        self._actor.on_stored(proposal.changes)
        for command in proposal.commands:
            self._actor.act(command)
        return proposal

    def play_round(self, job_id: str, **metrics: float) -> None:
        """All clients of the open attempt report 100 bytes, and it commits."""
        attempt = self.coordinator.jobs[job_id].open_attempt
        assert attempt is not None
        self.do(*(UpdateReported(each.key, each.client_id, "d", 1.0, metrics, 100) for each in attempt.busy))
        self.do(make_aggregated(self.coordinator.jobs[job_id]))

    def text(self) -> str:
        return prometheus_client.generate_latest(self.registry).decode()

    def scrape(self) -> Samples:
        return Samples(self.text())
