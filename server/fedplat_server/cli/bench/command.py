"""The command `fedplat-server pool bench`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedplat.extras import install_command
from fedplat_server.cli.bench import sizes
from fedplat_server.errors import ConfigError

if TYPE_CHECKING:
    from fedplat.pytorch.distributed.bench.records import BenchPlan, BenchReport, BenchStep

Backend = Literal["auto", "gloo", "nccl"]
_MIN_BYTES, _MAX_BYTES = 2**10, 2**30


def make_command(program: Sequence[str] = ()) -> Callable[..., None]:
    """Return the command. `program` is Python's arguments for the ranks; the default is `LIBRARY_PROGRAM`."""

    def bench(  # noqa: PLR0913 -- one parameter for each option of the command line
        ranks: Annotated[
            int | None, typer.Option(metavar="N", help="Ranks on this host. Default: one for each GPU, at least 2.")
        ] = None,
        backend: Annotated[Backend, typer.Option(help="Communication library: NCCL on GPUs, Gloo on CPUs.")] = "auto",
        min_size: Annotated[str, typer.Option(metavar="SIZE", help="Smallest vector size.")] = "1KB",
        max_size: Annotated[
            str | None,
            typer.Option(metavar="SIZE", help="Largest vector size. Default: 1GB, or less if memory is short."),
        ] = None,
        step: Annotated[int, typer.Option(metavar="N", help="Factor from each size to the next.")] = 16,
        collective: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME", help="Collective to measure, such as all-reduce; repeatable. Default: all."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot busbw over size to a PNG file.")] = None,
    ) -> None:
        """Measure collectives between ranks on this host.

        Starts its own ranks; a running pool is not stopped, but should be idle. Exit status: 1 if the ranks are not
        healthy.
        """
        from fedplat.pytorch.distributed.bench import records
        from fedplat_server.cli.bench import launcher

        num_ranks = _choose_ranks(ranks, backend)
        plan = _make_plan(num_ranks, backend, (min_size, max_size, step), collective or [])
        _check_plot(plot)
        with _show_progress() as note:
            report = launcher.measure(num_ranks, backend, plan, note, program or launcher.LIBRARY_PROGRAM)
        problems = records.find_problems(report)
        if plot is not None:
            from fedplat_server.cli.bench import tables

            tables.save_plot(report, plot)
        _show(report, problems, as_json)
        if problems:
            raise typer.Exit(1)

    return bench


def _choose_ranks(ranks: int | None, backend: Backend) -> int:
    import torch

    gpus = torch.cuda.device_count()
    if ranks is None:
        ranks = max(2, gpus if backend != "gloo" else 0)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: expected 2 or more")
    if backend == "nccl" and gpus < ranks:
        raise ConfigError(f"--backend nccl: expected a GPU for each of {ranks} ranks, found {gpus}; use gloo")
    return ranks


def _make_plan(ranks: int, backend: Backend, span: tuple[str, str | None, int], collectives: list[str]) -> BenchPlan:
    from fedplat.pytorch.distributed.bench.records import FACTORS, BenchPlan

    smallest, step = sizes.parse(span[0], "--min-size"), span[2]
    fits = sizes.largest_that_fits(ranks, _available_memory(ranks, backend))
    largest = sizes.parse(span[1], "--max-size") if span[1] is not None else max(smallest, _default_max(fits))
    if smallest < 4 * ranks:
        raise ConfigError(
            f"--min-size {span[0]}: expected {4 * ranks} bytes or more, a number for each of {ranks} ranks"
        )
    if largest < smallest:
        raise ConfigError(f"--max-size {span[1]}: expected no less than --min-size {span[0]}")
    if largest > fits:
        raise ConfigError(
            f"--max-size {span[1] or span[0]}: there is not enough memory for {ranks} ranks; "
            f"expected {sizes.format_size(fits)} or less"
        )
    if step < 2:
        raise ConfigError(f"--step {step}: expected 2 or more")
    for name in collectives:
        if name not in FACTORS:
            raise ConfigError(f"--collective {name}: expected one of {', '.join(FACTORS)}")
    wanted = [name for name in FACTORS if not collectives or name in collectives]
    return BenchPlan(sizes=sizes.list_powers(smallest, largest, step), collectives=wanted)


def _check_plot(plot: Path | None) -> None:
    # Before the measurement, which takes minutes.
    if plot is None:
        return
    if not plot.resolve().parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.resolve().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib; install it with: {install_command('plots')}")


def _default_max(fits: int) -> int:
    largest = _MAX_BYTES
    while largest > fits and largest > _MIN_BYTES:
        largest //= 2
    return largest


def _available_memory(ranks: int, backend: Backend) -> int:
    import torch

    if backend != "gloo" and torch.cuda.device_count() >= ranks:
        return ranks * min(torch.cuda.mem_get_info(number)[0] for number in range(ranks))
    return sizes.available_memory()


@contextlib.contextmanager
def _show_progress() -> Generator[Callable[[BenchStep], None]]:
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        yield lambda step: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting the ranks", total=None)
        yield lambda step: bar.update(task, completed=step.done, total=step.total, description=step.doing)


def _show(report: BenchReport, problems: list[str], as_json: bool) -> None:
    if as_json:
        verdict = {"is_healthy": not problems, "findings": problems}
        sys.stdout.write(msgspec.json.encode(msgspec.to_builtins(report) | verdict).decode() + "\n")
        return
    from fedplat_server.cli.bench import tables

    console = Console(width=200, markup=False, highlight=False, emoji=False)
    console.print(tables.make_table(report))
    for line in ["", *tables.summarize(report), ""]:
        console.print(line)
    for line in problems:
        console.print(f"- {line}")
    console.print("the pool is healthy" if not problems else "the pool is not healthy")
