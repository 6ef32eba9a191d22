"""The command `fedplat-server pool bench`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedplat_server.errors import ConfigError
from fedplat_server.pool.bench import sizes

if TYPE_CHECKING:
    from fedplat.backends.ranks.bench.records import Plan, Report
    from fedplat.backends.ranks.bench.records import Progress as Step

Backend = Literal["auto", "gloo", "nccl"]
_LEAST, _MOST = 2**10, 2**30


def bench(  # noqa: PLR0913 -- one parameter for each option of the command line
    ranks: Annotated[
        int | None, typer.Option(help="Ranks on this host. Default: one for each GPU, at least 2.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="What carries tensors: NCCL on GPUs, Gloo on CPUs.")] = "auto",
    min_size: Annotated[str, typer.Option(metavar="SIZE", help="Smallest vectors.")] = "1KB",
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest vectors. Default: 1GB, or what fits into memory.")
    ] = None,
    step: Annotated[int, typer.Option(help="Each size is so many times the one before.")] = 16,
    collective: Annotated[
        list[str] | None, typer.Option(help="Only this one, such as all-reduce; may be repeated. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw busbw over size into a PNG file.")] = None,
) -> None:
    """Measure collectives between ranks of this host, and say whether they are healthy. Exit status 1: they are not.

    Ranks of their own are started for it; a pool that runs goes on, and is better idle meanwhile.
    """
    from fedplat.backends.ranks.bench import health
    from fedplat_server.pool.bench import launch

    ranks = _ranks(ranks, backend)
    plan = _plan(ranks, backend, (min_size, max_size, step), collective or [])
    _check_plot(plot)
    with _progress() as note:
        report = launch.measured(ranks, backend, plan, note)
    found = health.findings(report)
    if plot is not None:
        from fedplat_server.pool.bench import picture

        picture.save(report, plot)
    _show(report, found, as_json)
    if found:
        raise typer.Exit(1)


def _ranks(ranks: int | None, backend: Backend) -> int:
    import torch

    gpus = torch.cuda.device_count()
    if ranks is None:
        ranks = max(2, gpus if backend != "gloo" else 0)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: expected 2 or more; between fewer there is nothing to measure")
    if backend == "nccl" and gpus < ranks:
        raise ConfigError(f"--backend nccl: expected a GPU for each of {ranks} ranks, found {gpus}; there is gloo")
    return ranks


def _plan(ranks: int, backend: Backend, span: tuple[str, str | None, int], collectives: list[str]) -> Plan:
    from fedplat.backends.ranks.bench.records import FACTORS, Plan

    least, step = sizes.parsed(span[0], "--min-size"), span[2]
    fits = sizes.most_that_fits(ranks, _memory(ranks, backend))
    most = sizes.parsed(span[1], "--max-size") if span[1] is not None else max(least, _default_most(fits))
    if least < 4 * ranks:
        raise ConfigError(
            f"--min-size {span[0]}: expected {4 * ranks} bytes or more, a number for each of {ranks} ranks"
        )
    if most < least:
        raise ConfigError(f"--max-size {span[1]}: expected no less than --min-size {span[0]}")
    if most > fits:
        raise ConfigError(
            f"--max-size {span[1] or span[0]}: {ranks} ranks need more memory for it than there is; "
            f"expected {sizes.shown(fits)} or less"
        )
    if step < 2:
        raise ConfigError(f"--step {step}: expected 2 or more")
    for name in collectives:
        if name not in FACTORS:
            raise ConfigError(f"--collective {name}: expected one of {', '.join(FACTORS)}")
    wanted = [name for name in FACTORS if not collectives or name in collectives]
    return Plan(sizes=sizes.powers(least, most, step), collectives=wanted)


def _check_plot(plot: Path | None) -> None:
    # Now, and not when everything was measured.
    if plot is None:
        return
    if not plot.resolve().parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.resolve().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'fedplat[plots]'")


def _default_most(fits: int) -> int:
    most = _MOST
    while most > fits and most > _LEAST:
        most //= 2
    return most


def _memory(ranks: int, backend: Backend) -> int:
    import torch

    if backend != "gloo" and torch.cuda.device_count() >= ranks:
        return ranks * min(torch.cuda.mem_get_info(number)[0] for number in range(ranks))
    return sizes.available()


@contextlib.contextmanager
def _progress() -> Generator[Callable[[Step], None]]:
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        yield lambda step: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the ranks start", total=None)
        yield lambda step: bar.update(task, completed=step.done, total=step.total, description=step.doing)


def _show(report: Report, findings: list[str], as_json: bool) -> None:
    if as_json:
        verdict = {"is_healthy": not findings, "findings": findings}
        sys.stdout.write(msgspec.json.encode(msgspec.to_builtins(report) | verdict).decode() + "\n")
        return
    from fedplat_server.pool.bench import tables

    console = Console(width=200, markup=False, highlight=False, emoji=False)
    console.print(tables.busbw(report))
    for line in ["", *tables.summary(report), ""]:
        console.print(line)
    for line in findings:
        console.print(f"- {line}")
    console.print("the pool is healthy" if not findings else "the pool is not healthy")
