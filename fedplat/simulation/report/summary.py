"""The most important numbers of a run, as records and as a table, and means over seeds with confidence intervals.

>>> print(mean_interval([0.90, 0.92, 0.94]))
0.920 ± 0.050
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat import metrics, texts
from fedplat.privacy.accounting import Cost
from fedplat.simulation.recording.result import AttemptResult, Result

Floats = npt.NDArray[np.float64]


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a metric, and the round and virtual second in which it was reached."""

    value: float
    round: int
    at_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The last and the best value of `metric` on held-out data, and where it first reached `target`.

    `rounds_to_target` is interpolated between evaluated rounds, along the running best, as in McMahan et al. 2017
    (section 3); None if the target was not reached or is not set. `of_clients` is the metric that clients reported in
    the last round, weighted by their examples; `federated` is that of the last federated evaluation, on the examples
    that clients keep from training.
    """

    metric: str
    last: MetricValue | None = None
    best: MetricValue | None = None
    target: float = 0.0
    rounds_to_target: float | None = None
    seconds_to_target: float | None = None
    of_clients: float | None = None
    federated: MetricValue | None = None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the evaluated rounds, as arrays of equal length."""

    rounds: Floats
    at_s: Floats
    values: Floats


def series(attempts: Sequence[AttemptResult], metric: str) -> Series:
    """Return a metric on the central test data, in the order of the rounds."""
    scored = [record for record in attempts if record.committed and metric in record.evaluation]
    return _series(scored, [record.evaluation[metric] for record in scored])


def collect_federated(attempts: Sequence[AttemptResult], metric: str) -> Series:
    """Return a metric of the federated evaluations: the mean over the examples that clients keep from training."""
    scored = [each for each in attempts if each.kind == "EVALUATE" and each.committed and metric in each.metrics]
    return _series(scored, [record.metrics[metric] for record in scored])


def summarize(result: Result, metric: str = "accuracy", target: float = 0.0) -> Summary:
    """Summarize a run."""
    central = series(result.attempts, metric)
    trained = [record for record in result.attempts if record.kind == "TRAIN" and metric in record.metrics]
    of_clients = trained[-1].metrics[metric] if trained else None
    of_evaluations = collect_federated(result.attempts, metric)
    on_clients = _score(of_evaluations, -1) if len(of_evaluations.values) else None
    if not len(central.values):
        return Summary(metric=metric, target=target, of_clients=of_clients, federated=on_clients)
    sign = -1.0 if metrics.is_smaller_better(metric) else 1.0
    best = int(np.nanargmax(sign * central.values)) if np.isfinite(central.values).any() else len(central.values) - 1
    reached = find_crossing(central, sign, target) if target else None
    return Summary(
        metric=metric,
        last=_score(central, -1),
        best=_score(central, best),
        target=target,
        rounds_to_target=None if reached is None else reached[0],
        seconds_to_target=None if reached is None else reached[1],
        of_clients=of_clients,
        federated=on_clients,
    )


def _series(scored: Sequence[AttemptResult], values: Sequence[float]) -> Series:
    return Series(
        rounds=np.array([record.round for record in scored], np.float64),
        at_s=np.array([record.ended_at for record in scored]),
        values=np.array(values, np.float64),
    )


def _score(line: Series, index: int) -> MetricValue:
    return MetricValue(value=float(line.values[index]), round=int(line.rounds[index]), at_s=float(line.at_s[index]))


def find_crossing(line: Series, sign: float, target: float) -> tuple[float, float] | None:
    """Return the round and moment at which the running best reaches the target, interpolated between two rounds."""
    best = np.fmax.accumulate(sign * line.values)
    above = np.flatnonzero(best >= sign * target)
    if not len(above):
        return None
    index = int(above[0])
    if index == 0:
        return float(line.rounds[0]), float(line.at_s[0])
    before, after = best[index - 1], best[index]
    part = (sign * target - before) / (after - before) if np.isfinite(before) else 1.0
    return tuple(  # pyright: ignore[reportReturnType] - two numbers
        float(axis[index - 1] + part * (axis[index] - axis[index - 1])) for axis in (line.rounds, line.at_s)
    )


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


_NAMES = {
    "ADVERTISING": "before they sent their keys",
    "SHARING": "while sharing",
    "COLLECTING": "before their update",
    "CONFIRMING": "while confirming",
    "UNMASKING": "while unmasking",
}


class SecureSummary(Struct, frozen=True, kw_only=True):
    """The means of `SecureCosts` over the attempts that committed, and the sums of drop-outs over all attempts.

    `protocol` is "real" if keys, shares and masks were computed, and "model" if only their cost was; results and costs
    are the same.
    """

    protocol: str
    attempts: int
    committed: int
    groups: int
    dropped: dict[str, int]
    bytes_down: float
    bytes_up: float
    client_s: float
    server_s: float

    def describe(self) -> str:
        """Return the summary as a sentence."""
        groups = "" if self.groups == 1 else f"{self.groups} groups, "
        lost = ", ".join(f"{count} {_NAMES[phase]}" for phase, count in self.dropped.items() if count)
        return (
            f"{groups}a client pays {texts.size(self.bytes_up)} up, {texts.size(self.bytes_down)} down and "
            f"{self.client_s:.3g} s of a core in a round, the server {self.server_s:.3g} s; "
            f"lost clients: {lost or 'none'}"
            + ("" if self.protocol == "real" else "; without keys and masks, which change no result")
        )


def summarize_costs(result: Result, *, runs_protocol: bool) -> SecureSummary | None:
    """Return the costs of a run; None if it had no secure aggregation."""
    costs = [each for _, each in result.secure_costs]
    if not costs:
        return None
    paid = [each for record, each in result.secure_costs if record.committed]
    dropped: Counter[str] = Counter()
    for each in costs:
        dropped.update(each.dropped)
    count = max(len(paid), 1)
    return SecureSummary(
        protocol="real" if runs_protocol else "model",
        attempts=len(costs),
        committed=len(paid),
        groups=max(each.groups for each in costs),
        dropped={phase: dropped[phase] for phase in _NAMES if phase in dropped},
        bytes_down=sum(each.bytes_down for each in paid) / count,
        bytes_up=sum(each.bytes_up for each in paid) / count,
        client_s=sum(each.client_s for each in paid) / count,
        server_s=sum(each.server_s for each in paid) / count,
    )


CONFIDENCE = 0.95
EVERY_NUMBER = -math.inf, math.inf
_STEPS = 60
"""Bisections of an angle below 2: then its error is that of a float."""


class MeanInterval(Struct, frozen=True, kw_only=True):
    """The mean of `count` numbers, and the interval around it that contains the true mean with this confidence.

    `deviation` is the sample's standard deviation (divisor count - 1). It and `half_width` are None for a single
    number, from which they cannot be estimated. No end of the interval is outside `bounds`, the possible values.
    """

    mean: float
    half_width: float | None
    deviation: float | None
    count: int
    confidence: float = CONFIDENCE
    bounds: tuple[float, float] = EVERY_NUMBER

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.half_width is None else max(self.mean - self.half_width, self.bounds[0])

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else min(self.mean + self.half_width, self.bounds[1])

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:.4g}"
        if not self.half_width > 1e-9 * abs(self.mean):  # NaN, or a rounding error
            return f"{self.mean:.4g} ± {0.0 if self.half_width >= 0.0 else self.half_width:g}"
        decimals = max(0, 1 - math.floor(math.log10(self.half_width)))  # two digits of the half width
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if low < self.bounds[0] or high > self.bounds[1]:
            return f"{self.mean:.{decimals}f} ({self.low:.{decimals}f} to {self.high:.{decimals}f})"
        return f"{self.mean:.{decimals}f} ± {self.half_width:.{decimals}f}"


class MeanSeries(Struct, frozen=True, kw_only=True):
    """A metric in the rounds that all seeds evaluated, as arrays of equal length.

    `at_s` is the mean virtual second of the round; `low` and `high` are the ends of the confidence interval of the
    mean, NaN with a single seed.
    """

    rounds: Floats
    at_s: Floats
    mean: Floats
    low: Floats
    high: Floats


def mean_interval(
    values: Iterable[float], confidence: float = CONFIDENCE, bounds: tuple[float, float] = EVERY_NUMBER
) -> MeanInterval:
    """Return the mean of independent numbers, such as the accuracies with several seeds, and its confidence interval.

    The interval is that of Student's t distribution, within the `bounds` of possible values; it is NaN if a number is
    not finite. Raises `ValueError` without a number, and for a confidence that is not between 0 and 1.
    """
    values = [float(value) for value in values]
    if not values:
        raise ValueError("there are no values; expected at least one")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence = {confidence}: expected a number between 0 and 1, such as 0.95")
    count = len(values)
    if not all(map(math.isfinite, values)):
        spread = None if count == 1 else math.nan
        return MeanInterval(mean=math.nan, half_width=spread, deviation=spread, count=count, confidence=confidence)
    mean, deviation, half_width = math.fsum(values) / count, None, None
    if count > 1:
        deviation = statistics.stdev(values)
        half_width = t_quantile(confidence, count - 1) * deviation / math.sqrt(count)
    return MeanInterval(
        mean=mean, half_width=half_width, deviation=deviation, count=count, confidence=confidence, bounds=bounds
    )


@functools.cache
def t_quantile(confidence: float, degrees: int) -> float:
    """Return the t for which Student's distribution is within [-t, t] with this probability.

    `degrees` is the number of degrees of freedom, at least 1. The probability is the finite sum of Abramowitz and
    Stegun 1964, 26.7.3 and 26.7.4, in the angle arctan(t / sqrt(degrees)).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, degrees) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _probability(angle: float, degrees: int) -> float:
    """Return the probability of [-t, t], for t = sqrt(degrees) tan(angle)."""
    is_odd, cosine = degrees % 2, math.cos(angle)
    term, total = (cosine if is_odd else 1.0), 0.0
    for number in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine * cosine * number / (number + 1)
    return (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total
