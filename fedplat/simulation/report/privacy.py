"""The plot of a privacy plan: epsilon against rounds, the noise for each cohort size, and simulated scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedplat.job import JobSpec, planning
from fedplat.job.planning import PrivacyPlan
from fedplat.simulation.report import plots
from fedplat.simulation.report.plots import BAD, MAIN, QUIET, SECOND
from fedplat.texts import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_EPSILON = 100.0
"""The largest epsilon in the plot: beyond it the guarantee is almost without value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyChart:
    """The numbers to plot.

    `lines` are (noise multiplier, rounds, epsilons), the job's own in the middle. `scores` are (epsilon, simulated
    metric); `baseline` is the metric without noise.
    """

    plan: PrivacyPlan
    lines: Sequence[tuple[float, Sequence[int], Sequence[float]]]
    scores: Sequence[tuple[float, float]] = ()
    baseline: float | None = None
    metric: str = "accuracy"


def make_chart(
    job: JobSpec, plan: PrivacyPlan, scores: Mapping[float, float | None] | None = None, metric: str = "accuracy"
) -> PrivacyChart:
    """Return the chart of a job's plan; `scores` are simulated metrics by noise multiplier, 0 without noise."""
    own, scores = plan.noise_multiplier, scores or {}
    points = [(choice.epsilon, scores.get(choice.noise_multiplier)) for choice in plan.by_noise]
    return PrivacyChart(
        plan=plan,
        lines=[(multiplier, *planning.curve(job, multiplier)) for multiplier in (own / 2, own, 2 * own)],
        scores=[(epsilon, value) for epsilon, value in points if value is not None],
        baseline=scores.get(0.0),
        metric=metric,
    )


def plot(
    job: JobSpec, plan: PrivacyPlan, scores: Mapping[float, float | None] | None = None, metric: str = "accuracy"
) -> Figure:
    """Return a plot of a job's plan, with the arguments of `make_chart`. Raises `MissingExtraError`."""
    figure = plots.new_figure()
    draw(figure, make_chart(job, plan, scores, metric))
    return figure


def draw(figure: Figure, picture: PrivacyChart) -> None:
    """Draw two panels, or three if the job was simulated."""
    has_scores = bool(picture.scores)
    figure.set_size_inches(15 if has_scores else 10.5, 4.6)
    axes = figure.subplots(1, 3 if has_scores else 2)
    _rounds(axes[0], picture)
    _cohorts(axes[1], picture.plan)
    if has_scores:
        _scores(axes[2], picture)
    figure.suptitle(f"{picture.plan.job}: delta = {picture.plan.delta:g}, {picture.plan.adjacency}")


def _rounds(axes: Axes, picture: PrivacyChart) -> None:
    plan = picture.plan
    middle = len(picture.lines) // 2
    for index, (multiplier, counts, values) in enumerate(picture.lines):
        own = index == middle
        colour = MAIN if own else (BAD if index < middle else SECOND)
        label = f"noise multiplier {multiplier:.3g}" + (" (this job)" if own else "")
        axes.plot(counts, values, color=colour, linewidth=2.4 if own else 1.4, label=label)
    axes.axhline(plan.budget, color=QUIET, linestyle="--", linewidth=1, label=f"epsilon {plan.budget:.3g}")
    axes.axvline(plan.rounds, color=QUIET, linestyle=":", linewidth=1, label=f"{format_count(plan.rounds, 'round')}")
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="epsilon", title="Privacy cost of rounds")
    axes.set_ylim(bottom=min(min(values) for _, _, values in picture.lines) / 8)  # room for the legend
    axes.legend(fontsize=8, loc="lower right")
    _plain(axes)


def _cohorts(axes: Axes, plan: PrivacyPlan) -> None:
    known = [
        (each.expected_reports, each.deviation, each.noise_multiplier)
        for each in plan.by_cohort
        if each.deviation is not None and each.noise_multiplier is not None
    ]
    axes.plot([each[0] for each in known], [each[1] for each in known], color=MAIN, marker="o", linewidth=1.8)
    for reports, deviation, multiplier in known:
        label = f"z = {multiplier:.3g}"
        axes.annotate(label, (reports, deviation), xytext=(4, 5), textcoords="offset points", fontsize=8)
    axes.axvline(plan.expected_reports, color=QUIET, linestyle=":", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="reports expected in a round",
        ylabel=f"noise in each entry of {'a node' if plan.mechanism.kind == 'tree' else 'the mean'} / clip norm",
        title=f"Noise for epsilon {plan.budget:.3g}, by cohort size",
    )
    axes.margins(x=0.2, y=0.15)
    axes.set_xticks([each.expected_reports for each in plan.by_cohort], minor=False)
    axes.set_xticks([], minor=True)
    _plain(axes)


def _scores(axes: Axes, picture: PrivacyChart) -> None:
    shown = sorted((epsilon, value) for epsilon, value in picture.scores if epsilon <= MAX_EPSILON)
    axes.plot([each[0] for each in shown], [each[1] for each in shown], color=MAIN, marker="o", linewidth=1.8)
    if picture.baseline is not None:
        axes.axhline(picture.baseline, color=QUIET, linestyle="--", linewidth=1, label="without noise")
        axes.legend(fontsize=8)
    axes.axvline(picture.plan.budget, color=QUIET, linestyle=":", linewidth=1)
    axes.set(
        xscale="log",
        xlabel=f"epsilon after {format_count(picture.plan.rounds, 'round')}",
        ylabel=f"final {picture.metric}",
        title="Simulated scores",
    )
    _plain(axes)


def _plain(axes: Axes) -> None:
    """Write ticks as plain numbers, also on logarithmic axes, and add a grid."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_number))
        if axis.get_scale() == "log":
            low, high = sorted(axis.get_view_interval())
            if high / low < 50.0 and isinstance(axis.get_major_locator(), LogLocator):
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _number(value: float, position: int | None) -> str:
    return f"{value:,.6g}"
