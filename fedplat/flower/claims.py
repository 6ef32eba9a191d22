"""What replies of clients claim, and the checks so that one client cannot end or decide the rounds of all others.

Flower's strategies raise an exception if one reply has other records, keys or shapes than the others, or if the weights
add up to 0; and one client that claims 1e15 examples decides their mean alone. A reply that deviates from those of most
clients becomes an error reply, as if its client had failed. So does a reply without which a strategy can aggregate the
others, and cannot with it. None counts for more than `max_weight_factor` times the median number of examples.

The numbers in the arrays were checked when the replies arrived (`layout.check_reply`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedplat import claims
from fedplat.claims import DEFAULT_LIMITS, MAX_EXAMPLES
from fedplat.errors import FlowerError
from fedplat.flower import layout, records
from fedplat.flower.records import FAILED, NUM_EXAMPLES

MIN_CLAIMS = 3
"""With fewer replies there is no majority: either of two could be the wrong one."""
_OLD_NUM_EXAMPLES = "num_examples"
"""The name of the number of examples in Flower's old API."""


def read_claims(content: RecordDict) -> tuple[float, dict[str, float]]:
    """Return the number of examples of a reply (1 if it has none), and those of its metrics that can be reported.

    The reply itself keeps all metrics: these are what fedplat shows.
    """
    num_examples, metrics = 1.0, list[tuple[str, object]]()
    for record in content.values():
        if not isinstance(record, MetricRecord):
            continue
        for name, value in record.items():
            if name not in (NUM_EXAMPLES, _OLD_NUM_EXAMPLES):
                metrics.append((name, value))
            elif isinstance(value, int | float):
                num_examples = 1.0 if claims.check_examples(value) else float(value)
    return num_examples, select_metrics(metrics)


def limit_old_claims(contents: Mapping[str, RecordDict], factor: float) -> list[str]:
    """Limit the numbers of examples in replies of Flower's old API, in place; return what was wrong, by their names.

    None counts for more than `factor` times the median of three or more; 0: no limit. Its strategies divide by the sum,
    and the mean of replies without any example is NaN.
    """
    records = {
        name: record
        for name, content in contents.items()
        for key, record in content.metric_records.items()
        if key.endswith(f".{_OLD_NUM_EXAMPLES}") and isinstance(record.get(_OLD_NUM_EXAMPLES), int)
    }
    values = {name: int(record[_OLD_NUM_EXAMPLES]) for name, record in records.items()}  # type: ignore[arg-type]
    if values and not any(values.values()):
        return [f"the {_OLD_NUM_EXAMPLES} of all {len(values)} replies add up to 0 ({', '.join(sorted(values)[:5])})"]
    if not factor or len(values) < MIN_CLAIMS:
        return []
    most = int(factor * median_low(values.values()))
    heavy = {name: value for name, value in values.items() if value > most > 0}
    for name in heavy:
        records[name][_OLD_NUM_EXAMPLES] = most
    return [
        f"the {_OLD_NUM_EXAMPLES} = {value:g} of {name} counts as {most}, {factor:g} times the median "
        "(flower.max_weight_factor)"
        for name, value in heavy.items()
    ]


def select_metrics(values: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Return the values that can be reported as metrics: finite numbers, as many as a report may have."""
    metrics = dict[str, float]()
    name_bytes = 0
    for name, value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        name_bytes += len(name.encode()) if name not in metrics else 0
        fits = len(metrics) < DEFAULT_LIMITS.num_metrics and name_bytes <= DEFAULT_LIMITS.name_bytes
        if (fits or name in metrics) and not claims.check_metrics({name: float(value)}):
            metrics[name] = float(value)
    return metrics


MAX_SEARCHED = 64
"""Number of replies that are left out in turn when a strategy fails; each costs one more aggregation."""
_NAMED = 5
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReplyUse:
    """How a strategy uses replies. `refuse` is called with the node of each reply that is left out, and why."""

    strategy: Strategy
    refuse: Callable[[int, str], object]
    name_node: Callable[[int], str]
    max_weight_factor: float = 0.0

    def aggregate(
        self,
        aggregate: Callable[[int, Sequence[Message]], Any],
        number: int,
        replies: Sequence[Message],
        sent: ArrayRecord,
    ) -> Any:
        """Return what a method of the strategy makes of the replies of a round, without those that it cannot use.

        `sent` are the arrays that the round began with. The methods of Flower's own strategies get only replies that
        fit together. A user's method may be made for replies of several kinds: it gets all of them, and those that fit
        together only if it raises an exception.
        """
        weight = str(getattr(self.strategy, "weighted_by_key", NUM_EXAMPLES))
        misfits = find_misfits(replies, weight, sent)
        replies = self._limit_weights(replies, weight, misfits)
        restore = _remember(self.strategy)

        def attempt(problems: Mapping[int, str], *, with_errors: bool = True) -> Any:
            passed = [_pass_on(reply, problems.get(index)) for index, reply in enumerate(replies)]
            result = aggregate(number, [reply for reply in passed if with_errors or reply.has_content()])
            arrays = result[0] if isinstance(result, tuple) and result else None
            if isinstance(arrays, ArrayRecord) and not _is_finite(arrays) and _is_finite(sent):
                name = type(self.strategy).__name__
                raise FlowerError(f"the strategy {name} made arrays with NaN or infinite numbers of finite replies")
            return result

        # Whether the method is one of a user's strategy, or of Flower's.
        problems: Mapping[int, str] = misfits if aggregate.__module__.startswith("flwr.") else {}
        try:
            result = attempt(problems)
        except Exception as exc:  # of the strategy: the next attempts raise it again if no reply is the cause
            self._check_weights(replies, weight, misfits, exc)
            problems, result = _search(attempt, restore, replies, misfits, exc)
        for index, text in problems.items():
            node = replies[index].metadata.src_node_id
            _logger.warning("A reply of %s was refused: %s.", self.name_node(node), text)
            self.refuse(node, text)
        return result

    def _limit_weights(self, replies: Sequence[Message], weight: str, misfits: Mapping[int, str]) -> Sequence[Message]:
        """Return the replies with no weight above `max_weight_factor` times the lower median."""
        weights = _read_weights(replies, weight, misfits)
        if not self.max_weight_factor or len(weights) < MIN_CLAIMS:
            return replies
        most = self.max_weight_factor * median_low(weights.values())
        limited = list(replies)
        for index, claimed in weights.items():
            if claimed > most > 0:
                limited[index] = _with_weight(replies[index], weight, most)
                node = self.name_node(replies[index].metadata.src_node_id)
                text = "The %s = %g of %s counts as %g, %g times the median (flower.max_weight_factor)."
                _logger.warning(text, weight, claimed, node, most, self.max_weight_factor)
        return limited

    def _check_weights(
        self, replies: Sequence[Message], weight: str, misfits: Mapping[int, str], cause: Exception
    ) -> None:
        """Raise `FlowerError` if a strategy has failed because all weights are 0."""
        weights = _read_weights(replies, weight, misfits)
        if not weights or any(weights.values()):
            return
        nodes = sorted(self.name_node(replies[index].metadata.src_node_id) for index in weights)
        names = ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else "")
        raise FlowerError(
            f"the {weight} of all {len(nodes)} replies add up to 0 (from {names}), so they have no mean; expected a "
            "client with examples (a ClientApp without data can raise an exception)"
        ) from cause


def find_misfits(replies: Sequence[Message], weight: str, sent: ArrayRecord) -> dict[int, str]:
    """Return which replies do not fit together with most others, by their index, and why.

    Shapes are compared only if most replies have those of `sent`: the trees of XGBoost may have any size.
    """
    contents = {index: reply.content for index, reply in enumerate(replies) if reply.has_content()}
    problems = {index: text for index, content in contents.items() if (text := _describe_weight(content, weight))}
    expected = _shapes(RecordDict({"arrays": sent}))
    for describe, text in ((_records, "records or keys"), (_shapes, "shapes or kinds of arrays")):
        found = {index: describe(content) for index, content in contents.items() if index not in problems}
        usual, count = Counter(found.values()).most_common(1)[0] if found else (None, 0)
        if 2 * count > len(found) and (describe is _records or usual == expected):
            problems |= {index: f"its {text} are not those of most replies" for index in found if found[index] != usual}
    return problems


def _search(
    attempt: Callable[..., Any],
    restore: Callable[[], None],
    replies: Sequence[Message],
    misfits: Mapping[int, str],
    cause: Exception,
) -> tuple[Mapping[int, str], Any]:
    """Return the replies that are the cause of a strategy's failure, with the result without them.

    They are the misfits, or one more reply. Some strategies fail with error replies: they get none of them then. Raises
    `cause` if the strategy fails without any of them.
    """
    others = [index for index, reply in enumerate(replies) if reply.has_content() and index not in misfits]
    text = f"the strategy cannot use it: {type(cause).__name__}: {cause}"
    blamed: list[Mapping[int, str]] = [misfits] if len(others) < len(replies) else []
    if len(others) >= MIN_CLAIMS:
        blamed += [{**misfits, index: text} for index in others[:MAX_SEARCHED]]
    for problems, with_errors in itertools.product(blamed, (True, False)):
        restore()
        try:
            return problems, attempt(problems, with_errors=with_errors)
        except Exception as exc:
            _logger.debug("The strategy fails without the replies %s as well: %s", list(problems), exc)
    raise cause


def _remember(strategy: Strategy) -> Callable[[], None]:
    """Return a function that undoes what an aggregation that fails has changed: attributes, and what is in them."""
    attributes, contents = dict(vars(strategy)), list[tuple[Any, Any]]()
    for value in attributes.values():
        if isinstance(value, dict | list | ArrayRecord):
            contents.append((value, list(value) if isinstance(value, list) else dict(value)))
    inner = [_remember(value) for value in attributes.values() if isinstance(value, Strategy)]

    def restore() -> None:
        vars(strategy).clear()
        vars(strategy).update(attributes)
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        for each in inner:
            each()

    return restore


def _pass_on(reply: Message, problem: str | None) -> Message:
    """Return a reply for one call of a strategy, which may empty its records, or an error reply."""
    if problem is None and reply.has_error():
        return reply
    answer = Error(FAILED, problem) if problem is not None else _copy_content(reply.content)
    return Message(answer, metadata=reply.metadata)  # pyright: ignore[reportCallIssue]


def _copy_content(content: RecordDict) -> RecordDict:
    """Return other records with the same arrays and values."""
    copied = RecordDict()
    for name, record in content.items():
        made: Any = type(record)()
        for key, value in record.items():
            made[key] = value
        copied[name] = made
    return copied


def _with_weight(reply: Message, weight: str, most: float) -> Message:
    content = _copy_content(reply.content)
    for record in content.metric_records.values():
        if weight in record:
            record[weight] = int(most) if isinstance(record[weight], int) else most
    return Message(content, metadata=reply.metadata)  # pyright: ignore[reportCallIssue]


def _read_weights(replies: Sequence[Message], weight: str, misfits: Mapping[int, str]) -> dict[int, float]:
    """Return the weights of the replies that have one, by their index."""
    found = dict[int, float]()
    for index, reply in enumerate(replies):
        if reply.has_content() and index not in misfits:
            for record in reply.content.metric_records.values():
                if isinstance(value := record.get(weight), int | float):
                    found[index] = value
    return found


def _is_finite(arrays: ArrayRecord) -> bool:
    values = (records.view_array(array) for array in arrays.values())
    return all(each is None or layout.is_array_finite(each) for each in values)


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
        (key, array.shape, _kind(array.dtype))
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for key, array in sorted(record.items())
    )


def _kind(dtype: str) -> str:
    """Return "real" for the dtypes that strategies can average with each other."""
    return "real" if dtype.startswith(("float", "int", "uint", "bfloat", "bool")) else dtype
