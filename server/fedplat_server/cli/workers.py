"""`fedplat-server pool ...`: run, show and benchmark the worker pool of a daemon."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedplat.command_line.with_typer import TyperConfiguredCommand, make_group
from fedplat_server.cli.bench.command import make_command
from fedplat_server.cli.options import DEFAULT_DATA_DIR, DataDir
from fedplat_server.errors import ConfigError
from fedplat_server.workers.client import WorkerPool

app = make_group("Run and inspect the worker pool.")
app.command("bench")(make_command())
Backend = Literal["auto", "gloo", "nccl"]


@app.command(cls=TyperConfiguredCommand)
def run(  # noqa: PLR0913 -- one parameter for each option of the command line
    data_dir: DataDir = DEFAULT_DATA_DIR,
    ranks: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar="FEDPLAT_POOL_RANKS",
            show_default=False,
            help="Ranks on this host. Default: one for each GPU, or one for every two cores.",
        ),
    ] = 0,
    backend: Annotated[
        Backend,
        typer.Option(envvar="FEDPLAT_POOL_BACKEND", help="Communication library: NCCL on GPUs, Gloo on CPUs."),
    ] = "auto",
    threads: Annotated[
        int, typer.Option(metavar="N", envvar="FEDPLAT_POOL_THREADS", help="PyTorch threads in each rank.")
    ] = 1,
    hosts: Annotated[
        str,
        typer.Option(
            metavar="N or MIN:MAX",
            envvar="FEDPLAT_POOL_HOSTS",
            help="Number of hosts in the pool; run this command on each of them.",
        ),
    ] = "1",
    rendezvous: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="FEDPLAT_POOL_RENDEZVOUS",
            help="Rendezvous address on one of the hosts, the same on all of them.",
        ),
    ] = "",
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            envvar="FEDPLAT_POOL_ADDRESS",
            help="Address of this host for the other hosts; that of the daemon's host must sort first.",
        ),
    ] = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar="FEDPLAT_POOL_MAX_RESTARTS",
            help="Maximum number of restarts of the ranks after one has died.",
        ),
    ] = 1000,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run the workers of DATA_DIR until SIGTERM or Ctrl-C."""
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level {log_level}: expected DEBUG, INFO, WARNING or ERROR")
    for option, number, least in (("ranks", ranks, 0), ("threads", threads, 1), ("max-restarts", max_restarts, 0)):
        if number < least:
            raise ConfigError(f"--{option} {number}: expected a whole number of at least {max(least, 1)}")
    num_hosts = _parse_hosts(hosts)
    if num_hosts != (1, 1) and not _is_address(rendezvous):
        raise ConfigError(f"--hosts {hosts} needs --rendezvous HOST:PORT, the same on all of them")
    if num_hosts != (1, 1) and not address:
        raise ConfigError(f"--hosts {hosts} needs --address HOST, the address of this host for the others")
    if num_hosts == (1, 1) and (rendezvous or address):
        raise ConfigError("--rendezvous and --address are for several hosts; set their number with --hosts")
    from fedplat_server.workers import launcher

    launcher.run(
        launcher.LaunchOptions(
            data_dir=data_dir.resolve(),
            num_ranks=ranks or launcher.default_num_ranks(),
            backend=backend,
            hosts=num_hosts,
            rendezvous=rendezvous or "127.0.0.1:0",
            address=address or "127.0.0.1",
            max_restarts=max_restarts,
            threads=threads,
            log_level=log_level.upper(),
        )
    )


@app.command()
def status(
    data_dir: DataDir = DEFAULT_DATA_DIR, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the worker pool of DATA_DIR.

    Exit status: 1 if it does not run.
    """
    info = asyncio.run(WorkerPool.at(Path(data_dir).resolve()).describe())
    if as_json:
        print(json.dumps({"ranks": info.num_ranks, "device": info.device}))
    else:
        print(f"the pool has {info.num_ranks} ranks; rank 0 computes on {info.device}")


def _parse_hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ConfigError(f"--hosts {text}: expected a number, or MIN:MAX")
    num_hosts = int(least), int(most or least)
    if not 1 <= num_hosts[0] <= num_hosts[1]:
        raise ConfigError(f"--hosts {text}: expected at least 1, and MIN not above MAX")
    return num_hosts


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
