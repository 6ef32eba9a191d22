"""The progress bar of a simulation in Python: on a terminal, in a notebook, or not at all."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedplat.simulation.report.progress import ProgressEstimate, ShowProgress, show_bar
from support.simulation.runs import attempt

NAME = "<b>digits</b> [red]x\x1b[2J"


def play(show: ShowProgress, *moments: float) -> None:
    """Show three rounds of four; `moments` are those of the bar's clock."""
    clock = iter(moments)
    estimate = ProgressEstimate(NAME, 4, "accuracy", lambda: 0.0)
    with show_bar(estimate, show, lambda: next(clock)) as add:
        for number in (1, 2, 3):
            add(attempt(number, {"accuracy": number / 10}, counts={"MERGED": 2}))


def test_nothing_is_shown_unless_it_is_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    play("auto")
    play(False)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    play(True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/4 rounds  virtual 30.0 s  best accuracy 0.3  6 merged" in err
    assert "<b>digits</b> [red]x" in err
    assert "\x1b[2J" not in err


def test_without_rich_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    play(True)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_one_bar_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    def display(content: dict[str, str], **options: Any) -> Any:
        assert options == {"raw": True, "display_id": True}
        shown.append(content)
        return SimpleNamespace(update=lambda content, raw: shown.append(content))  # pyright: ignore[reportUnknownLambdaType]

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    monkeypatch.setattr(ipython, "get_ipython", lambda: SimpleNamespace(kernel=1), raising=False)
    monkeypatch.setattr(module, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    play("auto", 0.0, 0.1, 0.3, 0.3, 0.4)
    assert [content["text/html"].partition(" max")[0] for content in shown] == [
        '<progress value="0"',
        '<progress value="2"',  # a quarter of a second after the first
        '<progress value="3"',
    ]
    assert "&lt;b&gt;digits&lt;/b&gt;" in shown[-1]["text/html"]
    assert "<b>" not in shown[-1]["text/html"]
    shown.clear()
    play(False)
    assert shown == []
