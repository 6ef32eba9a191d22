"""What the tests of a server that is a process repeat: its clients, its jobs and their results."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typer import Typer

from fedplat.admin import AdminClient, submission
from fedplat.cli import app as operator
from fedplat.cli import job_files
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, ClientOptions
from fedplat_server.verify import inspection
from fedplat_server.verify.inspection import verify
from support import processes
from support.cli.runner import CliRunner


def clients_of(server: processes.Server, population: str, folder: Path, number: int, **options: Any) -> list[Client]:
    """Clients with a common ticket, and a data folder for each."""
    ticket = server.ticket(population, number)
    given = ClientOptions(**options)
    return [Client.from_ticket(ticket, data_dir=folder / f"client-{each}", options=given) for each in range(number)]


def submit(admin: AdminClient, text: str, model: Parameters) -> str:
    """Start a job with this model; its id."""
    return submission.submit(admin, submission.Submission(text, parse_job(text), model)).job_id


def submit_file(admin: AdminClient, folder: Path, text: str, model: Parameters) -> str:
    """Start a job as an operator does, from a file that names the one of its model; its id."""
    file = folder / "job.toml"
    file.write_text(text)
    (folder / tomllib.loads(text)["model"]["initial"]).write_bytes(model.to_bytes())
    return submission.submit(admin, job_files.load(file)).job_id


def completed(admin: AdminClient, job: str) -> list[admin_pb2.JobEvent]:
    """The events of a job up to its end, which is its completion."""
    events = list(admin.watch_job(job))
    assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
    return events


def exported(admin: AdminClient, job: str, folder: Path) -> Parameters:
    """The last model of a job."""
    file = folder / f"{job}.safetensors"
    admin.export_model(job, None, file)
    return Parameters.open(file)


def num_waiting(admin: AdminClient, population: str) -> int:
    return sum(client.state == "waiting" for client in admin.list_clients(population))


def run_fedplat(server: processes.Server, *arguments: str, status: int = 0) -> str:
    """Run a command of the operator in this process, which is quicker; everything that it prints."""
    return run(operator.app, "--profile", str(server.profile_path), *arguments, status=status)


def run(app: Typer, *arguments: str, status: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in this process; everything that it prints."""
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == status, done.output
    return done.output


def units(server: processes.Server) -> Sequence[inspection.Unit]:
    """What `verify` reads of the database: jobs, attempts and more."""

    async def read() -> list[inspection.Unit]:
        async with inspection.snapshot(database_of(server)) as connection:
            return [unit async for unit in inspection.units(connection)]

    return asyncio.run(read())


def database_of(server: processes.Server) -> str:
    return f"sqlite:///{server.folder / 'fedplat.sqlite'}"


def check(server: processes.Server) -> None:
    """Check the files and the database of a server that has stopped."""
    assert asyncio.run(verify(database_of(server), server.folder)).findings == []
