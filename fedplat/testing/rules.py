"""The checks of aggregation rules, on random updates of several blocks.

Each check is a function that yields a sentence for each violation of the contract in `fedplat.aggregate.algebra`.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedplat import aggregate
from fedplat.model import BLOCK, WINDOW, Blocks, Parameters, Vector, VectorBlocks
from fedplat.testing.errors import adopt, run_checks, wrap_errors

SIZE = WINDOW + BLOCK + 38
"""Entries of the updates: the server applies a rule to two parts of them. Even, since SCAFFOLD's are halves."""
NUM_UPDATES = 5
ROUNDING = 2e-6
"""Largest difference, relative to the largest entry, that the order of float32 sums may cause."""

Updates = Sequence[tuple[Vector, aggregate.Contribution]]


@dataclasses.dataclass(frozen=True)
class RuleUnderTest:
    """A rule, created again for each check; `metrics` are those of every report."""

    make: Callable[[], aggregate.Rule]
    metrics: Mapping[str, float]
    works_on_mean: bool

    def updates(self, seed: int, number: int = NUM_UPDATES, size: int = SIZE) -> Updates:
        """Return updates with different weights, numbers of examples, metrics and staleness."""
        rng = np.random.default_rng(seed)
        return [
            (
                rng.normal(0.02, 0.1, size).astype(np.float32),
                aggregate.Contribution(
                    weight=float(1 + 2 * index),
                    num_examples=10.0 * (1 + index),
                    metrics={name: value * (1 + index) for name, value in self.metrics.items()},
                    staleness=index % 3,
                    client_id=f"client-{index}",
                ),
            )
            for index in range(number)
        ]


def check_rule(options: aggregate.RuleOptions, metrics: Mapping[str, float] | None = None) -> None:
    """Check an aggregation rule. Raises `ConformanceError` for the first check that fails.

    `metrics` are added to the metrics of each report, which has those that the rule requires.
    """
    options = adopt(options, aggregate.RuleOptions)
    with wrap_errors("build"):
        first = options.build()
    reported = {**dict.fromkeys(sorted(first.metrics), 2.0), **(metrics or {})}
    run_checks(CHECKS, RuleUnderTest(options.build, reported, options.works_on_mean))


def fold(rule: aggregate.Rule, updates: Updates) -> aggregate.Partial:
    """Return the partial result of all updates."""
    partial = rule.start(SIZE)
    for update, contribution in updates:
        partial = rule.fold(partial, VectorBlocks(update), contribution)
    return partial


def fold_and_gather(rule: aggregate.Rule, updates: Updates, state: aggregate.State) -> aggregate.Partial:
    """Return the partial result that `apply` receives, also of a rule that gathers."""
    partial = fold(rule, updates)
    if rule.gather is None:
        return partial
    return rule.gather({name: VectorBlocks(vector) for name, vector in state.items()}, partial)


def step(
    rule: aggregate.Rule, updates: Updates, state: aggregate.State | None = None
) -> tuple[Vector, aggregate.State]:
    """Return the step and the next state of an attempt."""
    state = rule.init(SIZE) if state is None else state
    return rule.apply(state, fold_and_gather(rule, updates, state))


def _try_step(rule: aggregate.Rule, updates: Updates) -> Vector | None:
    """Return the step, or None if the rule refuses the updates."""
    try:
        with np.errstate(all="ignore"):
            return step(rule, updates)[0]
    except ValueError:
        return None


def _difference(left: Vector, right: Vector) -> float:
    """Return the largest difference, relative to the largest entry."""
    return float(np.abs(left - right).max() / max(np.abs(right).max(), 1e-30))


def check_vectors_are_float32_of_the_models_length(rule: RuleUnderTest) -> Iterator[str]:
    """Require what the store needs, and the addition of the step to the model."""
    made = rule.make()
    moved, state = step(made, rule.updates(0))
    if state.keys() != made.init(SIZE).keys():
        yield f"init() has the vectors {sorted(made.init(SIZE))}, apply() returns {sorted(state)}; expected the same"
    vectors: dict[str, Any] = {"the step": moved, **made.init(SIZE), **state}
    for name, vector in vectors.items():
        if not isinstance(vector, np.ndarray):
            yield f"{name} is a {type(vector).__name__}; expected a NumPy array, float32[{SIZE}]"
            return
        found = cast(npt.NDArray[Any], vector)
        if found.dtype != np.float32 or found.shape != (SIZE,):
            yield f"{name} is {found.dtype}{list(found.shape)}; expected float32[{SIZE}]"


def check_the_same_input_gives_the_same_bits(rule: RuleUnderTest) -> Iterator[str]:
    """Require that another process, which computes the attempt again after a crash, has the same result."""
    one, two = (step(rule.make(), rule.updates(0)) for _ in range(2))
    if one[0].tobytes() != two[0].tobytes() or aggregate.state_to_bytes(one[1]) != aggregate.state_to_bytes(two[1]):
        yield "two rules with the same options and updates return different bits; expected no randomness and no clock"


def check_all_memory_is_in_the_state(rule: RuleUnderTest) -> Iterator[str]:
    """Require that a server that restarts, and so has only the stored state, continues with the same bits."""
    kept = rule.make()
    _, state = step(kept, rule.updates(0))
    restored, _ = aggregate.state_from_bytes(aggregate.state_to_bytes(state)) if state else ({}, None)
    continued, restarted = step(kept, rule.updates(1), state), step(rule.make(), rule.updates(1), restored)
    if continued[0].tobytes() != restarted[0].tobytes():
        yield "after a restart, the second step differs; expected all memory in the vectors that apply() returns"


def check_apply_changes_nothing(rule: RuleUnderTest) -> Iterator[str]:
    """Require that the end of an attempt can be computed again: the server does so if the store fails."""
    made = rule.make()
    _, state = step(made, rule.updates(0))
    copies = {name: vector.copy() for name, vector in state.items()}
    partial = fold_and_gather(made, rule.updates(1), state)
    total = partial.total.copy()
    first, second = made.apply(state, partial), made.apply(state, partial)
    if any(state[name].tobytes() != copy.tobytes() for name, copy in copies.items()):
        yield "apply() writes into the state that it receives; expected new vectors"
    if partial.total.tobytes() != total.tobytes():
        yield "apply() writes into the total that it receives; expected a new vector"
    if first[0].tobytes() != second[0].tobytes():
        yield "apply() returns another step when it is called again with the same arguments"


def check_fold_leaves_updates_alone(rule: RuleUnderTest) -> Iterator[str]:
    """Require that updates stay as they are: they are files mapped into memory, which several processes read."""
    made, ((update, contribution), *_) = rule.make(), rule.updates(0)
    before = update.copy()
    update.flags.writeable = False
    try:
        partial = made.fold(made.start(SIZE), VectorBlocks(update), contribution)
    except ValueError as exc:
        yield f"fold() writes into the update that it receives ({exc}); expected a new array"
        return
    if update.tobytes() != before.tobytes() or np.shares_memory(partial.total, update):
        yield "fold() changes or keeps the memory of the update; expected a copy"


def check_the_order_changes_rounding_only(rule: RuleUnderTest) -> Iterator[str]:
    """Require that updates may arrive in any order."""
    updates = rule.updates(0)
    forwards, backwards = step(rule.make(), updates)[0], step(rule.make(), updates[::-1])[0]
    if (found := _difference(backwards, forwards)) > ROUNDING:
        yield f"updates in reverse order change the step by {found:.1e}; expected at most {ROUNDING:.0e}, by rounding"


def check_merged_parts_equal_the_whole(rule: RuleUnderTest) -> Iterator[str]:
    """Require that gateways and ranks can fold a part of the updates each."""
    made, updates = rule.make(), rule.updates(0)
    if made.gather is not None:
        return
    whole = made.apply(made.init(SIZE), fold(made, updates))[0]
    cuts = {
        "(1 + 2) + 3": lambda: made.merge(made.merge(one(), two()), three()),
        "1 + (2 + 3)": lambda: made.merge(one(), made.merge(two(), three())),
        "an empty part + the rest": lambda: made.merge(made.start(SIZE), fold(made, updates)),
    }

    def one() -> aggregate.Partial:
        return fold(made, updates[:1])

    def two() -> aggregate.Partial:
        return fold(made, updates[1:3])

    def three() -> aggregate.Partial:
        return fold(made, updates[3:])

    for name, merged in cuts.items():
        if (found := _difference(made.apply(made.init(SIZE), merged())[0], whole)) > ROUNDING:
            yield f"merge() of parts, {name}, changes the step by {found:.1e}; expected at most {ROUNDING:.0e}"


def check_merged_parts_publish_the_same(rule: RuleUnderTest) -> Iterator[str]:
    """Require that a merged partial result has all numbers of its parts, also those that only the end needs."""
    made, updates = rule.make(), rule.updates(0)
    whole, merged = fold(made, updates), made.merge(fold(made, updates[:2]), fold(made, updates[2:]))
    functions = {"publish": made.publish, "remember": made.remember}
    for name, function in functions.items():
        if function is None:
            continue
        expected, found = function(whole), function(merged)
        if found.keys() != expected.keys() or any(
            not np.isclose(found[key], value, rtol=ROUNDING, atol=0.0) for key, value in expected.items()
        ):
            yield (
                f"after merge(), {name}() returns {dict(found)}, and {dict(expected)} for all updates together; "
                "expected a merge() that also adds `sums`, and no randomness"
            )


def check_the_step_follows_the_updates(rule: RuleUnderTest) -> Iterator[str]:
    """Require a step that reduces the distance to the clients' models: an update is their model minus the server's."""
    update = rule.updates(0)[0][0]
    moved, _ = step(rule.make(), [(update, contribution) for _, contribution in rule.updates(0)])
    if not float(moved.astype(np.float64) @ update.astype(np.float64)) > 0.0:
        yield (
            "if all updates are equal, the step does not go their way; expected a step to add to the model, as an "
            "update is (minus the gradient, times a learning rate)"
        )


def check_weights_count(rule: RuleUnderTest) -> Iterator[str]:
    """Require the use of weights: they are all that a rule learns of examples, staleness and limits of influence."""
    updates = list(rule.updates(0))
    update, contribution = updates[1]
    before = step(rule.make(), updates)[0]
    updates[1] = (update, dataclasses.replace(contribution, weight=100 * contribution.weight))
    if rule.make().gather is None and step(rule.make(), updates)[0].tobytes() == before.tobytes():
        yield "an update with 100 times the weight gives the same step; expected that the weight of an update counts"
    if rule.make().unit_weights:
        return
    scaled = [(vector, dataclasses.replace(each, weight=1024 * each.weight)) for vector, each in rule.updates(0)]
    if (found := _difference(step(rule.make(), scaled)[0], before)) > ROUNDING:
        yield (
            f"all weights times 1024 change the step by {found:.1e}; expected weights as parts of their sum, or a rule "
            "with unit_weights = True"
        )


def check_a_mean_of_nothing_is_refused(rule: RuleUnderTest) -> Iterator[str]:
    """Require an error if no update is usable, or has a weight: staleness weights may be 0."""
    made = rule.make()
    weightless = [(update, dataclasses.replace(each, weight=0.0)) for update, each in rule.updates(0)]
    for name, updates in (("without an update", ()), ("of updates with the weight 0", weightless)):
        if (moved := _try_step(made, updates)) is not None and not np.isfinite(moved).all():
            yield f"apply() {name} returns NaN or infinite entries; expected a ValueError"


def check_refused_updates_change_nothing(rule: RuleUnderTest) -> Iterator[str]:
    """Require that `fold` checks a contribution before it adds anything: the attempt goes on without this update."""
    for weight in (float("nan"), -1.0):
        made, ((update, contribution), (other, refused), *_) = rule.make(), rule.updates(0)
        partial = made.fold(made.start(SIZE), VectorBlocks(update), contribution)
        before = partial.total.copy()
        try:
            with np.errstate(all="ignore"):
                made.fold(partial, VectorBlocks(other), dataclasses.replace(refused, weight=weight))
        except ValueError:
            if partial.total.tobytes() != before.tobytes():
                yield f"fold() refuses the weight {weight} after adding the update; expected that it checks first"


def check_hostile_contributions_are_refused_or_harmless(rule: RuleUnderTest) -> Iterator[str]:
    """Require an error for impossible weights, which clients may send."""
    for weight in (float("nan"), float("inf"), -1.0):
        made, updates = rule.make(), list(rule.updates(0))
        update, contribution = updates[1]
        updates[1] = (update, dataclasses.replace(contribution, weight=weight))
        if (moved := _try_step(made, updates)) is None:
            continue
        if not np.isfinite(moved).all():
            yield f"an update with the weight {weight} gives a step that is not finite; expected a ValueError of fold()"
        elif not weight >= 0:
            yield f"fold() accepts the weight {weight}; expected a ValueError"


def check_updates_are_read_in_blocks(rule: RuleUnderTest) -> Iterator[str]:
    """Require that memory does not grow with an update, which may be larger than the memory of the server."""
    made = rule.make()
    if made.gather is not None:
        return
    size = 64 * BLOCK
    source = _Stream(size)
    partial = made.fold(made.start(size), source, rule.updates(0, size=2)[0][1])  # what is allocated once
    tracemalloc.start()
    try:
        for _ in range(3):
            partial = made.fold(partial, source, rule.updates(0, size=2)[0][1])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > 2 * size:  # half of the update, which has four bytes an entry
        yield (
            f"fold() allocates {peak:,} bytes for an update of {4 * size:,}; expected that it reads the blocks of the "
            "update one after the other, and keeps none of them"
        )


def check_sums_do_not_grow_with_the_updates(rule: RuleUnderTest) -> Iterator[str]:
    """Require that memory does not grow with the number of clients."""
    made = rule.make()
    few, many = (fold(made, rule.updates(0, number)) for number in (NUM_UPDATES, 2 * NUM_UPDATES))
    if len(many.sums) > len(few.sums):
        yield (
            f"{NUM_UPDATES} updates have {len(few.sums)} sums, and {2 * NUM_UPDATES} have {len(many.sums)}; expected "
            "sums over the updates, not numbers of each"
        )
    if many.kept and made.gather is None:
        yield "fold() keeps updates; expected that only a rule with gather() does"


class _Stream(Blocks):
    """An update that is never in memory as a whole."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._block = np.full(BLOCK, 0.01, np.float32)

    @property
    def size(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Vector]:
        for _ in range(self._size // BLOCK):
            yield self._block


def check_blockwise_rules_give_the_bits_of_the_whole(rule: RuleUnderTest) -> Iterator[str]:
    """Require that the server can compute the end of an attempt part by part."""
    made = rule.make()
    if not made.blockwise or made.gather is not None:
        return
    base = Parameters.from_arrays({"weight": np.zeros(SIZE, np.float32)})
    accumulator = aggregate.Accumulator(base.schema, made)
    updates = rule.updates(0)
    for update, contribution in updates:
        accumulator.fold(Parameters.from_arrays({"weight": update}), contribution)
    parts = [part.model.tobytes() for part in accumulator.parts(base, aggregate.first_columns(made, SIZE))]
    whole = base.plus(step(made, updates)[0]).to_bytes()
    if base.schema.header + b"".join(parts) != whole:
        yield (
            "apply() on parts of the vectors returns other bits than on the whole ones; expected a rule that processes "
            "each entry by itself, or blockwise=False"
        )


def check_rules_on_the_mean_see_only_the_mean(rule: RuleUnderTest) -> Iterator[str]:
    """Require that a rule that `works_on_mean` does: in private and robust jobs it receives only the mean."""
    if not rule.works_on_mean:
        return
    made, updates = rule.make(), rule.updates(0)
    if (found := _difference(step(aggregate.restrict_to_mean(made), updates)[0], step(made, updates)[0])) > ROUNDING:
        yield (
            f"with only the mean of the updates the step differs by {found:.1e}; expected a rule that uses nothing "
            "else, or works_on_mean = False"
        )


CHECKS = (
    check_vectors_are_float32_of_the_models_length,
    check_the_same_input_gives_the_same_bits,
    check_fold_leaves_updates_alone,
    check_apply_changes_nothing,
    check_all_memory_is_in_the_state,
    check_the_order_changes_rounding_only,
    check_merged_parts_equal_the_whole,
    check_merged_parts_publish_the_same,
    check_weights_count,
    check_the_step_follows_the_updates,
    check_a_mean_of_nothing_is_refused,
    check_hostile_contributions_are_refused_or_harmless,
    check_refused_updates_change_nothing,
    check_updates_are_read_in_blocks,
    check_sums_do_not_grow_with_the_updates,
    check_blockwise_rules_give_the_bits_of_the_whole,
    check_rules_on_the_mean_see_only_the_mean,
)
