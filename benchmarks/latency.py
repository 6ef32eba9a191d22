"""Measure the download of a model and the upload of an update over lines with latency and loss.

    sudo python benchmarks/latency.py [--line "200 50 0 cubic"] [--model-bytes 100000000] [--repeat 1] [--only up]

A line is its rate in Mbit/s, its round trip in ms, its loss in percent, and TCP's congestion control. `link.py` makes
it between two network namespaces, which needs root, /dev/net/tun and the commands ip, nsenter and unshare, and changes
nothing outside of them. Over each line, one client of fedplat, one of raw gRPC streams and one of a TCP connection
move the same bytes in turns, as in `transfer.py`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console

import link
import report
import transfer

CHUNK_BYTES = 2**20
_INSIDE = "FEDPLAT_BENCH_NETWORK"
"""Set in the environment of the process that has a network namespace of its own."""
_console = Console(stderr=True, soft_wrap=True)


class Line(NamedTuple):
    """A line, see `link.py`."""

    mbit_per_s: float
    rtt_ms: float
    loss_percent: float
    congestion: str

    @classmethod
    def from_text(cls, text: str) -> Line:
        """Parse a line. Raises `BadParameter`."""
        try:
            rate, rtt, loss, congestion = text.split()
            return cls(float(rate), float(rtt), float(loss), congestion)
        except ValueError as exc:
            wanted = (
                "Mbit/s, the round trip in ms, the loss in percent and the congestion control, as in '200 50 1 bbr'"
            )
            raise typer.BadParameter(f"{text!r} is no line; expected {wanted}", param_hint="--line") from exc

    def __str__(self) -> str:
        return f"{self.mbit_per_s:g} Mbit/s, {self.rtt_ms:g} ms, {self.loss_percent:g} %, {self.congestion}"


LINES = (Line(200, 50, 0, "cubic"), Line(200, 50, 1, "cubic"), Line(200, 50, 1, "bbr"))


def main(  # noqa: PLR0913 -- one parameter for each option of the command line
    line: Annotated[list[str] | None, typer.Option(help="Rate, round trip, loss, congestion; repeatable.")] = None,
    model_bytes: Annotated[int, typer.Option(min=4, help="Size of the model, float32.")] = 100_000_000,
    lossy_bytes: Annotated[
        int, typer.Option(min=4, help="The same for lines with loss and another congestion control than bbr.")
    ] = 10_000_000,
    repeat: Annotated[int, typer.Option(min=1, help="Number of measurements; the median is shown.")] = 1,
    only: Annotated[Literal["down", "up"] | None, typer.Option(help="Measure one direction.")] = None,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure downloads and uploads of one client over lines with latency and loss."""
    lines = [Line.from_text(each) for each in line] if line else LINES
    _enter_network()
    rows: list[tuple[report.Cell, ...]] = []
    for each in lines:
        is_slow = each.loss_percent > 0 and each.congestion != "bbr"
        rows += measure(each, lossy_bytes if is_slow else model_bytes, repeat, (only,) if only else ("down", "up"))
    answer = report.Report(
        name="latency",
        title="Models down to a client and updates up, over lines with latency and loss",
        columns=("line", "MB", "what", "by", "seconds", "Mbit/s", "of the line, %"),
        rows=tuple(rows),
        notes=("A line is its rate, round trip, loss and TCP's congestion control. fedplat and raw gRPC use TLS.",),
    )
    report.finish(answer, as_json, save)


def _enter_network() -> None:
    """Go on in a network namespace of its own. Exits if that is not allowed."""
    if os.environ.get(_INSIDE) != "1":
        if os.geteuid() != 0:
            raise SystemExit("a line with latency needs network namespaces; run this program as root")
        command = ["unshare", "--net", sys.executable, *sys.argv]
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


@contextlib.contextmanager
def connected(line: Line) -> Generator[transfer.Network]:
    """Run a line to another network namespace."""
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[str]:
            process = stack.enter_context(subprocess.Popen(command, stdout=pipe, text=True))
            stack.callback(process.terminate)
            return process

        far = start("unshare", "--net", "sh", "-c", "echo ready; exec sleep inf")
        _wait_for(far)
        arguments = map(str, (os.getpid(), far.pid, line.congestion, *line[:3], 1))
        _wait_for(start(sys.executable, link.__file__, *arguments))
        yield transfer.Network(link.NEAR, ("nsenter", "--net", "--target", str(far.pid)))


def _wait_for(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit("the line could not be made; see above")


def measure(line: Line, size: int, repeat: int, directions: Sequence[str]) -> list[tuple[report.Cell, ...]]:
    """Return a row for each direction and side."""
    rows: list[tuple[report.Cell, ...]] = []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(connected(line))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = stack.enter_context(transfer.sides(folder, True, 1, size, CHUNK_BYTES, network))
        for direction in directions:
            runs = [[side.move(direction, 1)[0] for side in sides] for _ in range(repeat)]
            for name, *times in zip([side.name for side in sides], *runs, strict=True):
                seconds = statistics.median(times)
                reached = size * 8 / 1e6 / seconds
                rows.append(
                    (str(line), size / 1e6, direction, name, seconds, reached, 100.0 * reached / line.mbit_per_s)
                )
                _console.print(f"{line}: {name} {direction}: {seconds:.2f} s, {reached:.4g} Mbit/s", markup=False)
    return rows


if __name__ == "__main__":
    typer.run(main)
