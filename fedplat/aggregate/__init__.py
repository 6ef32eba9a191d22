"""Aggregation: how the updates of a round become the next model version.

`algebra.py` defines rules, `mean.py` is the reduction, and each algorithm is a short composition of wrappers. Rules
that replace the mean are in `robust/`. `docs/contributing.md` has the steps to add a rule.

>>> rule = server_momentum(FedAvgM(momentum=0.5))(clip_by_norm(1.0)(weighted_mean()))
>>> update = VectorBlocks(np.array([3.0, 4.0], np.float32))
>>> step, state = rule.apply(rule.init(2), rule.fold(rule.start(2), update, Contribution(1.0)))
>>> step.round(3)
array([0.6, 0.8], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

from fedplat.aggregate.accumulator import Accumulator, PartialSummary, ResultPart, Shard
from fedplat.aggregate.algebra import (
    BaseRule,
    ClientRequirements,
    Contribution,
    DeviceAccumulator,
    Partial,
    Rule,
    State,
    Wrapper,
    describe_metrics_problem,
)
from fedplat.aggregate.asynchronous import FedAsync, FedBuff, divide_by_number, rebase
from fedplat.aggregate.clipping import AdaptiveClip, clip_by_norm, clip_by_quantile
from fedplat.aggregate.downlink import compress_step, seed_of
from fedplat.aggregate.drift import (
    Easgd,
    FedDyn,
    LocalEasgd,
    LocalFedDyn,
    LocalScaffold,
    Scaffold,
    server_feddyn,
    server_scaffold,
)
from fedplat.aggregate.fedex_lora import FedExLora
from fedplat.aggregate.flora import Flora
from fedplat.aggregate.local import (
    Correction,
    LocalAlgorithm,
    LocalEnding,
    LocalFedProx,
    LocalSgd,
    LocalStart,
    LossContext,
    StartContext,
    UpdateDirection,
)
from fedplat.aggregate.mean import (
    average_statistics,
    describe_statistics,
    hold_resting,
    restrict_to_mean,
    weighted_mean,
)
from fedplat.aggregate.robust import MAX_ROBUST_UPDATES, Robust
from fedplat.aggregate.server_optimizers import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    server_adagrad,
    server_adam,
    server_momentum,
    server_optimizer,
    server_sgd,
    server_yogi,
)
from fedplat.aggregate.state import (
    column_start,
    columns_of,
    first_columns,
    memory_from_bytes,
    read_columns,
    read_memory,
    read_scalars,
    scalars_to_bytes,
    state_from_bytes,
    state_schema,
    state_to_bytes,
)
from fedplat.aggregate.weighting import FedNova, QFedAvg, normalize_by_steps, weight_by_loss
from fedplat.config.plugins import Kind, by_name, define
from fedplat.model.blocks import l2_norm, scale_vector


@runtime_checkable
class RuleOptions(Protocol):
    """The `[aggregation]` table of a job file: the options of a rule, selected by the key `rule`."""

    works_on_mean: ClassVar[bool]

    def build(self) -> Rule:
        """Return the rule with these options."""
        ...


RULES: Mapping[str, type[RuleOptions]] = by_name(
    FedAvg,
    FedAvgM,
    FedAdam,
    FedYogi,
    FedAdagrad,
    FedNova,
    QFedAvg,
    FedBuff,
    FedAsync,
    Easgd,
    Scaffold,
    FedDyn,
    FedExLora,
    Flora,
)
"""The options record of each rule that is defined here, by its name in a job file."""

define(Kind("rules", "rule", "an aggregation rule", RuleOptions, ("build",), RULES, BaseRule))


@runtime_checkable
class LocalAlgorithmOptions(Protocol):
    """The options of a client's local algorithm in `[config]`, selected by the key `algorithm`."""

    def build(self) -> LocalAlgorithm:
        """Return the algorithm with these options."""
        ...


LOCAL_ALGORITHMS: Mapping[str, type[LocalAlgorithmOptions]] = by_name(
    LocalSgd, LocalFedProx, LocalScaffold, LocalFedDyn, LocalEasgd
)
"""The options record of each built-in local algorithm, by its name in a job file."""

LOCAL_ALGORITHM = define(
    Kind("algorithms", "algorithm", "a local algorithm", LocalAlgorithmOptions, ("build",), LOCAL_ALGORITHMS)
)

__all__ = [
    "LOCAL_ALGORITHM",
    "LOCAL_ALGORITHMS",
    "MAX_ROBUST_UPDATES",
    "RULES",
    "Accumulator",
    "AdaptiveClip",
    "BaseRule",
    "ClientRequirements",
    "Contribution",
    "Correction",
    "DeviceAccumulator",
    "Easgd",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedDyn",
    "FedExLora",
    "FedNova",
    "FedYogi",
    "Flora",
    "LocalAlgorithm",
    "LocalAlgorithmOptions",
    "LocalEasgd",
    "LocalEnding",
    "LocalFedDyn",
    "LocalFedProx",
    "LocalScaffold",
    "LocalSgd",
    "LocalStart",
    "LossContext",
    "Partial",
    "PartialSummary",
    "QFedAvg",
    "ResultPart",
    "Robust",
    "Rule",
    "RuleOptions",
    "Scaffold",
    "Shard",
    "StartContext",
    "State",
    "UpdateDirection",
    "Wrapper",
    "average_statistics",
    "clip_by_norm",
    "clip_by_quantile",
    "column_start",
    "columns_of",
    "compress_step",
    "describe_metrics_problem",
    "describe_statistics",
    "divide_by_number",
    "first_columns",
    "hold_resting",
    "l2_norm",
    "memory_from_bytes",
    "normalize_by_steps",
    "read_columns",
    "read_memory",
    "read_scalars",
    "rebase",
    "restrict_to_mean",
    "scalars_to_bytes",
    "scale_vector",
    "seed_of",
    "server_adagrad",
    "server_adam",
    "server_feddyn",
    "server_momentum",
    "server_optimizer",
    "server_scaffold",
    "server_sgd",
    "server_yogi",
    "state_from_bytes",
    "state_schema",
    "state_to_bytes",
    "weight_by_loss",
    "weighted_mean",
]
