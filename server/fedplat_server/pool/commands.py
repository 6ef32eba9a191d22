"""`fedplat-server pool ...`: the ranks that work for the daemon, and how they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedplat_server.command_options import DEFAULT_DATA_DIR, DataDir
from fedplat_server.errors import ConfigError
from fedplat_server.pool.bench.command import bench
from fedplat_server.pool.link import PoolLink

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.command()(bench)
Backend = Literal["auto", "gloo", "nccl"]


@app.command()
def run(  # noqa: PLR0913 -- one parameter for each option of the command line
    data_dir: DataDir = DEFAULT_DATA_DIR,
    ranks: Annotated[
        int, typer.Option(help="Ranks on this host. Default: one for each GPU, or for each two cores.")
    ] = 0,
    backend: Annotated[Backend, typer.Option(help="What carries tensors: NCCL on GPUs, Gloo on CPUs.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch in each rank.")] = 1,
    hosts: Annotated[
        str, typer.Option(metavar="N or MIN:MAX", help="Hosts that form one pool; run this command on each of them.")
    ] = "1",
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where several hosts meet: at one of them, the same for all.")
    ] = "",
    address: Annotated[
        str, typer.Option(metavar="HOST", help="Where the others reach this host; the daemon's has to sort first.")
    ] = "",
    max_restarts: Annotated[int, typer.Option(help="How often ranks that died are started again.")] = 1000,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run the ranks that work for the daemon of DATA_DIR, until SIGTERM or Ctrl-C."""
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level {log_level}: expected DEBUG, INFO, WARNING or ERROR")
    for option, number, least in (("ranks", ranks, 0), ("threads", threads, 1), ("max-restarts", max_restarts, 0)):
        if number < least:
            raise ConfigError(f"--{option} {number}: expected a whole number of at least {max(least, 1)}")
    found = _hosts(hosts)
    if found != (1, 1) and not _is_address(rendezvous):
        raise ConfigError(f"--hosts {hosts} needs --rendezvous HOST:PORT, the same on all of them")
    if found != (1, 1) and not address:
        raise ConfigError(f"--hosts {hosts} needs --address HOST, where the others reach this one")
    if found == (1, 1) and (rendezvous or address):
        raise ConfigError("--rendezvous and --address are for several hosts; say how many with --hosts")
    from fedplat_server.pool import launch

    launch.run(
        launch.Options(
            data_dir=data_dir.resolve(),
            num_ranks=ranks or launch.default_ranks(),
            backend=backend,
            hosts=found,
            rendezvous=rendezvous or "127.0.0.1:0",
            address=address or "127.0.0.1",
            max_restarts=max_restarts,
            threads=threads,
            log_level=log_level.upper(),
        )
    )


@app.command()
def status(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Say whether a pool listens at DATA_DIR, and what it has. Exit status 1: it does not."""
    hello = asyncio.run(PoolLink.of_folder(Path(data_dir).resolve()).look())
    if as_json:
        print(json.dumps({"ranks": hello.num_ranks, "device": hello.device}))
    else:
        print(f"the pool has {hello.num_ranks} ranks; rank 0 computes on {hello.device}")


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ConfigError(f"--hosts {text}: expected a number, or MIN:MAX")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--hosts {text}: expected at least 1, and MIN not above MAX")
    return found


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
