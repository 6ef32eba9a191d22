"""The model of a device at work: how long an assignment takes, and how it ends.

An assignment is a download (model bytes / bandwidth + latency), local training (examples x epochs / speed, times the
noise), and an upload (update bytes / bandwidth + latency). As in the SDK, an update of at most 256 KiB is part of the
report; a larger one is uploaded first, and the client announces the upload.

All randomness follows from the client's number and its number of earlier assignments, so it depends neither on the
order of events nor on the computer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedplat import rounds, wire
from fedplat.rounds import commands, states
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Clients
from fedplat.simulation.clients.distributions import Floats, hash_uniform, hashed_normal
from fedplat.simulation.engines.interface import ClientTask

_OUTCOME, _MOMENT, _NOISE, _STRAGGLES, _PART = range(5)
MIN_WORK_S = 1e-6
RESERVE = 0.01
"""The part of the training timeout that a client with partial work keeps in reserve."""


@dataclasses.dataclass(slots=True, eq=False)
class DeviceAssignment:
    """One client at work on one assignment; `number` counts the client's assignments from 1.

    It reports at `report_at`, unless it fails at `fails_at` or goes offline at `gone_at` (both infinite: never).
    `begins_upload_at` is infinite if the update is part of the report. `in_time`: the report meets its deadlines.
    `client_task` is the engine's task, once it has begun. With secure aggregation, the first message of a client has
    its keys, not its update; `phase` is that of the next message.
    """

    client_id: str
    key: rounds.AttemptKey
    kind: states.AttemptKind
    version: int
    client: int
    number: int
    examples: float
    begins_upload_at: float
    report_at: float
    fails_at: float
    gone_at: float
    returns_at: float
    in_time: bool
    fraction: float
    client_task: ClientTask | None = None
    is_over: bool = False
    phase: states.AttemptPhase = states.AttemptPhase.ADVERTISING

    @property
    def trains(self) -> bool:
        """True if the client trains, and does not only score a model."""
        return self.kind in states.HAVE_UPDATES

    @property
    def id(self) -> rounds.AssignmentId:
        """The identity of the assignment, and of its update."""
        return rounds.AssignmentId(self.key, self.client_id)


class Sizes(NamedTuple):
    """Sizes of transfers, in bytes. `step` is the encoded step from the previous version, with a downlink codec."""

    model: float
    update: float
    step: float | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    """The local training of a job; `partial` if a report with a part of the local steps counts.

    It has `steps` of `step_size` examples (0 for all), if `steps` is above 0, and else whole epochs.
    """

    epochs: float
    partial: bool
    steps: int = 0
    step_size: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Load:
        """Return the load of a job's `[config]`, whose keys need not be those of `LocalOptions`."""

        def number(key: str, default: float) -> float:
            value = config.get(key, default)
            return float(value) if isinstance(value, int | float) else default

        tau = number("tau", 0) if config.get("algorithm") == "easgd" else 0
        steps = int(tau or number("max_steps", 0))
        step_size = int(number("batch_size", 0) * number("accumulate", 1))
        return cls(number("epochs", 1), config.get("partial_work") is True, steps, step_size)

    def count_examples(self, examples: Floats) -> Floats:
        """Return how many examples each training processes, counting repeated ones again."""
        if not self.steps:
            return self.epochs * examples
        return self.steps * (np.minimum(examples, self.step_size) if self.step_size else examples)


class Planner:
    """Computes the times and outcomes of all assignments of a moment at once."""

    def __init__(self, fleet: Fleet, load: Load, seed: int) -> None:
        self._fleet, self._load, self._seed = fleet, load, seed
        self._holds = np.full(fleet.num_clients, -1, np.int32)
        self._numbers: npt.NDArray[np.int64] = np.zeros(fleet.num_clients, np.int64)

    def plan(
        self, assigns: Sequence[commands.Assign], now: float, until: Floats, sizes: Sizes
    ) -> tuple[list[DeviceAssignment], Floats]:
        """Plan assignments; returns them in order, and the bytes that each client downloads.

        `until` is the moment at which each client goes offline.
        """
        clients = np.array([int(command.client_id) for command in assigns])
        self._numbers[clients] += 1
        numbers = self._numbers[clients]
        trains = np.array([command.kind in states.HAVE_UPDATES for command in assigns])
        timeout_s = np.array([command.training_timeout_s for command in assigns])
        upload_timeout_s = np.array([command.upload_timeout_s for command in assigns])
        bytes_down = self._bytes_down(clients, np.array([command.base_version for command in assigns]), sizes)
        download_s = self._fleet.latency_s[clients] + bytes_down / self._fleet.download[clients]
        update_bytes = np.where(trains, sizes.update, 0.0)
        upload_s = self._fleet.latency_s[clients] + update_bytes / self._fleet.upload[clients]
        inline = update_bytes <= wire.INLINE_BYTES
        room_s = np.maximum(timeout_s * (1.0 - RESERVE) - download_s - np.where(inline, upload_s, 0.0), 0.0)
        examples = self._examples(clients, trains)
        work_s = self._work_s(clients, numbers, trains, examples, room_s)
        fraction = np.ones(len(clients))
        if self._load.partial:
            short = trains & (work_s > room_s)
            fraction[short] = room_s[short] / work_s[short]
            work_s = np.where(short, room_s, work_s)
        trained_at = now + download_s + work_s
        report_at = trained_at + upload_s
        fails_at, gone_at, returns_at = self._ends(clients, numbers, now, report_at, until)
        in_time = (report_at < fails_at) & (report_at < gone_at) & (fraction > 0.0)
        on_time = (trained_at < now + timeout_s) & (upload_s < upload_timeout_s)
        in_time &= np.where(inline, report_at < now + timeout_s, on_time)
        begins_upload_at = np.where(inline, np.inf, trained_at)
        moments = (begins_upload_at, report_at, fails_at, gone_at, returns_at)
        columns = (clients, numbers, examples, *moments, in_time, fraction)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        tasks = [
            DeviceAssignment(command.client_id, command.key, command.kind, command.base_version, *row)
            for command, row in zip(assigns, rows, strict=True)
        ]
        return tasks, bytes_down

    def _bytes_down(self, clients: Clients, versions: Clients, sizes: Sizes) -> Floats:
        """Return 0 for clients that have the version, the step for those with the version before, else the model."""
        behind = versions - self._holds[clients]
        self._holds[clients] = versions
        step = sizes.model if sizes.step is None else sizes.step
        return np.where(behind == 0, 0.0, np.where(behind == 1, step, sizes.model))

    def _examples(self, clients: Clients, trains: npt.NDArray[np.bool_]) -> Floats:
        """Return each client's training examples, or for an evaluation its held-out ones if it has some."""
        examples, held_out = self._fleet.examples[clients], self._fleet.held_out[clients]
        return np.where(trains | (held_out == 0.0), examples, held_out)

    def _work_s(
        self, clients: Clients, numbers: Clients, trains: npt.NDArray[np.bool_], examples: Floats, room_s: Floats
    ) -> Floats:
        """Return how long the local steps take; a straggler has time for a part of them only."""
        fleet, options = self._fleet, self._fleet.options
        work_s = np.where(trains, self._load.count_examples(examples), examples) / fleet.speed[clients]
        if options.noise:
            work_s *= np.exp(options.noise * hashed_normal(self._seed, clients, numbers, _NOISE))
        if options.stragglers:
            slow = trains & (hash_uniform(self._seed, clients, numbers, _STRAGGLES) < options.stragglers)
            part = 1.0 - hash_uniform(self._seed, clients, numbers, _PART)  # above 0, at most 1
            # So slow that its time is just enough for that part.
            work_s = np.where(slow, np.maximum(room_s, MIN_WORK_S) / part, work_s)
        return work_s

    def _ends(
        self, clients: Clients, numbers: Clients, now: float, report_at: Floats, until: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return when clients fail, when they go offline, and when they are back."""
        options = self._fleet.options
        outcome = hash_uniform(self._seed, clients, numbers, _OUTCOME)
        moment = now + (report_at - now) * hash_uniform(self._seed, clients, numbers, _MOMENT)
        fails = outcome < options.fails
        vanishes = ~fails & (outcome < options.fails + options.vanishes)
        fails_at = np.where(fails & (moment < until), moment, np.inf)
        gone_at = np.where(vanishes & (moment < until), moment, until)
        returns_at = np.where(vanishes & (moment < until), moment + options.away_s, until)
        return fails_at, gone_at, returns_at
