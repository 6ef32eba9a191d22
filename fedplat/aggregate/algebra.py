"""The aggregate algebra: what an aggregation rule is, and how rules are composed.

A rule is a frozen record of pure functions over flat float32 vectors (fedjax's `(init, apply)` pairs, with
the reduction over clients spelled out so that it can stream):

- `init(size)` makes the state that lives as long as the job (a momentum, say): named vectors, may be empty;
- `start(size)` makes the empty partial result of one attempt;
- `fold(partial, update, contribution)` adds one client's update, which is read block by block, more than once if need
  be, so that it need not be in memory; nor does memory grow with the number of updates;
- `merge(left, right)` combines two partial results (gateways, pool ranks);
- `apply(state, partial)` ends the attempt: the step to add to the model, and the next state;
- `remember(partial)` says which numbers the next attempt begins with (none, for most rules);
- `publish(partial)` says which metrics are shown of the attempt, for rules that let nobody see the clients' own.

A rule that needs all updates of an attempt at once (a median, say) folds nothing: its partial result keeps the updates,
which must stay readable until the attempt ends. Then `gather(state, partial)` makes a partial result with a total of
them, which `apply` gets as usual. It reads the updates and the state in step, block by block (`fedplat.model.rows`).

`fold` and `merge` may reuse the memory of the partial result that they are given, never that of the update. What
`fold` refuses with a `ValueError` has changed nothing; when reading the update fails, the partial result is lost.

A rule is *blockwise* if `init` and `apply` treat the model's entries in blocks: given slices of the state and of the
total that begin at a multiple of `BLOCK` entries, they give the same bits as this slice of the whole. Then the end
of an attempt is computed slice by slice, and no vector of the model's size but the total is in memory. All rules of
this package are. One that looks at the whole step, for its norm say, must declare `blockwise=False`, and whatever wraps
it keeps that: then all its vectors are in memory at once.

The columns of the model's vector may be shared out (`Accumulator` of a `Shard`): then `fold`, `gather` and `apply` see
those of one shard. What `fold` and `gather` need to know of whole updates they ask of `Partial.across`, as `l2_norm`
and the inner products of robust rules do; so no rule knows of shards, and the bits are those without.

New behaviour wraps a rule: `server_momentum(0.9)(clip_by_norm(1.0)(weighted_mean()))`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from fedplat.model import Blocks, Parameters, Schema, Vector
from fedplat.model.shards import ShardReduce, single_shard

State = Mapping[str, Vector]
"""What a rule remembers from round to round: named float32 vectors, all of the model's length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """What is known of one update beside its entries.

    `weight` is what the update counts for, as the job's weighting says. `num_examples` and `metrics` are the client's
    report. `staleness` is the number of versions that were committed since the one that the client began with.
    `client_id` says whose it is, for rules that treat some clients differently.
    """

    weight: float
    num_examples: float = 0.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    staleness: int = 0
    client_id: str = ""


class DeviceAccumulator(Protocol):
    """Memory for a sum of updates that NumPy cannot add to: that of an accelerator."""

    def add(self, start: int, values: Vector, weight: float) -> None:
        """Adds values times a weight to the entries from `start` on: rounded as NumPy does, the product and the sum."""
        ...

    def total(self) -> Vector:
        """The sum."""
        ...


@dataclasses.dataclass(frozen=True)
class Partial:
    """The weighted sum of the updates folded so far, shape [size], with their total weight and number.

    `sums` are further numbers that a rule adds up over the updates, by names of its own; `scalars` those that it
    remembers of the attempt before, which are known while updates are folded. `kept` are the updates of a rule that
    gathers. Where the total is a slice of the model's vector, `first` is the entry that it begins with; updates and
    state are slices then, too, and `across` adds up what is a sum over all entries, such as a norm. What is kept
    `elsewhere` is brought into `total` before `apply`.
    """

    total: Vector
    weight: float = 0.0
    num_updates: int = 0
    sums: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    kept: tuple[tuple[Blocks, Contribution], ...] = ()
    first: int = 0
    reduce_shards: ShardReduce = single_shard
    device: DeviceAccumulator | None = None

    def plus(self, **terms: float) -> Partial:
        """With terms added to its sums of these names."""
        sums = {name: self.sums.get(name, 0.0) + term for name, term in terms.items()}
        return dataclasses.replace(self, sums={**self.sums, **sums})


def _nothing(partial: Partial) -> Mapping[str, float]:
    return {}


def _fits(schema: Schema) -> str:
    return ""


def _same(model: Parameters) -> Parameters:
    return model


@dataclasses.dataclass(frozen=True)
class ClientRequirements:
    """What a rule asks of the job's clients and of its model; by default nothing.

    `algorithm` is what the clients have to compute, by the name that `config.algorithm` gives it; then all updates of
    an attempt weigh the same, since what the clients remember is balanced over clients, not over examples. `extend`
    adds to a model what the rule keeps in it, `reduce` takes that away again for those who use the model.
    `misfit(schema)` says why a model does not do, in words; empty if it does.
    """

    algorithm: str = ""
    extend: Callable[[Parameters], Parameters] = _same
    reduce: Callable[[Parameters], Parameters] = _same
    misfit: Callable[[Schema], str] = _fits


@dataclasses.dataclass(frozen=True)
class Rule:
    """An aggregation rule; see the module's docstring for the functions.

    `metrics` names what every client's report must hold for it (`unusable` says what one lacks). A rule with
    `unit_weights` takes weights for what they are, where others take shares of their sum: a fresh update must weigh 1.
    One that is `from_latest` wants updates as differences from the version that its step is added to, though a client
    began with an older one (`rebased`). `counterpart` is what it asks of clients and model.

    >>> rule = weighted_mean()
    >>> partial = rule.fold(rule.start(2), VectorBlocks(np.array([1.0, 3.0], np.float32)), Contribution(1.0))
    >>> partial = rule.fold(partial, VectorBlocks(np.array([4.0, 0.0], np.float32)), Contribution(2.0))
    >>> step, state = rule.apply(rule.init(2), partial)
    >>> step
    array([3., 1.], dtype=float32)
    """

    init: Callable[[int], State]
    start: Callable[[int], Partial]
    fold: Callable[[Partial, Blocks, Contribution], Partial]
    merge: Callable[[Partial, Partial], Partial]
    apply: Callable[[State, Partial], tuple[Vector, State]]
    remember: Callable[[Partial], Mapping[str, float]] = _nothing
    publish: Callable[[Partial], Mapping[str, float]] | None = None
    blockwise: bool = True
    metrics: frozenset[str] = frozenset()
    unit_weights: bool = False
    from_latest: bool = False
    counterpart: ClientRequirements = ClientRequirements()
    gather: Callable[[Mapping[str, Blocks], Partial], Partial] | None = None


MAX_METRIC = 1e30
"""Numbers that a rule computes with stay in the range of float32."""

Wrapper = Callable[[Rule], Rule]
"""Adds behaviour to a rule."""


def unusable(rule: Rule, metrics: Mapping[str, float]) -> str:
    """Why a report's metrics do not do for a rule, in words; empty if they do."""
    for name in sorted(rule.metrics):
        if name not in metrics:
            return f"the report lacks the metric {name}, which the job's aggregation rule needs"
        if not 0 <= metrics[name] <= MAX_METRIC:
            text = f"the metric {name} is {metrics[name]}; the job's aggregation rule needs a number from 0 to"
            return f"{text} {MAX_METRIC:g}"
    return ""
