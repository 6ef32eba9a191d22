"""The checks of robust rules and pre-aggregators, on updates of which two are arbitrary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedplat.aggregate import Contribution, Robust, Rule, State, weighted_mean
from fedplat.aggregate.robust import PreAggregator, RobustRule
from fedplat.aggregate.robust.inputs import Rows
from fedplat.model import WINDOW, Vector, VectorBlocks
from fedplat.model.blocks import ShardReduce, Terms, shards, single_shard
from fedplat.testing.errors import adopt, run_checks

Updates = npt.NDArray[np.float32]
NUM_UPDATES, BYZANTINE, SIZE = 13, 2, 1000
ATTACKERS = (3, 7)
ROUNDING = 1e-5
"""Largest difference, relative to the largest entry, that the order of float32 sums may cause."""


@dataclasses.dataclass(frozen=True)
class RobustRuleUnderTest:
    """A robust rule, and updates of clients `c0`, `c1` and so on."""

    options: RobustRule

    @property
    def fewest(self) -> int:
        """The smallest number of updates."""
        return self.options.fewest(BYZANTINE)

    def make(self) -> Rule:
        """Build the rule around a weighted mean."""
        return Robust(self.options, BYZANTINE).build(1)(weighted_mean())

    def updates(self, attack: float = 0.0, number: int | None = None, size: int = SIZE) -> Updates:
        """Return updates; those of the attackers are `attack` times as large as the others, and in any direction."""
        rng = np.random.default_rng(5)
        number = max(NUM_UPDATES, self.fewest) if number is None else number
        updates = rng.normal(0.05, 0.1, (number, size))
        if attack and len(updates) > max(ATTACKERS):
            updates[list(ATTACKERS)] = np.clip(rng.normal(0.0, 0.1, (len(ATTACKERS), size)) * attack, -3e38, 3e38)
        return updates.astype(np.float32)


def check_robust_rule(options: RobustRule) -> None:
    """Check a robust rule. Raises `ConformanceError` for the first check that fails.

    Clients have the names `c0` to `c12`; two of those that are arbitrary are `c3` and `c7`.
    """
    run_checks(RULE_CHECKS, RobustRuleUnderTest(adopt(options, RobustRule)))


def gather(
    rule: Rule, updates: Updates, order: Sequence[int] | None = None, reduce_shards: ShardReduce = single_shard
) -> Vector:
    """Return the robust result of updates that arrive in an order."""
    partial = dataclasses.replace(rule.start(updates.shape[1]), reduce_shards=reduce_shards)
    for index in range(len(updates)) if order is None else order:
        partial = rule.fold(partial, VectorBlocks(updates[index]), make_contribution(index))
    assert rule.gather is not None
    state: State = rule.init(updates.shape[1])
    return rule.gather({name: VectorBlocks(vector) for name, vector in state.items()}, partial).total


def make_contribution(index: int) -> Contribution:
    """Return the contribution of a client."""
    return Contribution(1.0 + index, client_id=f"c{index}")


def check_fewest_exceeds_the_arbitrary_updates(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require a number of updates for each number of arbitrary ones, which the server refuses to go below."""
    numbers = [tested.options.fewest(byzantine) for byzantine in range(6)]
    if any(not isinstance(number, int) for number in numbers):  # pyright: ignore[reportUnnecessaryIsInstance]
        yield f"fewest() of 0 to 5 returns {numbers}; expected whole numbers"
    elif any(number <= byzantine for byzantine, number in enumerate(numbers)) or numbers != sorted(numbers):
        yield f"fewest() of 0 to 5 returns {numbers}; expected more than the arbitrary updates, and no smaller number"


def check_the_wrapper_gathers(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require a rule that sees all updates together, as `make_wrapper` makes it."""
    if tested.make().gather is None:
        yield "build() returns a wrapper of rules without gather(); expected that of fedplat.aggregate.robust.inputs"


def check_results_are_float32_of_the_models_length(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require a finite vector, also with as few updates as allowed, and for models without floating entries."""
    for number, size in ((None, SIZE), (tested.fewest, SIZE), (None, 1), (None, 0)):
        found = gather(tested.make(), tested.updates(number=number, size=size))
        if found.dtype != np.float32 or found.shape != (size,):
            yield f"the result is {found.dtype}{list(found.shape)}; expected float32[{size}]"
        elif not np.isfinite(found).all():
            yield "the result of finite updates has NaN or infinite entries"


def check_the_same_updates_give_the_same_bits(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require that another process, which computes the attempt again after a crash, has the same result."""
    updates = tested.updates(1e6)
    if gather(tested.make(), updates).tobytes() != gather(tested.make(), updates).tobytes():
        yield "two rules with the same options and updates return different bits; expected no randomness and no memory"


def check_the_order_changes_rounding_only(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require that updates may arrive in any order."""
    updates = tested.updates()
    expected = gather(tested.make(), updates)
    order = np.random.default_rng(1).permutation(len(updates)).tolist()
    difference = np.abs(gather(tested.make(), updates, order) - expected).max() / max(np.abs(expected).max(), 1e-30)
    if difference > ROUNDING:
        yield f"updates in another order change the result by {difference:.1e}; expected at most {ROUNDING:.0e}"


def check_updates_stay_as_they_are(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require that updates are only read: they are files mapped into memory."""
    updates = tested.updates()
    updates.flags.writeable = False
    try:
        gather(tested.make(), updates)
    except ValueError as exc:
        yield f"the rule writes into updates ({exc}); expected new arrays"


def check_equal_updates_are_followed(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require a result on the side of the updates if they are all equal, whose robust mean is no question."""
    update = tested.updates()[0]
    found = gather(tested.make(), np.tile(update, (max(NUM_UPDATES, tested.fewest), 1)))
    if not float(found.astype(np.float64) @ update.astype(np.float64)) > 0.0:
        yield "if all updates are equal, the result does not point their way; expected that it does"


def check_arbitrary_updates_have_a_bounded_effect(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require that larger arbitrary updates move the result no farther, and never out of float32."""
    honest = np.delete(tested.updates(), ATTACKERS, axis=0).astype(np.float64)
    centre = honest.mean(axis=0)
    spread = np.linalg.norm(honest - centre, axis=1).max()
    moved: dict[float, float] = {}
    for attack in (1e6, 1e12, 1e38):
        with np.errstate(all="ignore"):
            found = gather(tested.make(), tested.updates(attack)).astype(np.float64)
        if not np.isfinite(found).all():
            yield f"{BYZANTINE} arbitrary updates with entries of {attack:g} give a result with NaN or infinite entries"
            return
        moved[attack] = float(np.linalg.norm(found - centre))
        if moved[attack] > 2 * moved[1e6] + spread:
            yield (
                f"{BYZANTINE} of {len(honest) + BYZANTINE} updates move the result by {moved[1e6]:.3g} if they are 1e6 "
                f"times as large as the others, and by {moved[attack]:.3g} if they are {attack:g} times as large; "
                "expected a bound that does not depend on their size"
            )
            return


def check_pre_aggregation_comes_first(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require the call of `before`, which also refuses too few updates."""
    seen: list[int] = []

    def before(rows: Rows) -> Rows:
        seen.append(len(rows))
        return rows

    updates = tested.updates()
    gather(tested.options.build(BYZANTINE, before)(weighted_mean()), updates)
    if seen != [len(updates)]:
        yield (
            f"before() is called {len(seen)} times"
            + (f" with {seen} rows" if seen else "")
            + "; expected once, with a "
            f"row for each of the {len(updates)} updates: it mixes them, and refuses too few"
        )
        return
    try:
        gather(tested.make(), tested.updates(number=tested.fewest - 1))
    except ValueError:
        return
    yield f"{tested.fewest - 1} updates are accepted; expected the ValueError of before(), because of fewest()"


def check_merged_parts_equal_the_whole(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require that gateways and ranks can collect a part of the updates each."""
    rule, updates = tested.make(), tested.updates()
    parts = [rule.start(SIZE), rule.start(SIZE)]
    for index, update in enumerate(updates):
        parts[index >= 4] = rule.fold(parts[index >= 4], VectorBlocks(update), make_contribution(index))
    assert rule.gather is not None
    state = {name: VectorBlocks(vector) for name, vector in rule.init(SIZE).items()}
    if rule.gather(state, rule.merge(*parts)).total.tobytes() != gather(rule, updates).tobytes():
        yield "merge() of two parts gives other bits than all updates together"


def check_shards_give_the_bits_of_the_whole(tested: RobustRuleUnderTest) -> Iterator[str]:
    """Require that several processes can compute some columns each, with `reduce_shards` for sums over all columns."""
    size = WINDOW + 37
    updates, sums = tested.updates(size=size), list[Terms]()

    def record(zero: Terms, terms: Iterable[Terms]) -> Terms:
        sums.append(single_shard(zero, terms))
        return sums[-1]

    whole = gather(tested.make(), updates, reduce_shards=record)
    parts: list[Vector] = []
    for columns in shards(size, 2):
        known = iter(sums)

        def replay(zero: Terms, terms: Iterable[Terms], known: Iterator[Terms] = known) -> Terms:
            return next(known, single_shard(zero, terms))

        part = np.ascontiguousarray(updates[:, columns.start : columns.stop])
        parts.append(gather(tested.make(), part, reduce_shards=replay))
    if np.concatenate(parts).tobytes() != whole.tobytes():
        yield (
            "two parts of the vectors, computed by themselves, have other bits than the whole result; expected a rule "
            "that processes each column by itself, and Rows or reduce_shards for sums over all columns"
        )


RULE_CHECKS = (
    check_fewest_exceeds_the_arbitrary_updates,
    check_the_wrapper_gathers,
    check_results_are_float32_of_the_models_length,
    check_updates_stay_as_they_are,
    check_the_same_updates_give_the_same_bits,
    check_the_order_changes_rounding_only,
    check_equal_updates_are_followed,
    check_arbitrary_updates_have_a_bounded_effect,
    check_pre_aggregation_comes_first,
    check_merged_parts_equal_the_whole,
    check_shards_give_the_bits_of_the_whole,
)


@dataclasses.dataclass(frozen=True)
class PreAggregatorUnderTest:
    """A pre-aggregator."""

    options: PreAggregator

    def mix(self, updates: Updates, seed: int = 1) -> Rows:
        """Return the rows that replace updates, of which two are arbitrary."""
        rows = Rows.of([VectorBlocks(update) for update in updates])
        return self.options.build(BYZANTINE, seed)(rows)


def check_pre_aggregator(options: PreAggregator) -> None:
    """Check a pre-aggregator. Raises `ConformanceError` for the first check that fails."""
    run_checks(MIX_CHECKS, PreAggregatorUnderTest(adopt(options, PreAggregator)))


def check_rows_are_announced(tested: PreAggregatorUnderTest) -> Iterator[str]:
    """Require `rows_of` rows: the server refuses a job whose updates are too few for its rule."""
    for number in range(BYZANTINE + 1, 2 * NUM_UPDATES):
        updates = np.random.default_rng(number).normal(size=(number, 50)).astype(np.float32)
        found, announced = len(tested.mix(updates)), tested.options.rows_of(number)
        if not 1 <= announced <= number:
            yield f"rows_of({number}) returns {announced}; expected a number from 1 to {number}"
        elif found != announced:
            yield f"{number} updates give {found} rows; expected rows_of({number}), {announced}"


def check_the_same_seed_gives_the_same_rows(tested: PreAggregatorUnderTest) -> Iterator[str]:
    """Require that another process, which computes the attempt again after a crash, mixes the same updates."""
    updates = np.random.default_rng(2).normal(size=(NUM_UPDATES, 50)).astype(np.float32)
    if tested.mix(updates).mixing.tobytes() != tested.mix(updates).mixing.tobytes():
        yield "two mixtures with the same seed differ; expected no other randomness and no memory"


def check_rows_are_means_of_updates(tested: PreAggregatorUnderTest) -> Iterator[str]:
    """Require that updates that are all equal are not changed."""
    updates = np.random.default_rng(3).normal(size=(NUM_UPDATES, 50)).astype(np.float32)
    sums = tested.mix(updates).mixing.sum(axis=1)
    if not np.isfinite(sums).all() or np.abs(sums - 1.0).max() > 1e-9:
        yield f"the weights of the updates in a row add up to {sums[np.abs(sums - 1.0).argmax()]:g}; expected 1"


MIX_CHECKS = (check_rows_are_announced, check_the_same_seed_gives_the_same_rows, check_rows_are_means_of_updates)
