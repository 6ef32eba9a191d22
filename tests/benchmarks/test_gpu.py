"""The benchmark of a GPU: what needs no other package starts on a CPU, and its lines become a table."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
import typer

import gpu.run
import report
import simulation_peers
from gpu import lora, privacy, sums
from gpu.lines import Check, End, Line, Machine, Measurement, Problem, Setting, decode, encode
from gpu.parts import PARTS, lines_of
from support.cli.runner import CliRunner

SMALL = Setting(torch.device("cpu"), is_small=True)
MACHINE = Machine(gpu="a GPU", cores=3, python="3.12.1", versions={"torch": "2.11.0"})


def run(arguments: list[str]) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(gpu.run.main)
    done = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "1000"})
    return done.exit_code, done.output


def measurement(value: float, system: str = "fedplat vmap") -> Measurement:
    return Measurement(part="cohort", work=simulation_peers.CIFAR.name, system=system, value=value, unit="rounds/s")


def test_sums_in_both_memories_are_measured_and_have_the_same_bits() -> None:
    host, device, check = lines_of(sums.NAME, SMALL)
    assert isinstance(host, Measurement)
    assert isinstance(device, Measurement)
    assert (host.system, device.system) == ("in the host's memory", "in the GPU's memory")
    assert min(host.value, device.value) > 0
    assert isinstance(check, Check)
    assert check.passed


@pytest.mark.parametrize("name", [lora.NAME, privacy.NAME])
def test_a_part_without_its_packages_is_not_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    [line] = lines_of(name, SMALL)
    assert isinstance(line, Problem)
    assert "needs transformers and peft, and transformers is not installed; install both" in line.text
    assert not line.is_failure


def test_lines_can_be_read_again() -> None:
    lines: list[Line] = [MACHINE, measurement(2.0), Check(part="sums", statement="it is", passed=True, found="so")]
    lines += [Problem(part="lora", text="out of memory", is_failure=True), End(part="lora", seconds=3.5)]
    assert [decode(encode(line)) for line in lines] == lines


def test_the_result_has_the_last_run_of_each_part() -> None:
    late = Problem(part="cohort", text="stopped after its limit of 120 s", is_failure=True)
    check = Check(part="sums", statement="sums have the same bits", passed=True, found="equal bits")
    made = gpu.run.make_report(
        [
            *(MACHINE, check, End(part="sums", seconds=1.0)),
            *(measurement(7.0), measurement(1.0, "pfl-research"), late, End(part="cohort", seconds=120.0)),
            *(MACHINE, measurement(20.0), End(part="cohort", seconds=9.0)),
        ]
    )
    assert made.rows == ((simulation_peers.CIFAR.name, "fedplat vmap", 20.0, "rounds/s", ""),)
    assert made.notes == (
        "1,500 rounds of CIFAR-10's CNN would take: fedplat vmap 75 s.",
        "Sums have the same bits: equal bits.",
    )
    assert made.machine == "a GPU, 3 cores, Linux, Python 3.12.1, torch 2.11.0"


def test_a_part_that_cannot_be_measured_is_noted() -> None:
    made = gpu.run.make_report([Problem(part="lora", text="out of memory", is_failure=True)])
    assert made.notes == ("Not measured, lora: out of memory.",)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "sum"], f"no part is called sum; expected some of: {', '.join(PARTS)}"),
        ([], "no GPU that PyTorch can use was found; try `--device cpu --small`"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, output = run(arguments)
    assert status == 2
    assert sentence in output


@pytest.mark.slow
def test_a_part_that_fails_or_is_late_costs_only_itself() -> None:
    failed, _ = gpu.run.run_part(sums.NAME, ["no such device", "small"])
    assert isinstance(failed, Problem)
    assert "no such device" in failed.text
    late, end = gpu.run.run_part(sums.NAME, ["cpu", "small"], limit_s=0.0)
    assert late == Problem(part=sums.NAME, text="stopped after its limit of 0 s", is_failure=True)
    assert isinstance(end, End)


@pytest.mark.slow
def test_the_command_prints_lines_and_writes_the_result(tmp_path: Path) -> None:
    status, output = run(["--device", "cpu", "--small", "--only", sums.NAME, "--out", str(tmp_path), "--json"])
    assert status == 0
    *lines, last = output.splitlines()
    assert [type(decode(line)) for line in lines] == [Machine, Measurement, Measurement, Check, End]
    assert (tmp_path / "gpu.jsonl").read_text().splitlines() == lines
    saved = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=report.Report)
    assert msgspec.json.decode(last, type=report.Report) == saved
    assert len(saved.rows) == 2
