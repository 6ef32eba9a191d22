"""Measure what needs a GPU in less than eight minutes, without a network.

    python benchmarks/gpu/run.py [--device cpu --small] [--only lora --only sums] [--out FOLDER] [--json] [--save]

Each part is a separate process with a time limit, so that one that fails or hangs costs only itself. Each number is a
line of JSON as soon as it is known. Nothing is downloaded: models and data are random. With `--out` the lines are added
to `FOLDER/gpu.jsonl`, and the result of all lines there is `FOLDER/gpu.json`: a copy of it in `benchmarks/results` is
what `make bench-page` shows.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, TextIO

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other programs of benchmarks/

import torch
import typer

import report
import simulation_peers
from gpu.lines import Check, End, Line, Machine, Measurement, Problem, decode, encode
from gpu.parts import PARTS

PACKAGES = ("torch", "numpy", "transformers", "peft", "opacus", "pfl")
COLUMNS = ("work", "system", "result", "unit", "GPU memory, MiB")
LAST_LINES = 3


class Device(enum.StrEnum):
    """Where the parts compute."""

    CPU = "cpu"
    CUDA = "cuda"


def main(
    device: Annotated[
        Device, typer.Option(help="Where to compute; a CPU only shows that the parts start.")
    ] = Device.CUDA,
    small: Annotated[bool, typer.Option("--small", help="Tiny models and few steps.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"A part: {', '.join(PARTS)}; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the lines and of their result.")] = None,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure on a GPU."""
    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise typer.BadParameter(f"no part is called {', '.join(unknown)}; expected some of: {', '.join(PARTS)}")
    if device is Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU that PyTorch can use was found; try `--device cpu --small`")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    lines = list[Line]()
    with open(os.devnull if out is None else out / "gpu.jsonl", "a+") as file:
        file.seek(0)
        lines += map(decode, file)
        earlier = len(lines)
        for line in _run(only or list(PARTS), device, small):
            lines.append(line)
            for stream in (sys.stdout, file):
                print(encode(line), file=stream, flush=True)
    made = make_report(lines)
    if out is not None:
        report.write(made, out)
    report.finish(made, as_json, save)
    if any(has_failed(line) for line in lines[earlier:]):
        raise typer.Exit(1)


def _run(names: Iterable[str], device: Device, small: bool) -> Iterator[Line]:
    yield describe_machine(device)
    for name in names:
        yield from run_part(name, [device.value, "small" if small else "full"])


def describe_machine(device: Device) -> Machine:
    """Return the GPU and the versions of what matters to its speed."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if device is Device.CUDA else "no GPU"
    return Machine(gpu=gpu, cores=os.cpu_count() or 1, python=sys.version.split()[0], versions=versions)


def run_part(name: str, arguments: list[str], limit_s: float | None = None) -> Iterator[Line]:
    """Run a part in its own process, and yield its lines as they come."""
    limit_s = PARTS[name].limit_s if limit_s is None else limit_s
    command = [sys.executable, str(Path(__file__).with_name("parts.py")), name, *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    begin_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        ) as process:
            timer = threading.Timer(limit_s, _kill, (process,))
            timer.start()
            try:
                assert process.stdout is not None
                yield from (decode(text) for text in process.stdout if text.startswith("{"))
                status = process.wait()
            finally:
                timer.cancel()
                _kill(process)
        seconds = time.monotonic() - begin_s
        if seconds >= limit_s:
            yield Problem(part=name, text=f"stopped after its limit of {limit_s:g} s", is_failure=True)
        elif status:
            yield Problem(part=name, text=_last_lines(errors), is_failure=True)
    yield End(part=name, seconds=round(seconds, 1))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a part and what it has started, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _last_lines(file: TextIO) -> str:
    file.seek(0)
    return " | ".join(file.read().splitlines()[-LAST_LINES:]) or "ended without a message"


def has_failed(line: Line) -> bool:
    """Return whether a line reports a failure."""
    return (isinstance(line, Check) and not line.passed) or (isinstance(line, Problem) and line.is_failure)


def make_report(lines: Iterable[Line]) -> report.Report:
    """Return the result of the last run of each part."""
    machine, ended = "", set[str]()
    latest: dict[str, list[Line]] = {}
    for line in lines:
        if isinstance(line, Machine):
            machine = line.describe()
            continue
        if line.part in ended:
            ended.discard(line.part)
            del latest[line.part]
        latest.setdefault(line.part, []).append(line)
        if isinstance(line, End):
            ended.add(line.part)
    found = [line for name in PARTS for line in latest.get(name, ())]
    rows = [line for line in found if isinstance(line, Measurement)]
    rates = [(line.work, line.system, line.value * simulation_peers.CIFAR.cohort) for line in rows]
    return report.Report(
        name="gpu",
        title="On a GPU",
        columns=COLUMNS,
        rows=tuple(_row(line) for line in rows),
        notes=(*simulation_peers.whole(rates), *filter(None, map(_note, found))),
        command="python benchmarks/gpu/run.py",
        machine=machine,
    )


def _note(line: Line) -> str:
    if isinstance(line, Check):
        return f"{line.statement[0].upper()}{line.statement[1:]}: {line.found}."
    return f"Not measured, {line.part}: {line.text}." if isinstance(line, Problem) else ""


def _row(found: Measurement) -> tuple[report.Cell, ...]:
    memory = "" if found.peak_bytes is None else found.peak_bytes >> 20
    return found.work, found.system, found.value, found.unit, memory


if __name__ == "__main__":
    typer.run(main)
