"""Measure the overhead of a whole round without training, and its parts.

    python benchmarks/round_overhead.py [--clients 4] [--rounds 60] [--model-bytes 4096] [--json] [--save]

Real server and client processes run over loopback with default settings: TLS, signed calls, SQLite, and every update
and version synced to the disk. Then they run without one of these at a time, in turns with the default. A round lasts
from one committed version to the next: check-in, selection, model, (no) training, report, aggregation, commit. A second
table shows the share of each part of the round. The JSON object has two more keys than those in benchmarks/report.py:
`median_s`, the median of a round with default settings, in seconds, and `stages`, the second table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import report
from deployment import JOB, Deployment, deploy, intervals
from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from models import alike, parameters

WARM_UP = 5
"""Rounds at the start of each part of a measurement that are not counted."""
PARTS = 4
POLL_S = 0.3
STAGES = ("selection", "first report", "last report", "aggregation and commit")


@dataclasses.dataclass
class Setting:
    """One setting and its measurements: seconds of rounds and stages, CPU seconds of processes."""

    name: str
    durability: str = "spool"
    insecure: bool = False
    watched: bool = False
    rounds: list[float] = dataclasses.field(default_factory=list[float])
    stages: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {name: [] for name in STAGES})
    server_s: list[float] = dataclasses.field(default_factory=list[float])
    client_s: list[float] = dataclasses.field(default_factory=list[float])


def main(
    clients: Annotated[int, typer.Option(min=1, help="Number of client processes; all take part in each round.")] = 4,
    rounds: Annotated[int, typer.Option(min=8, help="Number of rounds to measure of each setting.")] = 200,
    model_bytes: Annotated[int, typer.Option(min=4, help="Size of the model, float32.")] = 4096,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure the time of rounds with a trainer that does nothing.

    With --json the object has two more keys: median_s, the median of a round with default settings, in seconds; and
    stages, the second table.
    """
    model = parameters(alike(model_bytes))
    settings = [
        Setting("as deployed by default"),
        Setting('durability = "memory"', durability="memory"),
        Setting("without TLS", insecure=True),
        Setting("an operator watches", watched=True),
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        secure = stack.enter_context(deploy(Path(folder) / "secure", clients))
        insecure = stack.enter_context(deploy(Path(folder) / "insecure", clients, insecure=True))
        for _ in range(PARTS):
            for setting in settings:
                deployment = insecure if setting.insecure else secure
                measure(deployment, setting, clients, WARM_UP + -(-rounds // PARTS), model)
    report.finish(
        _overhead(settings, clients, model_bytes),
        as_json,
        save,
        figures={"median_s": statistics.median(settings[0].rounds)},
        parts={"stages": _stages(settings[0])},
    )


def measure(deployment: Deployment, setting: Setting, clients: int, rounds: int, model: Parameters) -> None:
    """Run rounds with a setting, and add the measurements to it. An operator watches them only if `watched`."""
    text = f'durability = "{setting.durability}"' + JOB.format(rounds=rounds, clients=clients)
    with deployment.admin() as admin:
        before = _cpu_s(deployment)
        job = submission.submit(admin, submission.Submission(text, parse_job(text), model))
        if setting.watched:
            for _ in admin.watch_job(job.job_id):
                pass
        while admin.show_job(job.job_id).status != admin_pb2.JOB_STATUS_COMPLETED:
            time.sleep(POLL_S)
        after = _cpu_s(deployment)
        _note(setting, admin, job.job_id)
    setting.server_s.append((after[0] - before[0]) / rounds)
    setting.client_s.append((after[1] - before[1]) / rounds / clients)


def _note(setting: Setting, admin: AdminClient, job_id: str) -> None:
    """Add the times of the job's history, which has every transaction, to the measurements of a setting."""
    versions: list[float] = []
    reported: Counter[int] = Counter()
    last = 0.0
    for event in admin.watch_job(job_id):
        if event.entity == "version":
            versions.append(event.unix_s)
        stage = stage_ended_by(event, reported)
        if event.round > WARM_UP and stage:
            setting.stages[stage].append(event.unix_s - last)
        if stage:
            last = event.unix_s
    setting.rounds.extend(intervals(versions)[WARM_UP:])


def stage_ended_by(event: admin_pb2.JobEvent, reported: Counter[int]) -> str:
    """Return the stage that ends with an event, or ""."""
    if event.entity == "attempt" and event.to_state == "COLLECTING":
        return "selection"
    if event.entity == "assignment" and event.to_state == "REPORTED":
        reported[event.round] += 1
        return "first report" if reported[event.round] == 1 else "last report"
    return "aggregation and commit" if event.entity == "version" else ""


def _cpu_s(deployment: Deployment) -> tuple[float, float]:
    """Return the CPU seconds of the server, and of all clients together."""
    ours = [sum(process.cpu_times()[:2]) for process in deployment.clients]
    return sum(deployment.server.cpu_times()[:2]), sum(ours)


def _overhead(settings: Sequence[Setting], clients: int, model_bytes: int) -> report.Report:
    columns = ("setting", "round, median ms", "best ms", "90 % below, ms", "server's CPU, ms", "CPU of a client, ms")
    return report.Report(
        name="round_overhead",
        title=f"A no-op round: {clients} clients, {model_bytes:,} bytes",
        columns=columns,
        rows=tuple(
            (
                setting.name,
                statistics.median(setting.rounds) * 1e3,
                min(setting.rounds) * 1e3,
                float(np.percentile(setting.rounds, 90)) * 1e3,
                statistics.median(setting.server_s) * 1e3,
                statistics.median(setting.client_s) * 1e3,
            )
            for setting in settings
        ),
        notes=(f"{len(settings[0].rounds)} rounds of each, in {PARTS} parts, in turns.",),
    )


def _stages(setting: Setting) -> report.Report:
    """Return the time of each stage of a round, from the times of its transactions."""
    per_round = {name: sum(seconds) / len(setting.rounds) * 1e3 for name, seconds in setting.stages.items()}
    return report.Report(
        name="round_stages",
        title="Where a no-op round's time goes",
        columns=("until", "ms", "share, %"),
        rows=tuple((name, ms, 100.0 * ms / sum(per_round.values())) for name, ms in per_round.items()),
        notes=("Means, so that they add up; each stage ends with its transaction.",),
    )


if __name__ == "__main__":
    typer.run(main)
