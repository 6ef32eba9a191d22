"""The checks of metrics, on 211 examples of ten classes, or on those of the caller (extra "torch")."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import msgspec
import torch

from fedplat import errors, metrics
from fedplat.config.decoding import prepare_type
from fedplat.pytorch.training import Scores, Sums
from fedplat.testing.errors import adopt, run_checks

NUM_EXAMPLES, NUM_CLASSES = 211, 10
ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class MetricUnderTest:
    """A metric, and examples."""

    metric: metrics.Metric
    outputs: torch.Tensor
    targets: torch.Tensor

    def measure(self, *batches: Sequence[int]) -> Scores:
        """Measure batches of examples."""
        scores = Scores(metrics=(self.metric,))
        for batch in batches:
            scores.add(torch.tensor(0.0), self.outputs[list(batch)], self.targets[list(batch)])
        return scores

    def compute(self, *batches: Sequence[int]) -> dict[str, float]:
        """Return the metric's values over batches of examples."""
        means = self.measure(*batches).means()
        return {name: value for name, value in means.items() if name not in ("loss", "accuracy")}

    def indices(self, size: int) -> list[range]:
        """Return all examples, in batches."""
        total = len(self.targets)
        return [range(start, min(start + size, total)) for start in range(0, total, size)]


def check(metric: metrics.Metric, outputs: torch.Tensor | None, targets: torch.Tensor | None) -> None:
    """Check a metric: see `fedplat.testing.check_metric`."""
    generator = torch.Generator().manual_seed(1)
    if outputs is None or targets is None:
        outputs = torch.randn(NUM_EXAMPLES, NUM_CLASSES, generator=generator)
        targets = torch.randint(NUM_CLASSES, (NUM_EXAMPLES,), generator=generator)
    run_checks(CHECKS, MetricUnderTest(adopt(metric, metrics.Metric), outputs, targets))


def check_values_are_numbers(tested: MetricUnderTest) -> Iterator[str]:
    """Require numbers with names, also of a single example."""
    total = len(tested.targets)
    for examples in (range(total), range(1)):
        try:
            found = tested.compute(examples)
        except (errors.PluginError, errors.UserCodeError) as exc:
            yield str(exc)
            return
        if not found:
            yield "compute() returns no values; expected at least one"
        for name, value in found.items():
            if len(examples) > 1 and not math.isfinite(value):
                yield f"{name} of {total} examples is {value}; expected a finite number"


def check_batches_give_the_value_of_the_whole(tested: MetricUnderTest) -> Iterator[str]:
    """Require that sums over batches determine the metric: the mean of the batches' values need not be it."""
    whole = tested.compute(*tested.indices(len(tested.targets)))
    for size in (1, 10, 64):
        if difference := _difference(tested.compute(*tested.indices(size)), whole):
            yield f"batches of {size} change {difference}; expected sums that do not depend on the batches"
            return


def check_processes_give_the_value_of_the_whole(tested: MetricUnderTest) -> Iterator[str]:
    """Require that processes can measure a part of the examples each."""
    batches = tested.indices(10)
    parts = [msgspec.msgpack.encode(tested.measure(*batches[rank::3]).sums()) for rank in range(3)]
    means = Sums.total(msgspec.msgpack.decode(part, type=prepare_type(Sums)) for part in parts).means((tested.metric,))
    if difference := _difference(means, tested.compute(*batches)):
        yield f"the sums of three processes change {difference}"


def check_the_order_changes_rounding_only(tested: MetricUnderTest) -> Iterator[str]:
    """Require that examples may come in any order."""
    order = torch.randperm(len(tested.targets), generator=torch.Generator().manual_seed(2)).tolist()
    if difference := _difference(tested.compute(order), tested.compute(range(len(order)))):
        yield f"another order of the examples changes {difference}"


def check_a_metric_has_no_memory(tested: MetricUnderTest) -> Iterator[str]:
    """Require that an evaluation does not depend on earlier ones."""
    some, whole = range(3), range(len(tested.targets))
    before = tested.compute(some)
    tested.compute(whole)
    if difference := _difference(tested.compute(some), before):
        yield f"after another evaluation, the same examples change {difference}; expected no memory and no randomness"


def check_tensors_stay_as_they_are(tested: MetricUnderTest) -> Iterator[str]:
    """Require that outputs and targets are only read: other metrics measure them, too."""
    outputs, targets = tested.outputs.clone(), tested.targets.clone()
    tested.metric.measure(outputs, targets)
    if not torch.equal(outputs, tested.outputs) or not torch.equal(targets, tested.targets):
        yield "measure() writes into the tensors that it receives; expected new ones"


def check_a_diverged_model_is_measured(tested: MetricUnderTest) -> Iterator[str]:
    """Require a number, which may be NaN, for outputs that are NaN: a run that diverged must end with its results."""
    diverged = dataclasses.replace(tested, outputs=torch.full_like(tested.outputs, math.nan))
    try:
        diverged.compute(range(len(tested.targets)))
    except (errors.PluginError, errors.UserCodeError) as exc:
        yield f"for outputs that are NaN, {exc}; expected a number, which may be NaN"


def _difference(found: dict[str, float], expected: dict[str, float]) -> str:
    """Describe the first value that differs by more than rounding, or return ""."""
    for name, value in expected.items():
        if name not in found:
            return f"{name}, which is missing"
        both_nan = math.isnan(value) and math.isnan(found[name])
        if not both_nan and not math.isclose(found[name], value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return f"{name} from {value:.6g} to {found[name]:.6g}"
    return ""


CHECKS = (
    check_values_are_numbers,
    check_tensors_stay_as_they_are,
    check_batches_give_the_value_of_the_whole,
    check_processes_give_the_value_of_the_whole,
    check_the_order_changes_rounding_only,
    check_a_metric_has_no_memory,
    check_a_diverged_model_is_measured,
)
