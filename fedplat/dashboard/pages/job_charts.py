"""The charts of a job: convergence, participation, bytes, durations and staleness of its committed rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedplat.dashboard import formats
from fedplat.dashboard.charts import Chart, ChartSeries, Unit, finite
from fedplat.dashboard.pages import round_metrics
from fedplat.wire.v1 import admin_pb2

MAX_METRICS = 3
"""Charts of convergence: one for each metric, the most useful first."""
OUTCOMES = ("merged", "late", "failed", "rejected", "surplus", "dropped")
Rounds = Sequence[admin_pb2.Round]


def make_charts(rounds: Rounds, axis: str, *, is_virtual: bool) -> list[Chart]:
    """Return the charts over the rounds, or over time. With `is_virtual`, moments are seconds since the start."""
    if not rounds:
        return []
    x: list[float]
    unit: Unit
    if axis == "time":
        x, unit = [each.opened_unix_s + each.seconds for each in rounds], "seconds" if is_virtual else "time"
    else:
        x, unit = [float(each.round) for each in rounds], "round"
    charts = [_convergence(name, rounds, x, unit) for name in round_metrics.metric_names(rounds)[:MAX_METRICS]]
    charts.append(_participation(rounds, x, unit))
    charts.append(_single("duration", "Duration of rounds", rounds, (x, unit), ("seconds", lambda each: each.seconds)))
    if any(each.update_bytes for each in rounds):
        up: tuple[Unit, Callable[[admin_pb2.Round], float]] = ("bytes", lambda each: float(each.update_bytes))
        charts.append(_single("bytes", "Bytes received in updates", rounds, (x, unit), up))
    if any(each.max_staleness for each in rounds):
        charts.append(_staleness(rounds, x, unit))
    return charts


def describe_result(rounds: Rounds) -> list[tuple[str, str]]:
    """Return the last and the best value of each shown metric, as names and texts."""
    result: list[tuple[str, str]] = []
    for name in round_metrics.metric_names(rounds)[:MAX_METRICS]:
        values = _values(rounds, name)
        if values:
            last = max(values)
            at, value = round_metrics.best(values, name)
            text = f"{formats.number(values[last])} in round {last}; best {formats.number(value)} in round {at}"
            result.append((formats.printable(name), text))
    return result


def outcome_counts(each: admin_pb2.Round) -> dict[str, int]:
    """Return the assigned clients of an attempt by outcome; those that have no outcome yet are "open"."""
    counts = {
        "merged": each.merged or each.reported,
        "late": each.late,
        "failed": each.failed,
        "rejected": each.rejected,
        "surplus": each.surplus,
        "dropped": each.dropped,
    }
    return {**counts, "open": max(0, each.assigned - sum(counts.values()))}


def _values(rounds: Rounds, name: str) -> dict[int, float]:
    found = {each.round: round_metrics.metric_values(each).get(name) for each in rounds}
    return {round_: value for round_, value in found.items() if value is not None and finite(value) is not None}


def _convergence(name: str, rounds: Rounds, x: list[float], unit: Unit) -> Chart:
    server = [finite(each.server_metrics[name]) if name in each.server_metrics else None for each in rounds]
    clients = [finite(each.client_metrics[name]) if name in each.client_metrics else None for each in rounds]
    series = [ChartSeries("server's evaluator", server), ChartSeries("mean of the clients", clients)]
    values = _values(rounds, name)
    shown = formats.printable(name)
    sentence = f"{shown} has no finite value yet."
    if values:
        last = max(values)
        at, value = round_metrics.best(values, name)
        sentence = (
            f"{shown} is {formats.number(values[last])} after round {last}; "
            f"the best is {formats.number(value)}, in round {at}."
        )
    present = [each for each in series if any(item is not None for item in each.values)]
    return Chart(f"metric-{name}", f"Convergence: {shown}", sentence, x, present or series, unit)


def _participation(rounds: Rounds, x: list[float], unit: Unit) -> Chart:
    counts = [outcome_counts(each) for each in rounds]
    totals = {name: sum(each[name] for each in counts) for name in OUTCOMES}
    assigned = sum(totals.values())
    lost = {name: total for name, total in totals.items() if name != "merged" and total}
    parts = ", ".join(f"{formats.percent(total, assigned)} {name}" for name, total in lost.items())
    sentence = f"{formats.percent(totals['merged'], assigned)} of {formats.count(assigned)} assignments were merged"
    series = [
        ChartSeries(name, [float(each[name]) for each in counts])
        for name in OUTCOMES
        if name == "merged" or name in lost
    ]
    return Chart(
        "participation",
        "Participation by outcome",
        f"{sentence}; {parts}." if parts else f"{sentence}.",
        x,
        series,
        unit,
        "count",
        is_stack=True,
    )


def _single(
    key: str,
    title: str,
    rounds: Rounds,
    horizontal: tuple[list[float], Unit],
    vertical: tuple[Unit, Callable[[admin_pb2.Round], float]],
) -> Chart:
    x, x_unit = horizontal
    unit, value_of = vertical
    values = [value_of(each) for each in rounds]
    show = formats.size if unit == "bytes" else formats.duration
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    sentence = f"The median is {show(middle)}, the last one {show(values[-1])}, the largest {show(ordered[-1])}."
    return Chart(key, title, sentence, x, [ChartSeries(title.lower(), values)], x_unit, unit)


def _staleness(rounds: Rounds, x: list[float], unit: Unit) -> Chart:
    largest = max(each.max_staleness for each in rounds)
    last = rounds[-1].mean_staleness
    return Chart(
        "staleness",
        "Staleness of updates",
        f"Merged updates were {formats.number(last)} versions behind on average in the last round, {largest} at most.",
        x,
        [
            ChartSeries("mean", [each.mean_staleness for each in rounds]),
            ChartSeries("maximum", [float(each.max_staleness) for each in rounds]),
        ],
        unit,
        "count",
    )
