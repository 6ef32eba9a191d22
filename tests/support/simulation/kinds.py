"""Simulations and schedules of each kind of job, and the digests of what the coordinator decides (`decisions.json`).

    PYTHONPATH=tests python -m support.simulation.kinds --write
    PYTHONPATH=tests python -m support.simulation.kinds --lines buffered small > lines

The first writes the digests anew, after a change that is meant to decide something else. The second prints the
decisions themselves: those of two checkouts show where they begin to differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import structs
from typing_extensions import override

from fedplat.job import JobSpec
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.commands import Commit, RunWarmStart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.clients.distributions import UniformRange
from fedplat.simulation.clients.fleet import Cut, LinkOptions, Outage
from fedplat.simulation.federated.interface import NoTraining
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.run import Hooks, Simulation, drive, run
from support.rounds import schedules
from support.rounds.silos import silo_spec
from support.simulation.cases import BAD, job, make_fleet
from support.simulation.decisions import Decisions, RoundedDecisions
from support.simulation.least_squares import LeastSquares, initial
from support.simulation.secure import secure_job

FILE: Final = Path(__file__).resolve().parents[2] / "core" / "simulation" / "decisions.json"
SIZES: Final = {"small": 1, "large": 4}
NUM_STEPS: Final = 250
SEED: Final = 3
MODEL_BYTES: Final = 1e6
_EXACT: Final[dict[str, Any]] = BAD | {"speed": {"kind": "uniform", "low": 1.0, "high": 20.0}, "noise": 0.0}
"""Clients that are slow, fail, vanish and come and go, with numbers that are the same on each processor."""
_CLIPPED: Final = {"weighting": "uniform", "clip_norm": 1.0, "outlier_factor": 0.0, "max_weight_factor": 0.0}
_NO_TRUST: Final[dict[str, Any]] = {
    **{"trust": "none", "participation": "fixed", "noise_multiplier": 1.0, "max_releases": 99, "delta": 1e-5}
}
_HALF: Final = {"min_fraction": 0.5}
_ALL: Final = {"over_selection": 1.0, "min_fraction": 1.0}
_MEANS: Final = {"kind": "means", "columns": {"age": {"low": 0, "high": 120, "resolution": 1}}}
_AT_DEADLINE: Final[dict[str, Any]] = {"close": "deadline"}


def _evaluate(every: int = 1) -> dict[str, Any]:
    return {"every": every, "clients": {"evaluator": "digits-eval", "goal": 5, "timeout_s": 30.0}}


def _private(rounds: int, privacy: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    fixed = {"participation": "fixed", "delta": 1e-6, "noise_multiplier": 1.0}
    return job(6, rounds, privacy=fixed | (privacy or {}), updates=_CLIPPED, **sections)


def _make_poisson(rounds: int) -> JobSpec:
    sampling = {"policy": "poisson", "rate": 0.1}
    selection = _AT_DEADLINE | {"over_selection": 1.0, "wait_for": 30, "sampling": sampling}
    return _private(rounds, {"participation": "poisson"}, selection=selection)


KINDS: Final[Mapping[str, Callable[[int], JobSpec]]] = {
    "sync": lambda n: job(6, 4 * n, retry={"base_s": 5.0}),
    "sync, deadline": lambda n: job(6, 4 * n, selection=_AT_DEADLINE),
    "sync, memory": lambda n: job(6, 4 * n, durability="memory"),
    "sync, rest": lambda n: job(6, 4 * n, selection={"min_separation": 2}, deadlines={"adaptive": {"after": 2}}),
    "sync, evaluation": lambda n: job(6, 4 * n, evaluation=_evaluate(2)),
    "buffered": lambda n: job(6, 6 * n, mode={"kind": "buffered", "concurrency": 20, "max_staleness": 3}),
    "buffered, memory": lambda n: job(
        6, 6 * n, mode={"kind": "buffered", "concurrency": 20}, durability="memory", evaluation=_evaluate(5)
    ),
    "ssp": lambda n: job(1, 15 * n, mode={"kind": "ssp", "concurrency": 8, "slack": 2}),
    "cyclic": lambda n: job(1, 15 * n, mode={"kind": "cyclic", "clients": 10}),
    "secure": lambda n: secure_job(8, 3 * n),
    "secure, groups, confirmation": lambda n: secure_job(12, 2 * n, secure={"confirm": True, "group": 6}),
    "private, fixed": lambda n: _private(3 * n, selection=_AT_DEADLINE),
    "private, poisson": lambda n: _make_poisson(2 * n),
    "private, limited": lambda n: _private(
        4 * n, {"max_participations": 2}, selection=_AT_DEADLINE | {"min_separation": 1}
    ),
    "private, no trust": lambda n: secure_job(
        6, 3 * n, privacy=_NO_TRUST, secure={"metrics": {}}, updates=_CLIPPED, selection=_AT_DEADLINE
    ),
    "warm start": lambda n: job(6, 3 * n, warm_start={"trainer": "t", "batch_size": 8, "learning_rate": 0.1}),
    "flower app": lambda n: job(1, 1000 * n, flower={"app": "digits"}, selection={"over_selection": 1.0}),
    "gossip": lambda n: silo_spec(8, 2 * n, selection=_HALF),
    "gossip, push-sum": lambda n: silo_spec(
        8, 2 * n, selection=_HALF, mode={"exchange": "push-sum", "topology": "exponential"}
    ),
    "gossip, ring": lambda n: silo_spec(8, 4 * n, selection=_HALF, mode={"exchange": "ring"}),
    "procedure": lambda n: job(
        *(5, 4 * n),
        **{"procedure": _MEANS, "model": {"initial": ""}, "config": {}, "selection": _ALL},
    ),
}
"""Makes a job of each kind, of a number of rounds that grows with its argument."""
CASES: Final[Mapping[str, tuple[str, ...]]] = {
    "small": tuple(KINDS),
    "large": tuple(KINDS),
    "schedule": schedules.KINDS,
}
"""The kinds that are simulated in each size, and those that have a schedule."""
_FAULTS: Final = LinkOptions(loss=0.3, cuts=(Cut((0, 1), 2, 5), Cut((4, 5), 2, 5)), dead=(Outage(3, 2, 3),))


def summarize(kind: str, size: str) -> dict[str, object]:
    """Return what is kept of the decisions in a simulation."""
    decisions, end = decide(kind, size)
    return {"digest": decisions.digest, "lines": len(decisions.lines), "end": end}


def decide(kind: str, size_name: str) -> tuple[Decisions, str]:
    """Run a simulation or a schedule; return its decisions, and how it has ended."""
    decisions = Decisions()
    if size_name == "schedule":
        job = schedules.play(kind, NUM_STEPS, decisions.record).job
        return decisions, f"{job.status} {job.round} rounds {job.reason}".strip()
    size = SIZES[size_name]
    spec = KINDS[kind](size)
    if spec.gossip is not None:
        return _run_silos(spec)
    decisions = Decisions()
    fleet = make_fleet(100 * size, **_EXACT)
    simulation = Simulation(spec=spec, fleet=fleet, seed=SEED, until_s=1e6, model_bytes=MODEL_BYTES)
    hooks = Hooks(trace=decisions.record)
    if spec.warm_start is not None:
        result = drive(simulation, fleet, WarmTraining(), hooks)
    elif spec.procedure is not None:
        result = drive(simulation, fleet, StepTraining(MODEL_BYTES), hooks)
    elif spec.flower is not None:
        result = drive(simulation, fleet, DrawnTraining(3 * size, fleet.num_clients), hooks)
    else:
        result = run(simulation, hooks)
    return decisions, f"{result.status} {result.reason}".strip()


def _run_silos(spec: JobSpec) -> tuple[Decisions, str]:
    """Run a decentralised job, whose silos have models."""
    decisions = RoundedDecisions()
    fleet = build_fleet(FleetOptions(num_clients=8, speed=UniformRange(1.0, 20.0), fails=0.05), SEED)

    def observe(each: AttemptResult) -> None:
        assert each.exchange is not None
        numbers = each.exchange.silos, each.exchange.edges, each.exchange.confirmed, each.exchange.trains
        moments = each.opened_at, each.collecting_at, each.ended_at
        places = each.round, each.attempt, each.phase, each.version, each.reason
        decisions.write(
            "round", *places, *moments, *numbers, each.bytes_down, each.bytes_up, f"{each.exchange.distance:.2e}"
        )

    simulation = Simulation(
        spec=spec, fleet=fleet, engine=LeastSquares(8), initial=initial(), seed=SEED, links=_FAULTS, until_s=1e6
    )
    result = run(simulation, Hooks(observe=observe, trace=decisions.record))
    decisions.write("merged", result.participation.merged.tolist())
    if result.model is not None:
        decisions.write("model", [f"{weight:.2e}" for weight in result.model["weight"]])
    return decisions, f"{result.status} {result.reason}".strip()


class WarmTraining(NoTraining):
    """The server's own data make version 1; each fifth aggregation fails."""

    def __init__(self) -> None:
        super().__init__(MODEL_BYTES)
        self._num_commits = 0

    @override
    def warm_start(self, command: RunWarmStart) -> AttemptAggregated:
        version = ModelVersion(version=1, round=0, attempt=command.key.number, digest="warm", size_bytes=4)
        return AttemptAggregated(command.key, version, {"loss": 0.5})

    @override
    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        self._num_commits += 1
        if self._num_commits % 5 == 0:
            return AggregationFailed(command.key, "the disk is full")
        return super().commit(command, job)


class DrawnTraining(WarmTraining):
    """An app that draws some clients for each of its exchanges, and cannot use the reply of the first one."""

    def __init__(self, num_exchanges: int, num_clients: int) -> None:
        super().__init__()
        self._num_exchanges, self._num_clients = num_exchanges, num_clients

    @override
    def warm_start(self, command: RunWarmStart) -> AttemptAggregated:
        return dataclasses.replace(super().warm_start(command), cohort=self._draw(0))

    @override
    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        outcome = super().commit(command, job)
        if isinstance(outcome, AggregationFailed):
            return outcome
        assert job.open_attempt is not None
        refused = {each.client_id: "no such array" for each in job.open_attempt.reported[:1]}
        version = structs.replace(outcome.version, num_updates=command.num_updates - len(refused))
        return dataclasses.replace(outcome, version=version, cohort=self._draw(command.key.round), refused=refused)

    def _draw(self, number: int) -> tuple[str, ...]:
        if number >= self._num_exchanges:
            return ()
        return tuple(str((7 * number + 11 * place) % self._num_clients) for place in range(5))


class StepTraining(NoTraining):
    """A procedure that asks the sites again until the last round."""

    @override
    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        outcome = super().commit(command, job)
        assert isinstance(outcome, AttemptAggregated)
        assert job.open_attempt is not None
        again = command.key.round < job.spec.rounds
        return dataclasses.replace(outcome, cohort=tuple(job.open_attempt.assignments) if again else ())


def summarize_in_process(hash_seed: str, *sizes: str) -> str:
    """Return the summaries of all kinds, computed by a process with another order of sets."""
    command = [sys.executable, "-m", "support.simulation.kinds", *sizes]
    environment = os.environ | {"PYTHONPATH": str(FILE.parents[2]), "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print, or write, summaries or decisions."""
    parser = argparse.ArgumentParser(description="What the coordinator decides in simulations of each kind of job.")
    parser.add_argument(
        "sizes", nargs="*", default=[*CASES], help="print the summaries of these: small, large, schedule"
    )
    parser.add_argument("--write", action="store_true", help=f"write the summaries into {FILE.name}")
    parser.add_argument("--lines", nargs=2, metavar=("KIND", "SIZE"), help="print the decisions of one simulation")
    arguments = parser.parse_args()
    if arguments.lines:
        print(*(line.decode() for line in decide(*arguments.lines)[0].lines), sep="\n")
    elif arguments.write:
        one, other = (summarize_in_process(seed, *CASES) for seed in ("1", "2"))
        assert one == other, "the decisions depend on the order of a set"
        FILE.write_text(one)
    else:
        found = {size: {kind: summarize(kind, size) for kind in CASES[size]} for size in arguments.sizes}
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
