"""A run in a notebook: its rounds as rows or as a data frame (extra "notebook"), and itself as HTML."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedplat import texts
from fedplat.errors import MissingExtraError
from fedplat.extras import install_command
from fedplat.simulation.recording.result import AttemptResult, Result
from fedplat.simulation.report import plots
from fedplat.simulation.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def format_table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return an HTML table of texts, aligned to the left."""
    lines = [_format_row(header, "th")] if header else []
    lines += [_format_row(row, "td") for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _format_row(cells: Sequence[str], tag: str) -> str:
    shown = (f'<{tag} style="text-align: left">{html.escape(texts.shorten(cell))}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def format_picture(draw: Callable[[Figure], object], description: str) -> str:
    """Return a plot as an image that is part of the page; "" without matplotlib."""
    try:
        figure = plots.new_figure()
    except MissingExtraError:
        return ""
    draw(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=90)
    encoded = base64.b64encode(content.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{encoded}">'


def format_run(result: Result, summary: Summary) -> str:
    """Return a run: its most important numbers, and its metric over rounds."""
    totals = result.totals
    rows = [
        ("job", f"{result.job}, seed {result.seed}"),
        ("status", result.status + (f" ({result.reason})" if result.reason else "")),
        ("virtual time", f"{texts.duration(totals.duration_s)} for {texts.format_count(totals.rounds, 'round')}"),
        ("clients", f"{totals.distinct_clients:,} of {result.num_clients:,} took part"),
        ("traffic", f"{totals.bytes_down / 1e6:,.3g} MB down, {totals.bytes_up / 1e6:,.3g} MB up"),
    ]
    if summary.best is not None and summary.last is not None:
        best, last = summary.best, summary.last
        rows.append((summary.metric, f"{last.value:.4g} at the end, best {best.value:.4g} in round {best.round}"))
    if summary.federated is not None:
        rows.append(
            (f"{summary.metric} on clients", f"{summary.federated.value:.4g} in round {summary.federated.round}")
        )
    if summary.target:
        rows.append((f"{summary.metric} {summary.target:g}", _format_target(summary)))
    picture = ""
    if plots.has_metric(result, summary):
        picture = format_picture(
            lambda figure: plots.draw_accuracy(figure, result, summary), f"{summary.metric} by round"
        )
    return f"<div>{format_table(rows)}{picture}</div>"


def _format_target(summary: Summary) -> str:
    if summary.rounds_to_target is None or summary.seconds_to_target is None:
        return "not reached"
    return f"after {summary.rounds_to_target:.1f} rounds, {texts.duration(summary.seconds_to_target)}"


_COUNTS = ("MERGED", "LATE", "FAILED", "REJECTED", "SURPLUS", "DROPPED")


def list_rounds(result: Result) -> list[dict[str, Any]]:
    """Return one row for each committed round, in their order; a metric that a round does not have is missing.

    `at_s` and `duration_s` are virtual seconds: the end of the round, and the time since the previous one. `accuracy`
    and other plain names are scores on the central test data, `clients/NAME` the metrics that clients reported in
    training, and `federated/NAME` those of the federated evaluation of the round.
    """
    federated = {each.round: each.metrics for each in result.attempts if each.kind == "EVALUATE" and each.committed}
    abandoned: dict[int, int] = {}
    for each in result.attempts:
        if each.kind == "TRAIN" and not each.committed:
            abandoned[each.round] = abandoned.get(each.round, 0) + 1
    rows: list[dict[str, Any]] = []
    before = 0.0
    for record in result.rounds:
        row = _numbers(record) | {"duration_s": record.ended_at - before, "abandoned": abandoned.get(record.round, 0)}
        row |= dict(record.evaluation)
        row |= {f"clients/{name}": value for name, value in record.metrics.items()}
        row |= {f"federated/{name}": value for name, value in federated.get(record.round, {}).items()}
        rows.append(row)
        before = record.ended_at
    return rows


def _numbers(record: AttemptResult) -> dict[str, Any]:
    return {
        "round": record.round,
        "at_s": record.ended_at,
        "duration_s": 0.0,
        "version": record.version,
        "updates": record.num_updates,
        "weight": record.total_weight,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        **{name.lower(): record.counts.get(name, 0) for name in _COUNTS},
    }


def to_frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return rows as a data frame. Raises `MissingExtraError` without pandas."""
    try:
        import pandas
    except ModuleNotFoundError as exc:
        raise MissingExtraError(f"data frames need pandas; install it with: {install_command('notebook')}") from exc
    return pandas.DataFrame.from_records([dict(row) for row in rows])
