"""Run a decentralised job: eight silos that exchange models, and a server that has none. `make gossip` runs it.

The demo uses the public interfaces, with TLS. Every silo is a process. Six have a port for their neighbours, and two
have none: their models pass through the server, encrypted. One silo is killed in a round and started again, two links
are cut for some rounds, and later the server is killed while the silos exchange models. Then the same silos do the same
work with a server that averages (FedAvg).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "digits"))

import silo_data  # noqa: E402
from links import Link  # noqa: E402

from demo import DemoServer, Processes, ended_by_sigterm, exit_after, free_port, make_empty  # noqa: E402
from fedplat import AdminClient, Parameters, parse_job  # noqa: E402
from fedplat.admin import submission  # noqa: E402
from fedplat.cli import job_files, watch  # noqa: E402
from fedplat.job import calibrate  # noqa: E402
from fedplat.wire.v1 import admin_pb2  # noqa: E402

WITHOUT_PORT = frozenset({6, 7})
VICTIM = 2
KILL_IN_ROUND = 5
NUM_CUTS = 2
CUT_FROM, CUT_UNTIL = 8, 11
"""The rounds in which `NUM_CUTS` links between neighbours are cut, in both directions."""
KILL_SERVER_IN_ROUND = 14
EXPORT_S = 30.0


@dataclasses.dataclass
class Run(DemoServer):
    """One run of the demo: also its silos and their links."""

    links: list[Link] = dataclasses.field(default_factory=list[Link])
    ports: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    names: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    killed_in_round: int = 0
    victim_came_back: bool = False
    server_killed_in_round: int = 0
    mtls_address: str = dataclasses.field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    cuts: tuple[tuple[int, int], ...] = ()
    cut_rounds: set[int] = dataclasses.field(default_factory=set[int])

    def start_server(self) -> None:
        """Start the server, also after it was killed. `--mtls-listen` lets it sign certificates for ports."""
        self.start_daemon("--mtls-listen", self.mtls_address)

    def start_silos(self) -> None:
        """Start a process for each silo, and wait until all have checked in."""
        self.write_ticket(silo_data.NUM_SILOS)
        self.links = [Link() for _ in range(silo_data.NUM_SILOS)]
        self.ports = {silo: free_port() for silo in range(silo_data.NUM_SILOS) if silo not in WITHOUT_PORT}
        for silo in range(silo_data.NUM_SILOS):
            self.start_silo(silo)
        with self.admin() as admin:
            processes = [f"silo-{silo}" for silo in range(silo_data.NUM_SILOS)]
            self.names = self.wait_for_clients(admin, silo_data.NUM_SILOS, processes)
        # The topology "ring" has the silos in the order of their ids.
        ring = [self.names[client_id] for client_id in sorted(self.names)]
        around = zip(ring, [*ring[1:], ring[0]], strict=True)
        self.cuts = tuple(pair for pair in around if self.ports.keys() - {VICTIM} >= set(pair))[:NUM_CUTS]

    def start_silo(self, silo: int) -> None:
        """Start the process of a silo, whose connections go through its link. Its folder is its identity."""
        command = [sys.executable, str(HERE / "client.py"), "--ticket-file", str(self.folder / "ticket")]
        command += ["--data-dir", str(self.folder / f"silo-{silo}"), "--silo", str(silo)]
        if silo in self.ports:
            command += ["--listen", self.address_of(silo)]
        self.processes.start(f"silo-{silo}", command, {"grpc_proxy": self.links[silo].url})

    def address_of(self, silo: int) -> str:
        """Return the address at which neighbours reach a silo."""
        return f"127.0.0.1:{self.ports[silo]}"

    def follow(self, admin: AdminClient, job: admin_pb2.Job) -> admin_pb2.Job:
        """Follow the job to its end; kill a silo and the server, and cut links."""

        def show(event: admin_pb2.JobEvent) -> None:
            if event.entity == "attempt":
                self._on_attempt(event, job)
            elif event.entity == "assignment" and self.names.get(event.client_id) == VICTIM:
                self._on_victim(event)

        return watch.follow(admin, job.job_id, watch.View(show, self.console.print))

    def _on_attempt(self, event: admin_pb2.JobEvent, job: admin_pb2.Job) -> None:
        if job.name.startswith("gossip"):
            if event.to_state == "SELECTING":
                self._cut(event.round)
            is_due = event.to_state == "EXCHANGING" and event.round >= KILL_SERVER_IN_ROUND
            if is_due and not self.server_killed_in_round:
                self._kill_server(event.round)
        if event.to_state == "COMMITTED":
            metrics = event.metrics
            edges = f", {metrics['confirmed_edges']:.0f} of {metrics['edges']:.0f} edges" if "edges" in metrics else ""
            apart = f", distance {metrics['relative_distance']:.3f}" if "relative_distance" in metrics else ""
            loss = f", loss {metrics['loss']:.3f}" if "loss" in metrics else ""
            self.console.print(f"{job.name} round {event.round}{loss}{edges}{apart}")

    def _kill_server(self, number: int) -> None:
        self.server_killed_in_round = number
        self.processes.kill("server")
        self.console.print(f"the server was killed in round {number}, and is started again")
        self.start_server()

    def _cut(self, number: int) -> None:
        """Cut the links of a round, or mend them."""
        is_cut = CUT_FROM <= number <= CUT_UNTIL
        for silo, link in enumerate(self.links):
            others = [b if a == silo else a for a, b in self.cuts if silo in (a, b)]
            link.cut(*(self.address_of(other) for other in others) if is_cut else ())
        if is_cut and not self.cut_rounds:
            self.console.print(f"links are cut between the silos {' and '.join(f'{a}-{b}' for a, b in self.cuts)}")
        if not is_cut and self.cut_rounds and max(self.cut_rounds) == number - 1:
            self.console.print("the links are mended")
        self.cut_rounds |= {number} if is_cut else set()

    def _on_victim(self, event: admin_pb2.JobEvent) -> None:
        """Kill a silo once when it has announced its model, and start it again."""
        if not self.killed_in_round and event.round >= KILL_IN_ROUND and event.to_state == "ADVERTISED":
            self.killed_in_round = event.round
            self.processes.kill(f"silo-{VICTIM}")
            self.console.print(f"silo {VICTIM} was killed in round {event.round}, and is started again")
            self.start_silo(VICTIM)
        if self.killed_in_round and event.round > self.killed_in_round and event.to_state == "MERGED":
            self.victim_came_back = True

    def count_bytes(self) -> tuple[list[int], int]:
        """Return the bytes in and out of each silo so far, and of the server."""
        silos = [0] * len(self.links)
        server, by_address = 0, {self.address_of(silo): silo for silo in self.ports}
        for silo, link in enumerate(self.links):
            for address, number in (link.sent + link.received).items():
                silos[silo] += number
                if address in by_address:
                    silos[by_address[address]] += number
                elif address == self.address:
                    server += number
        return silos, server

    def exports(self, job_id: str) -> list[Path]:
        """Return the exported models of all silos, for which the last may need a moment."""
        paths = [self.folder / f"silo-{silo}" / "exports" / f"{job_id}.safetensors" for silo in range(len(self.links))]
        ends_at = time.monotonic() + EXPORT_S
        while not all(path.exists() for path in paths) and time.monotonic() < ends_at:
            time.sleep(0.1)
        return [path for path in paths if path.exists()]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one of the two jobs has ended. Bytes are those on the wire, with TLS and all messages."""

    status: str
    reason: str
    accuracy: float
    rounds: int
    seconds: float
    silo_bytes: tuple[int, ...]
    server_bytes: int

    @property
    def busiest_mb(self) -> float:
        """The megabytes of the silo with the most traffic."""
        return max(self.silo_bytes) / 1e6


def run_job(demo: Run, admin: AdminClient, name: str, rounds: int) -> tuple[Outcome, admin_pb2.Job]:
    """Run a job to its end."""
    before, server_before = demo.count_bytes()
    began = time.monotonic()
    job = demo.follow(admin, submission.submit(admin, load(name, rounds)))
    seconds = time.monotonic() - began
    after, server_after = demo.count_bytes()
    status = admin_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_")
    outcome = Outcome(
        status=status,
        reason=job.reason,
        accuracy=0.0,
        rounds=job.round,
        seconds=seconds,
        silo_bytes=tuple(now - then for now, then in zip(after, before, strict=True)),
        server_bytes=server_after - server_before,
    )
    return outcome, job


def load(name: str, rounds: int) -> submission.Submission:
    """Load a job, for another number of rounds than that of its file if `rounds` is not 0."""
    loaded = job_files.load(HERE / name)
    text = loaded.text.replace(f"\nrounds = {loaded.spec.rounds}\n", f"\nrounds = {rounds or loaded.spec.rounds}\n")
    return dataclasses.replace(loaded, text=text, spec=calibrate(parse_job(text)))


def run(demo: Run, rounds: int, needed_accuracy: float) -> int:
    """Run both jobs and return the exit status."""
    make_empty(demo.folder)
    try:
        with ended_by_sigterm():
            demo.console.print(f"starting one server and {silo_data.NUM_SILOS} silos …")
            demo.initialize()
            demo.start_server()
            demo.start_silos()
            with demo.admin() as admin:
                gossip, job = run_job(demo, admin, "job.toml", rounds)
                exports = demo.exports(job.job_id)
                digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in exports}
                gossip = dataclasses.replace(gossip, accuracy=score(exports[0]) if exports else 0.0)
                seen = look_for_models(demo, exports)
                fedavg, other = run_job(demo, admin, "fedavg.toml", rounds)
                final = demo.folder / "fedavg.safetensors"
                if fedavg.status == "COMPLETED":
                    admin.export_model(other.job_id, None, final)
                    fedavg = dataclasses.replace(fedavg, accuracy=score(final))
    finally:
        demo.processes.stop_all()
    checks = {
        f"the job is {gossip.status} ({gossip.reason}), not COMPLETED": gossip.status == "COMPLETED",
        "not all silos have exported the mean": len(exports) == silo_data.NUM_SILOS,
        "the exported models differ from each other or from the server's digest": digests == {job.model.digest},
        f"the accuracy is below {needed_accuracy}": gossip.accuracy >= needed_accuracy,
        "the killed silo did not come back": demo.victim_came_back,
        "no link was cut": len(demo.cut_rounds) > 1,
        "the server was not killed": demo.server_killed_in_round > 0,
        f"the server has files with a silo's model: {seen}": not seen,
        f"FedAvg is {fedavg.status} ({fedavg.reason}), not COMPLETED": fedavg.status == "COMPLETED",
    }
    return report(demo, job, gossip, fedavg, checks)


def score(path: Path) -> float:
    """Return the accuracy of an exported model on the held-out digits."""
    return silo_data.evaluate(Parameters.open(path))["accuracy"]


def look_for_models(demo: Run, exports: list[Path]) -> list[str]:
    """Return the files of the server that contain a part of the mean, or of a model that a silo has stored."""
    models = exports + [path for silo in range(len(demo.links)) for path in (demo.folder / f"silo-{silo}").rglob("*")]
    parts = {path.read_bytes()[-4096:-2048] for path in models if path.is_file() and path.stat().st_size > 65536}
    kept = [path for path in demo.folder.rglob("*") if path.is_file() and "silo-" not in str(path)]
    initial = silo_data.initial().to_bytes()[-4096:-2048]
    return [str(path) for path in kept if any(part in path.read_bytes() for part in parts - {initial})]


def report(demo: Run, job: admin_pb2.Job, gossip: Outcome, fedavg: Outcome, checks: Mapping[str, bool]) -> int:
    """Print the comparison and the last line, and return the exit status."""
    table = Table(title="the same work, by gossip and by FedAvg; MB in and out of the server and of a silo")
    for column in ("", "accuracy", "rounds", "seconds", "server", "least", "mean", "most"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in (("gossip", gossip), ("FedAvg", fedavg)):
        sizes = [number / 1e6 for number in each.silo_bytes]
        mean = sum(sizes) / len(sizes)
        numbers = (each.server_bytes / 1e6, min(sizes), mean, max(sizes))
        cells = [f"{number:.1f}" for number in (each.seconds, *numbers)]
        table.add_row(name, f"{each.accuracy:.4f}", str(each.rounds), *cells)
    demo.console.print(table)
    distance = job.exchange.relative_distance
    summary: dict[str, Any] = {
        "gossip": dataclasses.asdict(gossip),
        "fedavg": dataclasses.asdict(fedavg),
        "distance": distance,
        "killed_in_round": demo.killed_in_round,
        "cut_rounds": sorted(demo.cut_rounds),
        "server_killed_in_round": demo.server_killed_in_round,
    }
    (demo.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    failures = [failure for failure, is_met in checks.items() if not is_met]
    for failure in failures:
        demo.console.print(f"missing: {failure}")
    words = {
        "accuracy": gossip.accuracy,
        "distance": distance,
        "silo_mb": gossip.busiest_mb,
        "server_mb": gossip.server_bytes / 1e6,
        "rounds": gossip.rounds,
        "fedavg_accuracy": fedavg.accuracy,
        "fedavg_silo_mb": fedavg.busiest_mb,
        "fedavg_server_mb": fedavg.server_bytes / 1e6,
    }
    line = " ".join(f"{name}={value:.4g}" for name, value in words.items())
    print(f"GOSSIP {'FAILED' if failures else 'OK'} {line}", flush=True)
    return 1 if failures else 0


def main(
    folder: Path = Path("runs/gossip"),
    port: int = 0,
    rounds: Annotated[int, typer.Option(min=0)] = 0,
    needed_accuracy: float = 0.93,
) -> None:
    """Run both jobs. It writes its results to FOLDER; PORT 0 selects a free port, ROUNDS 0 those of the job files."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = folder.resolve()
    demo = Run(folder, port or free_port(), console, Processes(folder))
    exit_after("GOSSIP", lambda: run(demo, rounds, needed_accuracy))


if __name__ == "__main__":
    typer.run(main)
