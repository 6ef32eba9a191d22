"""Run a warm start on two ranks, then ten rounds; and the same again without the pool. `make warm-start` runs it.

The demo uses the public interfaces, with TLS: the commands `fedplat-server run` and `fedplat-server pool run`, the
client SDK and the operator API. Both runs must create the same versions, bit for bit: one before the rounds and one of
each round.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "digits"))

from demo import DemoError, DemoServer, Processes, ended_by_sigterm, exit_after, free_port, make_empty  # noqa: E402
from fedplat import AdminClient  # noqa: E402
from fedplat.admin import submission  # noqa: E402
from fedplat.cli import job_files, watch  # noqa: E402
from fedplat.wire.v1 import admin_pb2  # noqa: E402

RANKS = 2
NEEDED_ACCURACY = 0.8
"""Ten digits; the public part has seven of them."""


@dataclasses.dataclass
class Outcome:
    """The result of a job: the digest and the held-out accuracy of each version after the initial one."""

    job_id: str
    digests: list[str]
    accuracies: list[float]


@dataclasses.dataclass
class Run(DemoServer):
    """One run of the demo: also the number of rounds."""

    rounds: int

    def start(self) -> None:
        """Initialize the server, and start it, its pool and the clients."""
        self.initialize()
        self.start_pool(RANKS)
        self.start_daemon("--trainer", f"digits={HERE / 'public.py'}:trainer")
        clients = ["--ticket-file", str(self.write_ticket(4)), "--folder", str(self.folder / "clients")]
        self.processes.start("clients", [sys.executable, str(HERE / "clients.py"), *clients])
        self.wait_for_pool()

    def run_job(self, admin: AdminClient) -> Outcome:
        """Run the job to its end."""
        wanted = job_files.load(HERE / "job.toml")
        text = wanted.text.replace(f"rounds = {wanted.spec.rounds}\n", f"rounds = {self.rounds}\n")
        submitted = submission.submit(admin, dataclasses.replace(wanted, text=text))
        lines = watch.lines(lambda line: self.console.print(line, soft_wrap=True), submitted)
        ended = watch.follow(admin, submitted.job_id, watch.View(lines, self.console.print))
        if ended.status != admin_pb2.JOB_STATUS_COMPLETED:
            raise DemoError(f"the job {ended.name} did not complete: {ended.reason}")
        versions = list(admin.list_versions(ended.job_id))[1:]
        return Outcome(
            ended.job_id,
            [version.model.digest for version in versions],
            [version.metrics.get("accuracy", 0.0) for version in versions],
        )


def run(folder: Path, port: int, rounds: int, console: Console) -> int:
    """Run the job on the pool and without it, and return the exit status."""
    make_empty(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hide GPUs: both runs must use equal hardware to compare bits
    began, processes = time.monotonic(), Processes(folder)
    demo = Run(folder, port or free_port(), console, processes, rounds)
    try:
        with ended_by_sigterm():
            console.print(f"starting a pool of {RANKS} ranks, a server and four clients …")
            demo.start()
            with demo.admin() as admin:
                pooled = demo.run_job(admin)
                processes.stop("pool")
                console.print("the pool was stopped; the same job again, without it")
                without_pool = demo.run_job(admin)
    finally:
        processes.stop_all()
    console.print(_table(pooled, without_pool))
    same = [one == other for one, other in zip(pooled.digests, without_pool.digests, strict=True)]
    seconds = round(time.monotonic() - began, 1)
    summary = {"pool": dataclasses.asdict(pooled), "alone": dataclasses.asdict(without_pool), "seconds": seconds}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _plot(pooled, folder / "accuracy.png")
    first, last = pooled.accuracies[0], pooled.accuracies[-1]
    fine = all(same) and len(same) == rounds + 1 and first < last >= NEEDED_ACCURACY
    words = f"versions={len(same)} equal={sum(same)} warm_start={first:.4f} accuracy={last:.4f} seconds={seconds}"
    reason = "" if all(same) else "the versions differ: "
    print(f"WARM START {'OK' if fine else f'FAILED {reason}'.strip()} {words}", flush=True)
    return 0 if fine else 1


def _table(pooled: Outcome, without_pool: Outcome) -> Table:
    table = Table("round", "on the pool", "without it", "version")
    rows = zip(pooled.accuracies, without_pool.accuracies, pooled.digests, without_pool.digests, strict=True)
    for round_, (one, other, digest, again) in enumerate(rows):
        name = str(round_) if round_ else "warm start"
        other_version = "the same" if digest == again else again[:12]
        table.add_row(name, f"{one:.4f}", f"{other:.4f}", f"{digest[:12]} {other_version}")
    return table


def _plot(outcome: Outcome, path: Path) -> None:
    """Plot the accuracy by round, from the warm start on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(range(len(outcome.accuracies)), outcome.accuracies, marker="o", color="#1f5f8b")
    axes.annotate("warm start: no 7, 8 or 9", (0, outcome.accuracies[0]), xytext=(40, -8), textcoords="offset points")
    axes.set(xlabel="round", ylabel="held-out accuracy", title="Digits: a warm start on public data, then four clients")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folder: Path = Path("runs/warm_start"), port: int = 0, rounds: int = 10) -> None:
    """Run the job on a pool and without it. It writes its results to FOLDER; PORT 0 selects a free port."""
    console = Console(highlight=False, markup=False)
    exit_after("WARM START", lambda: run(folder.resolve(), port, rounds, console))


if __name__ == "__main__":
    typer.run(main)
