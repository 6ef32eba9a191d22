"""Runs as HTML fragments for notebooks: a table and a picture, without scripts; all text is escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fedplat import texts
from fedplat.errors import MissingExtraError
from fedplat.simulation.recording.result import Result
from fedplat.simulation.report import plots
from fedplat.simulation.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
