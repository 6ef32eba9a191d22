"""Checks of replies, so that the reply of one client cannot end the rounds of all others.

Flower's strategies raise an exception if one reply has other records, keys or shapes than the others, or if the weights
add up to 0. A reply that deviates from those of most clients becomes an error reply, as if its client had failed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedplat.claims import MAX_EXAMPLES
from fedplat.flower.envelopes import FAILED
from fedplat.flower.messages import NUM_EXAMPLES

_logger = logging.getLogger(__name__)


def aggregate_usable(
    strategy: Strategy,
    aggregate: Callable[[int, Sequence[Message]], Any],
    number: int,
    replies: Sequence[Message],
    sent: ArrayRecord,
) -> Any:
    """Return what a method of a strategy makes of the replies of a round, without those that no strategy can use.

    `sent` are the arrays that the round began with. The methods of Flower's own strategies get only replies that fit
    together. A user's method may be made for replies of several kinds: it gets all of them, and those that fit together
    only if it raises an exception.
    """
    usable = refuse_misfits(replies, getattr(strategy, "weighted_by_key", NUM_EXAMPLES), sent)
    if usable is replies or aggregate.__module__.startswith("flwr."):
        return aggregate(number, usable)
    try:
        return aggregate(number, replies)
    except Exception:
        return aggregate(number, usable)


def refuse_misfits(replies: Sequence[Message], weight: str, sent: ArrayRecord) -> Sequence[Message]:
    """Return the replies, with error replies in place of those that do not fit; the same object if all of them fit.

    Shapes are compared only if most replies have those of `sent`: the trees of XGBoost may have any size.
    """
    contents = {index: reply.content for index, reply in enumerate(replies) if reply.has_content()}
    problems = {index: text for index, content in contents.items() if (text := _describe_weight(content, weight))}
    expected = _shapes(RecordDict({"arrays": sent}))
    for describe, text in ((_records, "records or keys"), (_shapes, "shapes of arrays")):
        found = {index: describe(content) for index, content in contents.items() if index not in problems}
        usual, count = Counter(found.values()).most_common(1)[0] if found else (None, 0)
        if 2 * count > len(found) and (describe is _records or usual == expected):
            problems |= {index: f"its {text} are not those of most replies" for index in found if found[index] != usual}
    if not problems:
        return replies
    for index, text in problems.items():
        _logger.warning("A reply of node %d was refused: %s.", replies[index].metadata.src_node_id, text)
    return [_refuse(reply, problems[index]) if index in problems else reply for index, reply in enumerate(replies)]


def _refuse(reply: Message, text: str) -> Message:
    return Message(Error(FAILED, text), metadata=reply.metadata)  # pyright: ignore[reportCallIssue]


def _describe_weight(content: RecordDict, weight: str) -> str:
    """Return what is wrong with a reply's weight, or ""."""
    for record in content.values():
        value = record.get(weight, 1) if isinstance(record, MetricRecord) else 1
        if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= MAX_EXAMPLES:
            return f"its {weight} is no number from 0 to {MAX_EXAMPLES:g}"
    return ""


def _records(content: RecordDict) -> Hashable:
    """Return the kinds of the records, and the keys of arrays and metrics."""
    kinds = Counter(type(record).__name__ for record in content.values())
    keys = [frozenset(record) for record in content.values() if isinstance(record, ArrayRecord | MetricRecord)]
    return frozenset(kinds.items()), tuple(keys)


def _shapes(content: RecordDict) -> Hashable:
    return tuple(
        (key, array.shape)
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for key, array in sorted(record.items())
    )
