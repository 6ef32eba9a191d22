"""Runs over several seeds: means, confidence intervals, data frames, plots and HTML."""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
from html.parser import HTMLParser
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from scipy import stats

from fedplat.errors import MissingExtraError
from fedplat.metrics import find_range
from fedplat.simulation import Comparison, Run, compare, simulate
from fedplat.simulation.recording.result import Result
from fedplat.simulation.report import notebook, plots
from fedplat.simulation.report.comparison import compare_results
from fedplat.simulation.report.notebook import list_rounds
from fedplat.simulation.report.summary import mean_interval, summarize
from support.simulation.runs import attempt, result, write_digits

VALUES = {
    "one": [[0.1, 0.5, 0.8], [0.2, 0.4, 0.9], [0.1, 0.6, 0.7]],
    "other": [[0.3, 0.6, 0.5], [0.2, 0.7, 0.6], [0.2, 0.5, 0.4]],
}


def make(values: list[float], seed: int, job: str = "made") -> Result:
    attempts = [attempt(number, {"accuracy": value}) for number, value in enumerate(values, 1)]
    return dataclasses.replace(result(*attempts), seed=seed, job=job)


@pytest.fixture
def compared() -> Comparison:
    runs = {name: [make(values, seed) for seed, values in enumerate(rows)] for name, rows in VALUES.items()}
    return compare_results(runs, "accuracy", target=0.65)


def test_means_and_intervals_are_those_of_scipy(compared: Comparison) -> None:
    for name, rows in VALUES.items():
        values = np.array(rows)
        low, high = stats.t.interval(0.95, 2, loc=values.mean(axis=0), scale=stats.sem(values))
        curve = compared[name].curve
        np.testing.assert_allclose(curve.mean, values.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(curve.low, np.maximum(low, 0.0), rtol=1e-9)
        np.testing.assert_allclose(curve.high, np.minimum(high, 1.0), rtol=1e-9)
        assert high.max() > 1.0 or name == "other"
        assert curve.rounds.tolist() == [1.0, 2.0, 3.0]
        assert curve.at_s.tolist() == [10.0, 20.0, 30.0]
        assert compared[name].last.mean == pytest.approx(values[:, -1].mean())
        assert compared[name].best.mean == pytest.approx(values.max(axis=1).mean())


@pytest.mark.parametrize(
    ("metric", "values", "bounds"),
    [
        ("accuracy", [0.5], (0.0, 1.0)),
        ("top_3", [0.5], (0.0, 1.0)),
        ("val/f1", [0.5], (0.0, 1.0)),
        ("loss", [2.0, math.nan], (0.0, math.inf)),
        ("loss", [2.0, -0.1], (-math.inf, math.inf)),  # a density may be above 1
        ("reward", [0.5], (-math.inf, math.inf)),
    ],
)
def test_no_interval_has_values_that_a_metric_cannot_have(
    metric: str, values: list[float], bounds: tuple[float, float]
) -> None:
    assert find_range(metric, values) == bounds
    interval = mean_interval([0.01, 0.99], bounds=bounds)
    half_width = stats.t.ppf(0.975, 1) * 0.49  # the standard error of two values is half their distance
    assert interval.low == pytest.approx(max(0.5 - half_width, bounds[0]))
    assert interval.high == pytest.approx(min(0.5 + half_width, bounds[1]))


def test_rounds_to_the_target_are_means_over_the_runs_that_reached_it(compared: Comparison) -> None:
    """Of "one", the target 0.65 is between the rounds 2 and 3: at a half, at a half and at a half of the way."""
    one, other = compared["one"], compared["other"]
    assert one.num_reached == 3
    assert one.rounds_to_target is not None
    assert one.rounds_to_target.mean == pytest.approx(np.mean([2.5, 2.5, 2.5]))
    assert one.seconds_to_target is not None
    assert one.seconds_to_target.mean == pytest.approx(25.0)
    assert other.num_reached == 1
    assert other.rounds_to_target is not None
    assert other.rounds_to_target.half_width is None
    table = str(compared).splitlines()
    assert (
        table[0] == "configuration  seeds  last accuracy        best accuracy        rounds to 0.65      virtual time"
    )
    assert table[1] == "one            3      0.80 (0.55 to 1.00)  0.80 (0.55 to 1.00)  2.5 ± 0             25.0 s"
    assert "1.9 (1 of 3 seeds)" in table[2]
    never = compare_results({"one": [make([0.1], 0)]}, "accuracy", target=0.9)
    assert "not reached" in str(never)


def test_rounds_that_all_seeds_evaluated() -> None:
    short = dataclasses.replace(result(attempt(2, {"accuracy": 0.4})), seed=1)
    found = compare_results({"a": [make([0.1, 0.2, 0.3], 0), short]}, "accuracy")
    assert found["a"].curve.rounds.tolist() == [2.0]
    assert found["a"].curve.mean.tolist() == pytest.approx([0.3])


def test_numbers_for_json_and_data_frames(compared: Comparison) -> None:
    numbers = json.loads(json.dumps(compared.to_dict(), allow_nan=False))
    assert [each["name"] for each in numbers["configurations"]] == ["one", "other"]
    assert numbers["configurations"][0]["curve"]["rounds"] == [1.0, 2.0, 3.0]
    assert numbers["configurations"][0]["last"]["count"] == 3
    frame = compared.to_pandas()
    assert list(frame.columns) == ["configuration", "round", "at_s", "mean", "low", "high"]
    assert frame["configuration"].tolist() == ["one"] * 3 + ["other"] * 3
    assert frame["round"].tolist() == [1, 2, 3] * 2
    single = compare_results({"a": [make([0.1], 0)]}, "accuracy")
    assert single.to_dict()["configurations"][0]["curve"]["low"] == [None]
    assert math.isnan(single["a"].curve.low[0])


def test_mistakes_are_named() -> None:
    run, untyped = make([0.1], 3), cast(Any, compare)
    with pytest.raises(ValueError, match=r"runs is a list; expected runs by name, such as \{'FedAvg'"):
        untyped([run])
    with pytest.raises(ValueError, match="there are no configurations to compare"):
        compare({})
    with pytest.raises(ValueError, match="FedAvg: it has no runs; expected one for each seed"):
        compare_results({"FedAvg": []}, "accuracy")
    with pytest.raises(ValueError, match="FedAvg: the seed 3 occurs twice; expected independent runs"):
        compare_results({"FedAvg": [run, run]}, "accuracy")
    with pytest.raises(ValueError, match="FedAvg: the run with seed 3 has no loss on held-out data"):
        compare_results({"FedAvg": [run]}, "loss")
    with pytest.raises(KeyError, match="'x': expected one of FedAvg"):
        compare_results({"FedAvg": [run]}, "accuracy")["x"]


class Page(HTMLParser):
    """The names of elements, and the text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.sources += [value or "" for key, value in attrs if key == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data


EVIL = "<script>alert('x')</script>\x1b[2J $\\frac"


def test_html_is_escaped_and_has_no_script() -> None:
    run = make([0.1, 0.2], 0)
    found = Page(notebook.format_run(dataclasses.replace(run, reason=EVIL), summarize(run)))
    assert set(found.names) == {"div", "table", "tr", "td", "img"}
    assert found.sources[0].startswith("data:image/png;base64,")
    assert "<script>alert('x')</script>\ufffd[2J" in found.text
    compared = compare_results({EVIL: [run], "_hidden": [run], "": [run]}, "accuracy")
    assert "script" not in Page(compared._repr_html_()).names  # pyright: ignore[reportPrivateUsage]


def test_without_matplotlib_the_page_has_only_the_table(monkeypatch: pytest.MonkeyPatch, compared: Comparison) -> None:
    def missing() -> Any:
        raise MissingExtraError("plots need matplotlib")

    monkeypatch.setattr(plots, "new_figure", missing)
    assert "img" not in Page(compared._repr_html_()).names  # pyright: ignore[reportPrivateUsage]


def test_without_pandas_the_package_is_named(monkeypatch: pytest.MonkeyPatch, compared: Comparison) -> None:
    real = builtins.__import__

    def find(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", find)
    with pytest.raises(MissingExtraError, match=r"data frames need pandas; .* pip install .*'pandas>="):
        compared.to_pandas()


@pytest.mark.parametrize(("num_seeds", "num_bands", "num_lines"), [(1, 0, 2), (3, 0, 2 + 6), (5, 2, 2)])
def test_a_plot_of_means_shows_few_seeds_as_lines_and_more_as_bands(
    num_seeds: int, num_bands: int, num_lines: int
) -> None:
    rows = {name: [make([0.1, 0.5, 0.6 + seed / 100], seed) for seed in range(num_seeds)] for name in VALUES}
    figure = compare_results(rows, "accuracy").plot()
    (axes,) = figure.axes  # rounds take equally long, so that a plot over time would be the same picture
    assert (len(axes.collections), len(axes.lines)) == (num_bands, num_lines)
    labeled = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert [line.get_label() for line in labeled] == ["one", "other"]
    assert len({line.get_linestyle() for line in labeled}) == 2  # equal curves are both visible
    assert figure.get_suptitle().startswith("accuracy: ")
    shown: Any = figure
    assert shown._repr_png_().startswith(b"\x89PNG")


def test_a_plot_over_time_is_drawn_if_it_shows_something_else() -> None:
    slow = make([0.1, 0.5, 0.8], 0)
    late = tuple(msgspec.structs.replace(each, ended_at=2 * each.ended_at) for each in slow.attempts)
    slow = dataclasses.replace(slow, attempts=late)
    figure = compare_results({"fast": [make([0.1, 0.5, 0.8], 0)], "slow": [slow]}, "accuracy").plot()
    assert [axes.get_xlabel() for axes in figure.axes] == ["round", "mean virtual seconds"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    more = '[evaluation]\nevery = 2\n[evaluation.clients]\nevaluator = "digits"\ngoal = 3\n'
    path = write_digits(tmp_path_factory.mktemp("run"))
    path.write_text(path.read_text().replace("[simulation]", f"{more}[simulation]\nheld_out = 0.2"))
    return simulate(path)


def test_a_data_frame_has_one_row_for_each_committed_round(run: Run) -> None:
    frame = run.to_pandas()
    assert frame["round"].tolist() == [1, 2, 3, 4]
    assert frame["at_s"].tolist() == [record.ended_at for record in run.result.rounds]
    assert sum(frame["duration_s"].tolist()) == pytest.approx(frame["at_s"].tolist()[-1])
    assert frame["accuracy"].dropna().tolist() == run.series("accuracy").values.tolist()
    assert frame["merged"].tolist() == [record.num_updates for record in run.result.rounds]
    assert frame["federated/accuracy"].notna().tolist() == [False, True, False, True]
    assert {"clients/loss", "updates", "bytes_up", "bytes_down", "late", "abandoned"} <= set(frame.columns)
    abandoned = dataclasses.replace(run.result, attempts=(attempt(1, {}, phase="ABANDONED"), attempt(1, {})))
    assert [row["abandoned"] for row in list_rounds(abandoned)] == [1]


def test_figures_of_a_run(run: Run) -> None:
    assert run.plot().get_suptitle().startswith("digits: best accuracy")
    assert len(run.plot("data").axes) == 3
    with pytest.raises(ValueError, match="'staleness': the run has no such plot; expected one of accuracy, time"):
        run.plot("staleness")
    assert repr(run).startswith("<Run of digits, seed 0: COMPLETED, 4 rounds, accuracy 0.")
    assert "on clients" in Page(run._repr_html_()).text  # pyright: ignore[reportPrivateUsage]
    compared = compare({"digits": run})
    assert (compared.metric, compared.target) == ("accuracy", 0.05)
    assert run.summary.last is not None
    assert compared["digits"].last.mean == run.summary.last.value
