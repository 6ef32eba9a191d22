"""Does anything grow, or get lost, while clients fail all the time?

    python tests/faults/soak.py [--clients 200] [--minutes 10] [--fault-rate 0.1] [--database URL] [--json]

One real server and `--clients` real SDK clients, ten to a process, for `--minutes`. All traffic goes through a TCP
proxy. With the probability `--fault-rate`: a connection is cut after a random number of bytes, or delayed; a training
is too slow or fails; a report is sent twice; and each second a whole process is killed (SIGKILL) and started again.
Afterwards `fedplat-server verify` reads the database and the blobs. Exit status 0 only if it finds nothing, rounds were
committed to the end, and the server's memory and open files did not grow: the medians of the second and of the last
quarter of the time are compared. `runs/soak/` holds the logs, `soak.json` and a picture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.soak_fleet import POPULATION, TRAINER
from faults.soak_network import FaultyNetwork, faulty_network
from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import processes

PER_PROCESS = 10
SAMPLE_S = 2.0
MAX_GROWTH = 1.10
"""Of the median memory, from the second quarter to the last; SQLite's caches and allocators breathe a little."""
MAX_MORE_FILES = 20
JOB = """
name = "soak"
population = "{population}"
trainer = "{trainer}"
rounds = 1000000
[model]
initial = "unused.safetensors"
[selection]
goal = {goal}
min_fraction = 0.5
[deadlines]
selection_s = 5
training_s = 4
upload_s = 4
heartbeat_s = 2
[retry]
base_s = 0.2
max_s = 2
"""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The server at one moment; `rss_mb` in MiB."""

    at_s: float
    rss_mb: float
    num_files: int
    round: int


class Fleet:
    """The client processes; `kill_one` ends one as a power cut would, and starts it again."""

    def __init__(self, folder: Path, ticket: Path, num_clients: int, fault_rate: float) -> None:
        self._rng = random.Random(1)
        self._log = (folder / "clients.log").open("ab")
        self._commands = [
            [
                *(sys.executable, str(Path(__file__).with_name("soak_fleet.py")), "--ticket-file", str(ticket)),
                *("--folder", str(folder / "clients"), "--first", str(first)),
                *("--count", str(min(PER_PROCESS, num_clients - first)), "--fault-rate", str(fault_rate)),
                *("--seed", str(first)),
            ]
            for first in range(0, num_clients, PER_PROCESS)
        ]
        self._processes = [self._start(command) for command in self._commands]
        self.num_killed = 0

    def kill_one(self) -> None:
        index = self._rng.randrange(len(self._processes))
        self._processes[index].send_signal(signal.SIGKILL)
        self._processes[index].wait()
        self._processes[index] = self._start(self._commands[index])
        self.num_killed += 1

    def num_ended(self) -> int:
        """How many processes ended by themselves, which none should."""
        return sum(process.poll() is not None for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        self._log.close()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)


def main(
    clients: Annotated[int, typer.Option(min=10, help="SDK clients, ten to a process.")] = 200,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 10.0,
    fault_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability of each kind of fault.")] = 0.1,
    database: Annotated[str | None, typer.Option(help="A PostgreSQL URL; default: SQLite.")] = None,
    folder: Annotated[Path, typer.Option(help="Where everything is kept; emptied first.")] = Path("runs/soak"),
    as_json: Annotated[bool, typer.Option("--json", help="The last line is one JSON object.")] = False,
) -> None:
    """Run many clients with many faults for a while, then check everything."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = ("--database", database) if database else ()
    with processes.server(folder.resolve() / "server", "--log-level", "warning", *options) as server:
        samples, fleet_report = soak(server, folder.resolve(), clients, minutes * 60.0, fault_rate)
        outcome = rounds_of(server)
    verified = verify(folder / "server", options)
    result = {**summary(samples), **fleet_report, **outcome, "verify": verified, "clients": clients, "minutes": minutes}
    problems = problems_of(result)
    result["problems"] = problems
    (folder / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(samples, folder / "soak.png")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(result)
    print("SOAK OK" if not problems else "SOAK FAILED: " + "; ".join(problems))
    raise typer.Exit(1 if problems else 0)


def soak(
    server: processes.Server, folder: Path, num_clients: int, seconds: float, fault_rate: float
) -> tuple[list[Sample], dict[str, object]]:
    """The test itself; returns what the server was like, and what was done to the clients."""
    model = Parameters.from_arrays({"weight": np.zeros(80_000, np.float32)})  # 320 KB: more than fits into a report
    text = JOB.format(population=POPULATION, trainer=TRAINER, goal=max(2, num_clients // 5))
    samples: list[Sample] = []
    with (
        faulty_network(server.address, fault_rate, seed=3) as network,
        server.admin() as admin,
        contextlib.closing(
            Fleet(folder, enrollment(admin, network, folder, num_clients), num_clients, fault_rate)
        ) as fleet,
        ticking(seconds) as ticks,
    ):
        job = submission.submit(admin, submission.Submission(text, parse_job(text), model)).job_id
        process = psutil.Process(server.pid)
        dice = random.Random(2)
        for at_s in ticks:
            if dice.random() < fault_rate * SAMPLE_S:
                fleet.kill_one()
            shown = admin.show_job(job)
            rss_mb = process.memory_info().rss / 2**20
            samples.append(Sample(at_s, rss_mb, process.num_fds(), shown.round))
        admin.cancel(job)
        report: dict[str, object] = {
            "killed": fleet.num_killed,
            "ended_by_themselves": fleet.num_ended(),
            "network": dict(network.counts),
        }
    return samples, report


def enrollment(admin: AdminClient, network: FaultyNetwork, folder: Path, num_clients: int) -> Path:
    """A file with a ticket for so many clients, which leads them into the faulty network."""
    path = folder / "ticket"
    path.write_text(admin.create_enrollment(POPULATION, num_clients, 3600.0, network.address).ticket)
    return path


@contextlib.contextmanager
def ticking(seconds: float) -> Generator[Generator[float]]:
    """Seconds since the start, one for each sample, with a progress bar."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("soak", total=seconds)

        def ticks() -> Generator[float]:
            started = time.monotonic()
            while (passed := time.monotonic() - started) < seconds:
                progress.update(bar, completed=passed)
                yield passed
                time.sleep(SAMPLE_S)

        yield ticks()


def rounds_of(server: processes.Server) -> dict[str, object]:
    """What became of the attempts and of the clients in them."""
    with server.admin() as admin:
        rounds = admin.list_rounds("soak", all_attempts=True)
    committed = [r for r in rounds if r.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED]
    counts = {name: sum(getattr(r, name) for r in rounds) for name in ("assigned", "reported", "late", "failed")}
    return {"committed": len(committed), "abandoned": len(rounds) - len(committed), **counts}


def verify(data_dir: Path, options: tuple[str, ...]) -> int:
    """The exit status of the operator's checker."""
    command = [str(processes.BIN / "fedplat-server"), "verify", "--data-dir", str(data_dir), *options]
    return subprocess.run(command).returncode


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter."""
    size = len(values) // 4
    return statistics.median(values[size : 2 * size]), statistics.median(values[-size:])


def summary(samples: list[Sample]) -> dict[str, object]:
    """What grew."""
    rss, files = quarters([s.rss_mb for s in samples]), quarters([float(s.num_files) for s in samples])
    half = samples[len(samples) // 2].round
    return {
        "rss_mb_second_quarter": round(rss[0], 1),
        "rss_mb_last_quarter": round(rss[1], 1),
        "files_second_quarter": files[0],
        "files_last_quarter": files[1],
        "rounds_first_half": half,
        "rounds_second_half": samples[-1].round - half,
    }


def problems_of(result: dict[str, object]) -> list[str]:
    """Why the test has failed, if it has."""
    before, after = float(str(result["rss_mb_second_quarter"])), float(str(result["rss_mb_last_quarter"]))
    files = float(str(result["files_last_quarter"])) - float(str(result["files_second_quarter"]))
    checks = {
        f"memory grew from {before} to {after} MiB": after > before * MAX_GROWTH,
        f"{files:g} more open files": files > MAX_MORE_FILES,
        "no round was committed in the second half": not result["rounds_second_half"],
        f"{result['ended_by_themselves']} client processes ended by themselves": bool(result["ended_by_themselves"]),
        "verify found something, see above": bool(result["verify"]),
    }
    return [text for text, wrong in checks.items() if wrong]


def draw(samples: list[Sample], path: Path) -> None:
    """Memory, open files and rounds over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    at = [s.at_s / 60.0 for s in samples]
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
    for axis, values, label in zip(
        axes,
        ([s.rss_mb for s in samples], [s.num_files for s in samples], [s.round for s in samples]),
        ("server memory (MiB)", "open files", "committed rounds"),
        strict=True,
    ):
        axis.plot(at, values)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
