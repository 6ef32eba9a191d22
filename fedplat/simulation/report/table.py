"""The most important numbers of a run as texts by name: the table that `fedplat simulate` and `print(run)` show."""

from __future__ import annotations

from fedplat import texts
from fedplat.privacy.cost import Cost
from fedplat.simulation.recording.result import Result
from fedplat.simulation.report.secure import SecureSummary
from fedplat.simulation.report.summary import Summary

NUM_GROUPS = 3
MIN_GROUP = 10
"""Shares of smaller groups say little: whether a single client was drawn changes them."""


def describe(
    result: Result, summary: Summary, privacy: Cost | None = None, secure: SecureSummary | None = None
) -> dict[str, str]:
    """Return the numbers of a run; those of its privacy and of its secure aggregation, if it has them."""
    fields = _describe_work(result) | _describe_scores(summary)
    if privacy is not None:
        fields["privacy"] = (
            f"epsilon {privacy.epsilon:.4g} at delta {privacy.delta:g} for {privacy.releases} releases, noise "
            f"multiplier {privacy.noise_multiplier:g}"
        )
    if secure is not None:
        fields["secure sums"] = secure.describe()
    if groups := [each for each in result.groups if abs(each.over - 1.0) > 0.05 and each.num_clients >= MIN_GROUP]:
        groups.sort(key=lambda group: -abs(group.over - 1.0))
        shown = (f"{group.name} has {group.over:.2f} times its share" for group in groups[:NUM_GROUPS])
        fields["participation"] = ", ".join(shown)
    return fields


def format_lines(fields: dict[str, str]) -> str:
    """Return one line for each field, with aligned values."""
    width = max(map(len, fields))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in fields.items())


def _describe_work(result: Result) -> dict[str, str]:
    totals = result.totals
    abandoned = f" and {texts.format_count(totals.abandoned, 'abandoned attempt')}" if totals.abandoned else ""
    counts = sorted(totals.counts.items(), key=lambda each: -each[1])
    rounds = texts.format_count(totals.rounds, "round")
    return {
        "status": result.status + (f" ({result.reason})" if result.reason else ""),
        "virtual time": f"{texts.duration(totals.duration_s)} for {rounds}{abandoned}",
        "assignments": f"{totals.assigned:,}: " + ", ".join(f"{count:,} {state.lower()}" for state, count in counts),
        "clients": f"{totals.distinct_clients:,} of {result.num_clients:,} were assigned",
        "traffic": f"{texts.size(totals.bytes_down)} down, {texts.size(totals.bytes_up)} up",
    }


def _describe_scores(summary: Summary) -> dict[str, str]:
    fields: dict[str, str] = {}
    if (best := summary.best) is not None and (last := summary.last) is not None:
        fields[summary.metric] = f"{last.value:.4f} at the end, best {best.value:.4f} in round {best.round}"
    if (scored := summary.federated) is not None:
        fields["on clients"] = (
            f"{summary.metric} {scored.value:.4f} on data held out from their training, round {scored.round}"
        )
    if summary.target:
        reached = "not reached"
        if (rounds := summary.rounds_to_target) is not None and (seconds := summary.seconds_to_target) is not None:
            reached = f"after {rounds:.1f} rounds, {texts.duration(seconds)}"
        fields[f"{summary.metric} {summary.target:g}"] = reached
    return fields
