"""Train a model that is divided among ranks: a pool of four, two silos of two processes. `make large` runs it.

The demo uses the public interfaces, with TLS: the commands `fedplat-server run`, `fedplat-server pool run` and
`fedplat-client run`, torchrun and the operator API. The same job then runs with one process in place of each group of
ranks, and the losses must be the same up to rounding. From the first version of the first job on, whose silos shard the
model and cut it into stages, even the bits must be the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "digits"))

import plays  # noqa: E402
from demo import DemoError, DemoServer, Processes, ended_by_sigterm, exit_after, free_port, make_empty  # noqa: E402
from fedplat import AdminClient, Parameters, parse_job  # noqa: E402
from fedplat.admin import submission  # noqa: E402
from fedplat.cli import job_files, watch  # noqa: E402
from fedplat.wire.v1 import admin_pb2  # noqa: E402

SILOS = {"sharded": "shard=2", "pipelined": "pipeline=2,micro_batches=4"}
"""The trainers of silos.py, and how the two processes of each silo divide the model."""
TOLERANCE = 1e-5
"""Promised relative difference of losses with tensor parallelism, which adds up in another order."""


@dataclasses.dataclass
class Outcome:
    """The result of a job, by version, without the initial one."""

    job_id: str
    digests: list[str]
    losses: list[float]
    """Losses on the held-out plays."""
    training_losses: list[float]
    """Mean losses of the training: of the warm start, if there is one, and of each round's silos."""
    seconds: float
    bytes_of_a_rank: dict[str, int]
    """Largest size of parameters, gradients and moments in one process, by the owner."""


@dataclasses.dataclass
class Run(DemoServer):
    """One run of the demo."""

    def start_divided(self) -> None:
        """Start a pool of four ranks and two silos of two processes each, and wait until they can work."""
        self.start_pool(4)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        for name, layout in SILOS.items():
            self._start_silo(name, name, launcher, ["--parallel", layout])
        self._wait()

    def start_single(self) -> None:
        """Start a single process in place of each group."""
        self.start_pool(1)
        for name in SILOS:
            self._start_silo(name, f"{name}_alone")
        self._wait()

    def _start_silo(self, name: str, trainer: str, launcher: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        command = ["-m", "fedplat_client", "run", "--trainer", f"plays={HERE / 'silos.py'}:{trainer}"]
        command += ["--ticket-file", str(self.folder / "ticket"), "--data-dir", str(self.folder / name)]
        command += ["--label", f"index={list(SILOS).index(name)}"]
        self.processes.start(name, [sys.executable, *launcher, *command, *options])

    def _wait(self) -> None:
        self.wait_for_pool()
        with self.admin() as admin:
            self.wait_for_clients(admin, len(SILOS), [*SILOS])

    def stop_workers(self) -> None:
        """Stop the pool and the silos."""
        for name in ("pool", *SILOS):
            self.processes.stop(name)

    def run_job(self, admin: AdminClient, wanted: submission.Submission) -> Outcome:
        """Run a job to its end."""
        began, memory = time.monotonic(), self.folder / "memory"
        submitted = submission.submit(admin, wanted)
        lines = watch.lines(self.console.print, submitted)
        ended = watch.follow(admin, submitted.job_id, watch.View(lines, self.console.print))
        if ended.status != admin_pb2.JOB_STATUS_COMPLETED:
            raise DemoError(f"the job {ended.name} did not complete: {ended.reason}")
        versions = list(admin.list_versions(ended.job_id))[1:]
        sizes: dict[str, int] = {}
        for path in memory.glob("*.json"):
            note: dict[str, Any] = json.loads(path.read_text())
            sizes[note["owner"]] = max(sizes.get(note["owner"], 0), note["bytes"])
            path.unlink()
        return Outcome(
            ended.job_id,
            [version.model.digest for version in versions],
            [version.metrics["loss"] for version in versions],
            [attempt.client_metrics["loss"] for attempt in admin.list_rounds(ended.job_id)],
            round(time.monotonic() - began, 1),
            sizes,
        )


def continue_from(wanted: submission.Submission, model: Path) -> submission.Submission:
    """Return the same job without its warm start, from another model."""
    before, _, after = wanted.text.partition("[warm_start]")
    text = before + after[after.index("\n[") :]
    return dataclasses.replace(wanted, text=text, spec=parse_job(text), parameters=Parameters.open(model))


def compare(divided: Outcome, single: Outcome) -> float:
    """Return the largest relative difference of two jobs' losses."""
    pairs = zip(divided.losses + divided.training_losses, single.losses + single.training_losses, strict=True)
    return max(abs(one - other) / other for one, other in pairs)


def run(demo: Run, settings: Mapping[str, Any], rounds: int) -> int:
    """Run the job with divided models and in single processes, and return the exit status."""
    make_empty(demo.folder)
    plays.read_text(Path(settings["text"]), settings["num_characters"])  # too short: before anything starts
    (demo.folder / "settings.json").write_text(json.dumps(settings))
    began = time.monotonic()
    wanted = load(rounds)
    size = wanted.parameters.schema.num_floating
    try:
        with ended_by_sigterm():
            demo.console.print(f"a model of {size:,} parameters; it learns {settings['text']}")
            demo.console.print("starting a server, a pool of four ranks and two silos of two processes each …")
            demo.initialize()
            demo.start_daemon("--trainer", f"plays={HERE / 'trainer.py'}:trainer")
            demo.write_ticket(len(SILOS))
            demo.start_divided()
            with demo.admin() as admin:
                divided = demo.run_job(admin, wanted)
                demo.console.print("now one process in place of each group; the same job again …")
                demo.stop_workers()
                demo.start_single()
                single = demo.run_job(admin, wanted)
                demo.console.print("once more from the first job's warm start, for the bits …")
                first = demo.folder / "version-1.safetensors"
                admin.export_model(divided.job_id, 1, first)
                again = demo.run_job(admin, continue_from(wanted, first))
    finally:
        demo.processes.stop_all()
    outcomes = {"divided": divided, "single": single, "again": again}
    summary = {name: dataclasses.asdict(each) for name, each in outcomes.items()}
    (demo.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return report(demo.console, divided, single, again.digests, round(time.monotonic() - began, 1))


def load(rounds: int) -> submission.Submission:
    """Load the job, for another number of rounds than that of its file."""
    loaded = job_files.load(HERE / "job.toml")
    text = loaded.text.replace(f"\nrounds = {loaded.spec.rounds}\n", f"\nrounds = {rounds or loaded.spec.rounds}\n")
    return dataclasses.replace(loaded, text=text, spec=parse_job(text))


def report(console: Console, divided: Outcome, single: Outcome, again: list[str], seconds: float) -> int:
    """Print tables and the last line, and return the exit status."""
    console.print(_losses(divided, single, again), _memory(divided, single))
    difference, equal = compare(divided, single), sum(map(str.__eq__, again, divided.digests[1:]))
    halves = {name: divided.bytes_of_a_rank[name] / whole for name, whole in single.bytes_of_a_rank.items()}
    checks = {
        f"losses differ by {difference:.1g}, more than {TOLERANCE:.0e}": difference <= TOLERANCE,
        f"{equal} of {len(again)} versions have equal bits": equal == len(again) == len(divided.digests) - 1,
        "the loss did not fall": divided.losses[-1] < divided.losses[0],
        "a process has more than two thirds of the model": all(half < 2 / 3 for half in halves.values()),
    }
    failures = [failure for failure, is_met in checks.items() if not is_met]
    for failure in failures:
        console.print(f"missing: {failure}")
    numbers = {"loss": divided.losses[-1], "difference": difference, "equal": equal}
    numbers |= {f"memory_{name}": half for name, half in halves.items()} | {"seconds": seconds}
    words = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
    print(f"LARGE {'FAILED' if failures else 'OK'} {words}", flush=True)
    return 1 if failures else 0


def _losses(divided: Outcome, single: Outcome, again: list[str]) -> Table:
    table = Table("version", "loss, divided", "one process each", "bits, from version 1 on")
    rows = zip(divided.losses, single.losses, divided.digests, [divided.digests[0], *again], strict=True)
    for version, (one, other, digest, repeated) in enumerate(rows):
        name = f"round {version}" if version else "warm start"
        bits = ("the same" if digest == repeated else "others") if version else ""
        table.add_row(name, f"{one:.8f}", f"{other:.8f}", bits)
    return table


def _memory(divided: Outcome, single: Outcome) -> Table:
    table = Table("parameters, gradients, moments", "of a rank", "of the whole", "")
    for name, whole in sorted(single.bytes_of_a_rank.items()):
        own = divided.bytes_of_a_rank[name]
        table.add_row(name, f"{own / 1e6:.2f} MB", f"{whole / 1e6:.2f} MB", f"{own / whole:.0%}")
    return table


def main(
    folder: Path = Path("runs/large"),
    port: int = 0,
    config: Path = HERE / "config.json",
    characters: Annotated[int, typer.Option(min=5000)] = 80_000,
    rounds: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Run the job. It writes its results to FOLDER; PORT 0 selects a free port, ROUNDS 0 those of the job file.

    CONFIG is a file of Hugging Face's form, and CHARACTERS is the length of the text.
    """
    folder = folder.resolve()
    # For all processes: GPUs are hidden, since both runs must use equal hardware.
    os.environ |= {"LARGE_FOLDER": str(folder), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    settings = {"config": str(config.resolve()), "text": str(plays.find_text()), "num_characters": characters}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    demo = Run(folder, port or free_port(), console, Processes(folder))
    exit_after("LARGE", lambda: run(demo, settings, rounds))


if __name__ == "__main__":
    typer.run(main)
