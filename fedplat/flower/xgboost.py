"""What goes wrong silently when Flower's `FedXgbBagging` puts the trees of several clients into one model.

Trees are corrections to a `base_score`. Without one in its parameters, XGBoost estimates it from the labels of each
client, and the sum of trees is then wrong for all of them. And `aggregate_bagging` of flwr 1.41 takes as many trees of
a reply as it has parallel trees: of several classes, or several rounds of boosting, it drops the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message

from fedplat.flower.layout import NUMPY


class _Booster(NamedTuple):
    num_trees: int
    base_score: str


def describe_faults(before: ArrayRecord, replies: Sequence[Message], after: ArrayRecord) -> Iterator[str]:
    """Describe what is wrong with the sum of the boosters in some replies; nothing if they are no boosters."""
    records = [each for reply in replies if reply.has_content() for each in reply.content.array_records.values()]
    sent = [found for record in records if (found := _read(record)) is not None]
    result, base = _read(after), _read(before)
    if result is None or not sent:
        return
    scores = sorted({booster.base_score for booster in sent})
    if len(scores) > 1:
        yield (
            f"the clients train XGBoost with different base_score ({', '.join(scores[:3])}), which it estimates from "
            "the labels of each: the sum of their trees is wrong; expected one base_score in the parameters of all"
        )
    expected = sum(booster.num_trees for booster in sent) + (base.num_trees if base is not None else 0)
    if result.num_trees < expected:
        yield (
            f"the strategy has kept {result.num_trees} of {expected} trees of XGBoost: aggregate_bagging of flwr drops "
            "trees of models with several classes or several local rounds; expected two classes and one local round, "
            "or a strategy of your own"
        )


def _read(record: ArrayRecord) -> _Booster | None:
    """Return what a booster as JSON says of itself; None for other arrays."""
    array = record.get("0")
    if array is None or array.stype != NUMPY:
        return None
    try:
        learner: Mapping[str, Any] = json.loads(array.numpy().tobytes())["learner"]
        trees = learner["gradient_booster"]["model"]["trees"]
        return _Booster(len(trees), str(learner["learner_model_param"]["base_score"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
