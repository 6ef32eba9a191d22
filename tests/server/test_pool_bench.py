"""`fedplat-server pool bench`: the command with real ranks, its mistakes, and what it shows."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fedplat.pytorch.distributed.bench.records import FACTORS, BenchReport, Link, Measurement, bandwidths
from fedplat_server.cli.bench import sizes, tables
from fedplat_server.cli.commands import app
from fedplat_server.errors import ConfigError
from support.cli.runner import CliRunner


@pytest.mark.slow
def test_a_measurement_with_ranks(tmp_path: Path) -> None:
    arguments = ["--min-size", "4KB", "--max-size", "64KB", "--collective", "all-reduce", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fedplat_server", "pool", "bench", *arguments, "--plot", str(tmp_path / "busbw.png")],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["is_healthy"] else 1)  # which a busy machine may not be
    assert done.stderr == ""
    found = {(each["collective"], each["implementation"], each["size"]) for each in report["measurements"]}
    assert found == {("all-reduce", "library", size) for size in (4096, 65536)}
    assert all(each["is_correct"] for each in report["measurements"])
    assert (tmp_path / "busbw.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 0", "--ranks 0: expected 2 or more"),
        ("--ranks 1", "--ranks 1: expected 2 or more"),
        ("--ranks 99 --backend nccl", "expected a GPU for each of 99 ranks, found"),
        ("--min-size 1MB --max-size 1KB", "--max-size 1KB: expected no less than --min-size 1MB"),
        ("--backend gloo --max-size 900000GB", "--max-size 900000GB: there is not enough memory for 2 ranks"),
        ("--ranks 3 --min-size 8", "--min-size 8: expected 12 bytes or more"),
        ("--max-size huge", "--max-size huge: expected a size such as 1KB"),
        ("--min-size -1KB", "--min-size -1KB: expected a size such as 1KB"),
        ("--step 1", "--step 1: expected 2 or more"),
        ("--collective allreduce", "--collective allreduce: expected one of broadcast, "),
        ("--plot /nowhere/busbw.png", "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: str, text: str) -> None:
    result = CliRunner().invoke(app, ["pool", "bench", *arguments.split()])
    assert isinstance(result.exception, ConfigError)  # exit status 2, see `cli.main`
    assert text in str(result.exception)
    assert "\n" not in str(result.exception)


def test_sizes_as_operators_write_them() -> None:
    written = {"1KB": 1024, "1k": 1024, "64 MB": 2**26, "1GiB": 2**30, "4096": 4096, "4096B": 4096}
    assert {text: sizes.parse(text, "--min-size") for text in written} == written
    assert sizes.list_powers(1024, 2**20, 16) == [2**10, 2**14, 2**18, 2**20]
    assert sizes.list_powers(1024, 1024, 2) == [1024]
    assert [sizes.format_size(size) for size in (12, 1020, 1024, 2**26 - 64, 2**30)] == [
        "12 B",
        "1 KB",
        "1 KB",
        "64 MB",
        "1 GB",
    ]


def test_the_memory_of_a_container_is_less_than_that_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    6000 kB\n")
    assert sizes.available_memory(tmp_path) == 6000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert sizes.available_memory(tmp_path) == 6000 * 1024
    (group / "memory.max").write_text("5000\n")
    assert sizes.available_memory(tmp_path) == 4000


def made_up() -> BenchReport:
    found = [
        Measurement(
            collective=collective,
            implementation=name,
            size=size,
            seconds=0.004,
            repetitions=3,
            algbw=bandwidths(collective, size, 0.004, 2)[0],
            busbw=bandwidths(collective, size, 0.004, 2)[1] * (4 if name == "shared memory" else 1),
            is_correct=name != "ring",
        )
        for collective in FACTORS
        for name in ("library", "ring", "shared memory")
        for size in (1024, 2**20, 2**30)
    ]
    links = [Link(0, 1, 1.5), Link(1, 0, 1.25)]
    return BenchReport(
        ranks=2,
        device="cpu",
        library="gloo",
        cores=2,
        load=1.5,
        copies=[9.0, 8.0],
        links=links,
        tcp=4.0,
        measurements=found,
    )


def test_the_table_shows_all_implementations_side_by_side() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables.make_table(made_up()))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert " ".join(lines[0]) == "collective size Gloo time algbw busbw Gloo busbw ring busbw shared memory"
    assert lines[1] == ["broadcast", "1", "KB", "4.00", "ms", "0.000", "0.000", "WRONG", "0.001"]
    assert lines[-1] == ["1", "GB", "4.00", "ms", "268.435", "268.435", "WRONG", "1073.742"]
    said = "\n".join(tables.summarize(made_up()))
    assert "links between two ranks: median 1.38, slowest 1.25 GB/s (rank 1 to 0)" in said
    assert "other programs kept the host busy" in said


def test_the_picture_has_a_panel_for_each_collective() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    tables.draw_plot(figure, made_up())
    assert [axis.get_title() for axis in figure.axes] == list(FACTORS)
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels == ["Gloo", "shared memory", "memory copy", "plain TCP"]  # nothing of what is wrong
