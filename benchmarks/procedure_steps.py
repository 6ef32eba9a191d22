"""The steps of a procedure, plain and under masks: a real server and the processes of five sites.

    python benchmarks/procedure_steps.py
    python benchmarks/procedure_steps.py --numbers 1000 --steps 3

Each site sends `numbers` integers in each step. A step is the time from one committed version to the next; the first
one is omitted. CPU is that of a step, and of a site the mean over all.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from msgspec import Struct

import deployment
import report
from deployment import Deployment
from fedplat.admin import submission
from fedplat.config.loaded_plugins import load_plugins
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.procedures import Finished, ReplyDisclosure, ReplySchema, ReplyTensor, ReplyTotals, SiteTable, Step
from fedplat.procedures.versions import begin
from fedplat_client.trainers.table import TableTrainer
from secure_rounds import cpu_seconds

COLUMNS = ("step", "s a step", "x plain", "CPU of the server, s", "CPU of a site, s", "steps")
PLUGIN = "procedures.repeated=procedure_steps.py:RepeatedSum"
NUMBERS = (1_000, 100_000)
BOUND = 1e6
JOB = """
name = "steps"
population = "bench"
trainer = "rows"
rounds = {rounds}
[selection]
goal = {sites}
[deadlines]
training_s = 3600
upload_s = 3600
heartbeat_s = 600
[procedure]
kind = "repeated"
steps = {rounds}
numbers = {numbers}
"""
CASES = {"plain": "", "under masks": "[secure_aggregation]\nconfirm = true\n"}


class RepeatedSum(Struct, frozen=True, forbid_unknown_fields=True):
    """The sum of the same numbers of each site, `steps` times."""

    steps: int
    numbers: int

    def _ask(self, number: int) -> Step:
        return Step(Parameters.from_arrays({"step": np.array([number])}), str(number).encode())

    def begin(self) -> Step:
        """Return the first question."""
        return self._ask(1)

    def schema(self, message: Parameters) -> ReplySchema:
        """Return the form of the replies."""
        return ReplySchema((ReplyTensor("sums", bound=BOUND, shape=(self.numbers,)),))

    def answer(self, message: Parameters, table: SiteTable) -> Mapping[str, npt.ArrayLike]:
        """Return what a site sends."""
        return {"sums": np.arange(self.numbers) % 1000}

    def advance(self, state: bytes, totals: ReplyTotals) -> Step | Finished:
        """Return the next question, and at the end one number."""
        number = int(state)
        return self._ask(number + 1) if number < self.steps else Finished({"sum": int(totals.steps("sums").sum())})

    def disclosures(self) -> tuple[ReplyDisclosure, ...]:
        """Return what leaves a site."""
        return (ReplyDisclosure("sums", "numbers", self.numbers, BOUND, 1.0, self.steps),)


rows = TableTrainer({"number": [1]})
"""The table of each site, of which nothing is read."""


PLUGINS = load_plugins({"procedures.repeated": RepeatedSum}).table


def deploy(deployed: Deployment, num_sites: int) -> None:
    """Start the sites, and wait for them."""
    with deployed.admin() as admin:
        ticket = deployed.folder / "ticket"
        ticket.write_text(admin.create_enrollment("bench", num_sites, 600.0, deployed.address).ticket)
        for number in range(num_sites):
            client = [deployment.BIN / "fedplat-client", "run", "--ticket-file", ticket, "--plugin", PLUGIN]
            client += ["--trainer", "rows=procedure_steps.py:rows", "--log-level", "warning"]
            client += ["--data-dir", deployed.folder / f"site-{number}"]
            deployed.clients.append(deployed.processes.start(f"site-{number}", client, deployment.HERE))
        deployment.wait_for_clients(deployed, admin, num_sites)


def run(deployed: Deployment, numbers: int, steps: int, more: str) -> tuple[float, float, float]:
    """Run a job; return the seconds of a step, its CPU seconds at the server, and those of a site."""
    sites = len(deployed.clients)
    text = JOB.format(rounds=steps + 1, sites=sites, numbers=numbers) + more
    before = cpu_seconds([deployed.server]), cpu_seconds(deployed.clients)
    moments: list[float] = []
    with deployed.admin() as admin:
        model = begin(RepeatedSum(steps + 1, numbers)).model
        job = submission.submit(admin, submission.Submission(text, parse_job(text, PLUGINS), model))
        moments = [event.unix_s for event in admin.watch_job(job.job_id) if event.entity == "version"]
        total = admin.result(job.job_id).result["sum"]
    if total != (expected := sites * int((np.arange(numbers) % 1000).sum())):
        raise AssertionError(f"the sum is {total}, and {expected} is right")
    server_s, sites_s = cpu_seconds([deployed.server]) - before[0], cpu_seconds(deployed.clients) - before[1]
    median_s = statistics.median(deployment.intervals(moments))
    return median_s, server_s / (steps + 1), sites_s / (steps + 1) / sites


def main(
    numbers: Annotated[list[int] | None, typer.Option(min=1, help="Integers of a reply; repeatable.")] = None,
    sites: Annotated[int, typer.Option(min=3)] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each job after the first.")] = 12,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure the steps of a procedure."""
    table: list[tuple[report.Cell, ...]] = []
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
        plugin = ["--plugin", f"procedures.repeated={deployment.HERE / 'procedure_steps.py'}:RepeatedSum"]
        with deployment.serve(Path(folder), options=plugin) as deployed:
            deploy(deployed, sites)
            for count in numbers or NUMBERS:
                found = {name: run(deployed, count, steps, more) for name, more in CASES.items()}
                for name, (seconds, server_s, site_s) in found.items():
                    ratio = seconds / found["plain"][0]
                    table.append((f"{count:,} numbers, {name}", seconds, ratio, server_s, site_s, steps))
    note = f"{sites} sites on the cores of the server, with TLS; medians of the steps, and means of the CPU."
    title = "Steps of a procedure"
    report.finish(
        report.Report(name="procedure_steps", title=title, columns=COLUMNS, rows=tuple(table), notes=(note,)),
        as_json,
        save,
    )


if __name__ == "__main__":
    typer.run(main)
