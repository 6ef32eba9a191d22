"""Measure the pages of the dashboard on a large server.

    python benchmarks/dashboard.py [--requests 20] [--json] [--save]

The server has 1,000 jobs, 10 of which run, one with 10,000 rounds of 20 clients, and 100,000 enrolled clients, in
SQLite, and TLS. Each page is requested again and again through `fedplat dashboard` on the same machine, after one
request that is not counted. The times are from the request to the last byte of the HTML.
"""

from __future__ import annotations

import re
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import report
from dashboard_pages import Pages, dashboard
from deployment import Deployment, serve
from fedplat.admin import submission
from fedplat.job import parse_job
from models import alike, parameters
from processes import free_port, peak_rss

NUM_JOBS, NUM_RUNNING, NUM_ROUNDS, NUM_CLIENTS, COHORT = 1_000, 10, 10_000, 100_000, 20
JOB = """
name = "long"
population = "bench"
trainer = "noop"
rounds = 20000
[model]
initial = "noop.safetensors"
[selection]
goal = 20
over_selection = 1.0
"""


def main(
    requests: Annotated[int, typer.Option(min=5, help="Requests of each page.")] = 20,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure pages on a large server."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name) / "server", free_port()
        with serve(folder, port=port) as deployment:
            job = _create_job(deployment)
        _fill(folder / "fedplat.sqlite", job)
        with serve(folder, port=port) as deployment, dashboard(deployment) as pages:
            paths = _paths(job)
            before = peak_rss(deployment.server.pid)
            measured = [(title, *_measure(pages, path, requests)) for title, path in paths]
            grown = peak_rss(deployment.server.pid) - before
    report.finish(_table(measured, requests, grown), as_json, save)


def _create_job(deployment: Deployment) -> str:
    with deployment.admin() as admin:
        model = parameters(alike(4096))
        return submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id


def _paths(job: str) -> Sequence[tuple[str, str]]:
    return (
        ("overview", "/"),
        ("jobs", "/jobs"),
        ("job", f"/jobs/{job}"),
        ("rounds", f"/jobs/{job}/rounds"),
        ("round", f"/jobs/{job}/rounds/{NUM_ROUNDS // 2}"),
        ("fleet", "/fleet"),
        ("clients", "/clients"),
        ("clients with a label", "/clients?label=region%3Deu"),
        ("client", "/clients/c-0000000000000007"),
        ("audit log", "/audit"),
    )


def _measure(pages: Pages, path: str, requests: int) -> tuple[list[float], int, int]:
    """Return the seconds of each request, and the size and the number of elements of the page."""
    seconds: list[float] = []
    text = ""
    for _ in range(requests + 1):
        started = time.perf_counter()
        with pages.open(path) as response:
            text = response.read().decode()
        seconds.append(time.perf_counter() - started)
    return seconds[1:], len(text.encode()), len(re.findall(r"<[a-zA-Z]", text))


def _table(measured: Sequence[tuple[str, list[float], int, int]], requests: int, grown: int) -> report.Report:
    return report.Report(
        name="dashboard_pages",
        title=f"Pages: {NUM_JOBS:,} jobs, one with {NUM_ROUNDS:,} rounds, and {NUM_CLIENTS:,} clients",
        columns=("page", "median ms", "95 % below, ms", "HTML, KiB", "elements"),
        rows=tuple(
            (title, statistics.median(seconds) * 1e3, float(np.percentile(seconds, 95)) * 1e3, size / 1024, elements)
            for title, seconds, size, elements in measured
        ),
        notes=(
            f"{requests} requests of each, one after the other. The peak memory of the daemon grew by "
            f"{grown / 2**20:.0f} MiB meanwhile.",
        ),
    )


# --- a large database ----------------------------------------------------------------------------------------


def _fill(path: Path, job: str) -> None:
    """Add rounds to the job, other jobs, and clients."""
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        _add_clients(database)
        _add_jobs(database, job)
        _add_rounds(database, job)
        database.commit()


def _insert(database: sqlite3.Connection, table: str, rows: Iterator[dict[str, Any]]) -> None:
    first = next(rows)
    names = ", ".join(first)
    places = ", ".join(f":{name}" for name in first)
    statement = f"INSERT INTO {table} ({names}) VALUES ({places})"  # the names are those of this file
    database.execute(statement, first)
    database.executemany(statement, rows)


def _add_clients(database: sqlite3.Connection) -> None:
    labels = [f'{{"region": "{region}", "memory_gb": "{size}"}}' for region in ("eu", "us", "asia") for size in (2, 4)]
    _insert(
        database,
        "clients",
        (
            {
                "client_id": f"c-{number:016x}",
                "population": "bench",
                "labels": labels[number % len(labels)],
                "software_version": "0.1.0",
                "idempotency_key": f"key-{number}",
                "enrolled_unix_s": 1.7e9 + number,
                "public_key": number.to_bytes(32, "big"),
                "session_number": 1,
                "seen_unix_s": 1.7e9 + number,
            }
            for number in range(NUM_CLIENTS)
        ),
    )


def _add_jobs(database: sqlite3.Connection, job: str) -> None:
    model = dict(database.execute("SELECT * FROM jobs WHERE job_id = ?", [job]).fetchone())
    version = dict(database.execute("SELECT * FROM model_versions WHERE job_id = ?", [job]).fetchone())
    del model["sequence"]
    jobs = [f"j-{number:012x}" for number in range(1, NUM_JOBS)]
    rows = (
        {
            **model,
            "job_id": name,
            "idempotency_key": f"key of {name}",
            "job_file": model["job_file"].replace('"long"', f'"job-{number}"'),
            "status": "RUNNING" if number < NUM_RUNNING - 1 else "COMPLETED",
        }
        for number, name in enumerate(jobs)
    )
    _insert(database, "jobs", rows)
    _insert(database, "model_versions", ({**version, "job_id": name} for name in jobs))


def _add_rounds(database: sqlite3.Connection, job: str) -> None:
    version = dict(database.execute("SELECT * FROM model_versions WHERE job_id = ?", [job]).fetchone())
    database.execute("DELETE FROM assignments WHERE job_id = ?", [job])
    database.execute("DELETE FROM attempts WHERE job_id = ?", [job])
    numbers = range(1, NUM_ROUNDS + 1)
    attempt = {"job_id": job, "number": 1, "kind": "TRAIN", "phase": "COMMITTED", "reason": "", "goal": COHORT}
    attempt |= {"minimum": COHORT, "target": COHORT, "num_checked_in": 5_000, "num_eligible": 4_000}
    _insert(
        database,
        "attempts",
        (
            {
                **attempt,
                "round": number,
                "base_version": number - 1,
                "opened_unix_s": 1.7e9 + number,
                "ended_unix_s": 1.7e9 + number + 0.9,
                "metrics": f'{{"loss": {1.0 / number:.6f}, "accuracy": {1.0 - 1.0 / (number + 1):.6f}}}',
            }
            for number in numbers
        ),
    )
    versions = ({**version, "version": number, "round": number, "attempt": 1} for number in numbers)
    _insert(database, "model_versions", versions)
    assignment = {"job_id": job, "number": 1, "digest": "", "text": "", "num_examples": 10.0, "weight": 10.0}
    assignment |= {"metrics": "{}", "took_s": 0.5, "update_bytes": 4096, "report_number": 1, "staleness": 0}
    _insert(
        database,
        "assignments",
        (
            {
                **assignment,
                "round": number,
                "client_id": f"c-{(number * COHORT + place) % NUM_CLIENTS:016x}",
                "token_hash": (number * COHORT + place).to_bytes(16, "big"),
                "state": "LATE" if place == 0 else "MERGED",
                "reason": "TRAIN_TIMEOUT" if place == 0 else None,
                "assigned_unix_s": 1.7e9 + number,
                "deadline_unix_s": 1.7e9 + number + 60,
                "base_version": number - 1,
            }
            for number in numbers
            for place in range(COHORT)
        ),
    )
    database.execute("UPDATE jobs SET round = ?, latest_version = ? WHERE job_id = ?", [NUM_ROUNDS, NUM_ROUNDS, job])


if __name__ == "__main__":
    typer.run(main)
