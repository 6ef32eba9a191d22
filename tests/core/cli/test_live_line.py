"""The progress of `fedplat simulate`: one line that is redrawn on a terminal, few lines without one."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fedplat.cli import simulate
from fedplat.cli.output import Output
from fedplat.simulation.report.progress import ProgressEstimate
from support.cli.terminal import Terminal, plain
from support.simulation.runs import attempt, write_digits

FEDPLAT = [sys.executable, "-W", "error", "-m", "fedplat.cli"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def play(clock: Clock, num_rounds: int = 10, name: str = "digits") -> ProgressEstimate:
    """Three of the rounds, in 6 s of real time."""
    board = ProgressEstimate(name, num_rounds, "accuracy", clock)
    for number in (1, 2, 3):
        clock.now_s += 2.0
        board.add(attempt(number, {"accuracy": 0.9 - number / 10}, counts={"MERGED": 40, "LATE": 2, "FAILED": 1}))
    return board


def render(board: ProgressEstimate, width: int) -> str:
    output = Output()
    output.messages = Console(file=io.StringIO(), width=width)
    output.messages.print(simulate.draw_progress(board, output))
    assert isinstance(output.messages.file, io.StringIO)
    return output.messages.file.getvalue().rstrip("\n")


@pytest.mark.parametrize(
    ("width", "numbers"),
    [
        (40, "digits  3/10  accuracy 0.6  14.0 s left"),
        (60, "digits  3/10  accuracy 0.6  20 clients/s  14.0 s left"),
        (80, "3/10  accuracy 0.6  best 0.8  20 clients/s  14.0 s left"),
        (120, "3/10  accuracy 0.6  best 0.8  20 clients/s  14.0 s left  9 lost  virtual 30.0 s"),
    ],
)
def test_the_line_has_what_fits(width: int, numbers: str):
    line = render(play(Clock()), width)
    assert "\n" not in line
    assert len(line) <= width
    assert line.rstrip().endswith(numbers)


def test_a_long_or_hostile_name_does_not_take_the_room():
    line = render(play(Clock(), name="x\x1b[2J" + "y" * 100), 80)
    assert "\x1b[2J" not in line
    assert "accuracy 0.6" in line
    assert len(line) <= 80


def test_until_a_version_is_scored_the_loss_is_shown():
    board = ProgressEstimate("digits", 4, "accuracy", lambda: 0.0)
    board.add(attempt(1, {}, metrics={"loss": 0.25}))
    assert board.score == {"loss": 0.25}
    board.add(attempt(2, {"accuracy": 0.5}, metrics={"loss": 0.2}))
    board.add(attempt(3, {}, metrics={"loss": 0.1}))
    assert board.score == {"accuracy": 0.5}


def test_without_a_terminal_a_long_run_prints_few_lines(monkeypatch: pytest.MonkeyPatch):
    """An hour of rounds of a tenth of a second: the pauses grow to a minute."""
    printed: list[str] = []
    clock, output = Clock(), Output()
    output.note = printed.append  # type: ignore[method-assign]
    monkeypatch.setattr("time.monotonic", clock)
    num_rounds = 36_000
    board = ProgressEstimate("digits", num_rounds, "accuracy", clock)
    add = simulate._lines(output, board, clock)  # pyright: ignore[reportPrivateUsage]
    for number in range(1, num_rounds + 1):
        clock.now_s += 0.1
        add(attempt(number, {}))
    assert 60 < len(printed) < 100
    assert printed[0].startswith("1/36000 rounds")
    assert printed[-1].startswith("36000/36000 rounds")


@pytest.mark.slow
def test_a_real_run_draws_one_line_on_a_terminal(tmp_path: Path):
    write_digits(tmp_path)
    folder = str(tmp_path / "run")
    command = [*FEDPLAT, "simulate", str(tmp_path / "digits.toml"), "--no-plots", "--dir", folder]
    with Terminal(command, columns=80) as terminal:
        assert terminal.finish() == 0
    drawn, result = terminal.text.split("status", 1)
    # Two lines of introduction, which may fold, and one of progress.
    assert plain(drawn).count("\n") == 3
    frames = plain(drawn).split("\n")[-2].split("\r")
    assert all(len(frame) <= 80 for frame in frames)
    assert "4/4  accuracy 0." in frames[-1]
    assert "COMPLETED" in result
