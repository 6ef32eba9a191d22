"""The aggregation algebra: the definition of an aggregation rule, its options, and the composition of rules.

A rule is a frozen record of pure functions over flat float32 vectors (fedjax's `(init, apply)` pairs, with an explicit
reduction over clients, so that updates can be streamed):

- `init(size)` creates the state that lasts as long as the job (a momentum, for instance): named vectors, maybe none;
- `start(size)` creates the empty partial result of one attempt;
- `fold(partial, update, contribution)` adds one client's update. The update is read block by block, more than once if
  necessary, so it need not be in memory, and memory does not grow with the number of updates;
- `merge(left, right)` combines two partial results (gateways, ranks of the server's workers);
- `apply(state, partial)` ends the attempt: it returns the step to add to the model, and the next state;
- `remember(partial)` returns the scalars with which the next attempt starts (none, for most rules);
- `publish(partial)` returns the metrics to publish, for rules that must not reveal the clients' own metrics.

A rule that needs all updates of an attempt at once (a median, for instance) folds nothing: its partial result keeps the
updates, which must stay readable until the attempt ends. Then `gather(state, partial)` returns a partial result with
their total, which `apply` receives as usual. It reads the updates and the state in lockstep, block by block
(`fedplat.model.blocks`). A rule that needs them again only in rare cases does both: it folds an update, and keeps it.

A rule that `keeps_memory` has state of any form, which only it can read, such as that of an optimizer of another
library: bytes of any length, which are stored with the vectors. It gathers: `gather` finds the bytes of the previous
attempt in `partial.memory`, and the base version in `partial.base`, and returns a partial result with the next bytes.
Its columns are not sharded.

`fold` and `merge` may reuse the memory of the partial results passed to them, never the memory of the update. If `fold`
refuses an update with a `ValueError`, nothing has changed; if reading the update fails, the partial result is lost.

A rule is *blockwise* if `init` and `apply` process the model's entries in blocks: for slices of the state and of the
total that begin at a multiple of `BLOCK` entries, they return the same bits as for this slice of the whole vectors. The
end of an attempt is then computed slice by slice, and the only vector of the model's size in memory is the total. A
rule that needs the whole step, for instance for its norm, must declare `blockwise=False`, and its wrappers must keep
that: all its vectors are then in memory at once. SCAFFOLD and compressed steps do so.

The columns of the model's vector may be sharded (`Accumulator` with a `Shard`): `fold`, `gather` and `apply` then see
the columns of one shard. For sums over whole updates, `fold` and `gather` use `Partial.reduce_shards`, as `l2_norm` and
the inner products of robust rules do. So rules need no code for shards, and sharding does not change the bits.

New behaviour wraps a rule: `server_momentum(FedAvgM())(clip_by_norm(1.0)(weighted_mean()))`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Protocol

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.model import SERVER, Blocks, FlatModel, Parameters, Schema, Vector
from fedplat.model.blocks import ShardReduce, single_shard

MEAN_WEIGHT = "mean_weight"
"""The sum of the factors of the updates in the total, if these are not the weights: in `Partial.sums`."""
State = Mapping[str, Vector]
"""The state of a rule between rounds: named float32 vectors, all of the model's length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """The data of one update besides its entries.

    `weight` is the update's weight under the job's weighting. `num_examples` and `metrics` are the client's report.
    `staleness` is the number of versions committed since the version that the client started from. `client_id`
    identifies the client, for rules that treat some clients differently.
    """

    weight: float
    num_examples: float = 0.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    staleness: int = 0
    client_id: str = ""


class DeviceAccumulator(Protocol):
    """A sum of updates in the memory of an accelerator, to which NumPy cannot add."""

    def add(self, start: int, values: Vector, weight: float) -> None:
        """Add values times a weight to the entries from `start` on; product and sum are each rounded as in NumPy."""
        ...

    def total(self) -> Vector:
        """Return the sum."""
        ...


@dataclasses.dataclass(frozen=True)
class Partial:
    """The weighted sum of the updates folded so far, shape [size], with their total weight and number.

    `sums` are further numbers that a rule adds up over the updates, under its own names. `scalars` are the numbers that
    the previous attempt returned from `remember`, available while updates are folded. `kept` are the updates of a rule
    that gathers; `memory` and `base` are for one that keeps a memory. If the total is a slice of the model's vector,
    `first` is the index of its first entry; updates and state are then slices too, and `reduce_shards` computes sums
    over all entries, such as a norm. `statistics` are the columns that are averaged under every rule, for `apply`. If
    `device` is set, it holds the sum, which is copied to `total` before `apply`.

    `schema` is that of the model, for rules that treat some tensors in another way; None outside an attempt. In
    `apply`, `whole` is the total of all columns, of which `total` may be a slice, and `base` is the base version.
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
    memory: bytes = b""
    base: FlatModel | None = None
    statistics: tuple[range, ...] = ()
    schema: Schema | None = None
    whole: Vector | None = None

    def plus(self, **terms: float) -> Partial:
        """Return a copy with terms added to its sums of these names."""
        sums = {name: self.sums.get(name, 0.0) + term for name, term in terms.items()}
        return dataclasses.replace(self, sums={**self.sums, **sums})


def _no_scalars(partial: Partial) -> Mapping[str, float]:
    return {}


def _accept_schema(schema: Schema) -> str:
    return ""


def _identity(model: Parameters) -> Parameters:
    return model


@dataclasses.dataclass(frozen=True)
class ClientRequirements:
    """The requirements of a rule for the job's clients and its model; empty by default.

    `algorithm` is the local algorithm of the clients: the required value of `config.algorithm` or, for the two halves
    of a plugin, the options record that `config.algorithm` has to name, whatever the name is. If it is set, all updates
    of an attempt have equal weight, because client state is balanced over clients, not over examples. `extend`
    adds the rule's own tensors to a model; `reduce` removes them for users of the model. `misfit(schema)` returns why a
    model is unsuitable, or "". With `has_server_tensors`, some of these tensors are the server's own (`server/NAME`):
    clients get them with the model and never upload them.
    """

    algorithm: str | type[msgspec.Struct] = ""
    extend: Callable[[Parameters], Parameters] = _identity
    reduce: Callable[[Parameters], Parameters] = _identity
    misfit: Callable[[Schema], str] = _accept_schema
    has_server_tensors: bool = False

    def explain_misfit(self, schema: Schema) -> str:
        """Return why a model is unsuitable for the rule, or ""."""
        if schema.uploaded is not schema and not self.has_server_tensors:
            name = next(tensor.name for tensor in schema.tensors if tensor.name.startswith(SERVER))
            return (
                f"the tensor {name!r} has the prefix {SERVER} of tensors that clients do not upload, and the job's "
                "aggregation rule has none; expected another name"
            )
        return self.misfit(schema)


@dataclasses.dataclass(frozen=True)
class Rule:
    """An aggregation rule; see the module's docstring for the functions.

    `metrics` are the names of the metrics that every report must have (`describe_metrics_problem` checks a report). A
    rule with `unit_weights` uses weights as absolute factors instead of fractions of their sum, so a fresh update must
    have weight 1. A rule that is `from_latest` requires updates as differences from the version to which its step is
    added, even if a client started from an older one (`rebase`). One that `keeps_memory` reads and returns
    `Partial.memory`. A rule that is `nonlinear` multiplies tensors of one client's update with each other, so it needs
    each update as the client computed it. `requirements` are those for clients and model.

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
    remember: Callable[[Partial], Mapping[str, float]] = _no_scalars
    publish: Callable[[Partial], Mapping[str, float]] | None = None
    blockwise: bool = True
    metrics: frozenset[str] = frozenset()
    unit_weights: bool = False
    from_latest: bool = False
    requirements: ClientRequirements = ClientRequirements()
    gather: Callable[[Mapping[str, Blocks], Partial], Partial] | None = None
    keeps_memory: bool = False
    nonlinear: bool = False


class BaseRule(msgspec.Struct, frozen=True):
    """The base of options records of rules.

    A rule that `works_on_mean` uses only the mean of the updates. So it can also work on the result of a robust rule,
    or on the noisy mean of a private job.
    """

    works_on_mean: ClassVar[bool] = False


MAX_METRIC = 1e30
"""Largest value of a metric that a rule uses, so that its results stay in the range of float32."""

Wrapper = Callable[[Rule], Rule]
"""A function that adds behaviour to a rule."""


def describe_metrics_problem(rule: Rule, metrics: Mapping[str, float]) -> str:
    """Return why a report's metrics are unusable for a rule, or ""."""
    for name in sorted(rule.metrics):
        if name not in metrics:
            return f"the report lacks the metric {name}, which the job's aggregation rule needs"
        if not 0 <= metrics[name] <= MAX_METRIC:
            text = f"the metric {name} is {metrics[name]}; the job's aggregation rule needs a number from 0 to"
            return f"{text} {MAX_METRIC:g}"
    return ""


Rate = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
"""A step size: finite in float32, so never infinite or NaN."""
Coefficient = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
"""A factor of a term that may be left out: finite in float32."""
Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""A decay factor: the fraction of the past that is kept from round to round."""
Exponent = Annotated[float, msgspec.Meta(ge=0, le=10)]
"""An exponent of numbers that may be large: the power must stay finite."""
Population = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
"""A number of clients."""
Floor = Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)]
"""A lower bound of a denominator: still above 0 in float32."""


def check_ranges(options: msgspec.Struct) -> None:
    """Raise `ValueError` if a field is out of its declared range.

    msgspec checks records that it decodes, but not those created in Python; this function checks the latter.
    """
    for field in msgspec.structs.fields(type(options)):
        value = getattr(options, field.name)
        try:
            msgspec.convert(value, prepare_type(field.type))
        except msgspec.ValidationError as exc:
            raise ValueError(f"{field.name} is {value!r}: {exc}") from exc
