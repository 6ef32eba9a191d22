"""The rounds of a Flower strategy, so that they continue after a crash, and what it remembers between them.

An app calls `strategy.start(grid, ...)` once, for all rounds. `install` replaces that method, for the grids of fedplat:
the rounds are the same, with a checkpoint before each set of messages. After a crash the app's `main` is called
again; what it does before `start` is repeated, and `start` continues in the middle of its round, with the attributes of
the strategy, its results so far, and the random numbers of that moment.

An app that sends messages of its own before `start`, or has no strategy, begins anew after a crash.

Trees are corrections to a `base_score`. Without one in its parameters, XGBoost estimates it from the labels of each
client, and the sum of trees is then wrong for all of them. And `aggregate_bagging` of flwr 1.41 takes as many trees of
a reply as it has parallel trees: of several classes, or several rounds of boosting, it drops the others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedXgbBagging, Result, Strategy

from fedplat import errors, model, randomness, texts
from fedplat.flower import claims, layout
from fedplat.flower.grid import FlowerGrid

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_flower_start = Strategy.start
_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Progress:
    """How far the calls of `start` in an app have come: a checkpoint has it, pickled.

    `finished` are the results of the calls that have returned. Of the current one, `round` is the round in which it is,
    and `is_training` is true while clients train. `attributes` are those of the strategy.
    """

    finished: list[Result] = dataclasses.field(default_factory=list[Result])
    round: int = 1
    is_training: bool = True
    arrays: ArrayRecord | None = None
    result: Result | None = None
    attributes: bytes = b""
    random_states: bytes = b""
    num_skipped: int = 0
    """The number of rounds in which the strategy has aggregated none of its replies."""


@dataclasses.dataclass
class _Calls:
    """The calls of `start` with one grid.

    `message_ids` are those of the messages to continue with after a crash. `num_sent` counts the sets of messages of
    strategies in this process; if the app has sent other messages, it cannot continue after a crash.
    """

    progress: _Progress = dataclasses.field(default_factory=_Progress)
    num_calls: int = 0
    message_ids: list[str] | None = None
    num_sent: int = 0


def install() -> None:
    """Replace `Strategy.start` by rounds that continue after a crash, for the grids of fedplat."""
    Strategy.start = _start  # pyright: ignore[reportAttributeAccessIssue]


def restore(grid: FlowerGrid, state: bytes, message: model.Parameters) -> None:
    """Let the next call of `start` with this grid continue an earlier run. Raises `FlowerError`.

    `message` is the file of the message that was on its way.
    """
    try:
        progress, message_ids = grid.unpack(state, message)
        grid.rounds = _Calls(grid.load(progress), message_ids=message_ids)
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError, TypeError, ValueError, LookupError) as exc:
        raise errors.FlowerError(
            "the checkpoint of the Flower app cannot be read; expected one of this version of fedplat and of the app: "
            "start the run anew"
        ) from exc


def _start(  # noqa: PLR0913 - the signature of Flower
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: EvaluateFn | None = None,
) -> Result:
    """Run the rounds of a strategy, as `Strategy.start` does; `timeout` has no effect with a grid of fedplat."""
    arguments = (initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
    if not isinstance(grid, FlowerGrid):
        return _flower_start(strategy, grid, *arguments)
    strategy.summary()
    rounds = _Rounds(strategy, grid, train_config or ConfigRecord(), evaluate_config or ConfigRecord())
    return rounds.run(initial_arrays, num_rounds, evaluate_fn)


class _Rounds:
    """One call of `start`."""

    def __init__(
        self, strategy: Strategy, grid: FlowerGrid, train_config: ConfigRecord, evaluate_config: ConfigRecord
    ) -> None:
        self._strategy, self._grid = strategy, grid
        self._train_config, self._evaluate_config = train_config, evaluate_config
        self._use = claims.ReplyUse(strategy, grid.refuse, grid.name_node, grid.max_weight_factor)
        grid.rounds = grid.rounds or _Calls()
        self._calls: _Calls = grid.rounds
        self._warned = set[str]()

    def run(self, initial_arrays: ArrayRecord, num_rounds: int, evaluate_fn: EvaluateFn | None) -> Result:
        """Run all rounds, or those that are left."""
        calls, grid = self._calls, self._grid
        calls.num_calls += 1
        progress = calls.progress
        if calls.num_calls <= len(progress.finished):
            return progress.finished[calls.num_calls - 1]
        if calls.message_ids is None:
            progress.round, progress.is_training, progress.num_skipped = 1, True, 0
            progress.arrays, progress.result = initial_arrays, Result()
            self._evaluate_centrally(progress, 0, evaluate_fn)
        else:
            assign_attributes(self._strategy, progress.attributes)
            randomness.set_states(pickle.loads(progress.random_states))
        while progress.round <= num_rounds:
            self._run_round(progress)
            self._evaluate_centrally(progress, progress.round, evaluate_fn)
            progress.round, progress.is_training = progress.round + 1, True
        assert progress.result is not None
        if progress.num_skipped and progress.num_skipped >= num_rounds and _is_of_flower(self._strategy):
            raise errors.FlowerError(
                f"the strategy {type(self._strategy).__name__} has aggregated no reply in "
                f"{texts.format_count(num_rounds, 'round')}, so the "
                "model is the initial one: it needs more replies in a round (see its warnings)"
            )
        progress.finished.append(progress.result)
        grid.final_arrays = progress.arrays
        return progress.result

    def _run_round(self, progress: _Progress) -> None:
        strategy, number = self._strategy, progress.round
        assert progress.arrays is not None
        assert progress.result is not None
        if progress.is_training:
            replies = self._send_messages(
                lambda: strategy.configure_train(number, progress.arrays, self._train_config, self._grid)  # pyright: ignore[reportArgumentType]
            )
            arrays, metrics = self._use.aggregate(strategy.aggregate_train, number, replies, progress.arrays)
            self._check_aggregated(arrays, metrics, replies)
            if arrays is not None:
                if isinstance(strategy, FedXgbBagging):
                    self._warn_of_trees(progress.arrays, arrays, replies)
                progress.arrays = progress.result.arrays = arrays
            if metrics is not None:
                progress.result.train_metrics_clientapp[number] = metrics
            self._publish(metrics, number)
            progress.is_training = False
        replies = self._send_messages(
            lambda: strategy.configure_evaluate(number, progress.arrays, self._evaluate_config, self._grid)  # pyright: ignore[reportArgumentType]
        )
        assert progress.arrays is not None
        metrics = self._use.aggregate(strategy.aggregate_evaluate, number, replies, progress.arrays)
        if metrics is not None:
            progress.result.evaluate_metrics_clientapp[number] = metrics
        self._publish(metrics, number)

    def _check_aggregated(
        self, arrays: ArrayRecord | None, metrics: MetricRecord | None, replies: Sequence[Message]
    ) -> None:
        """Warn of a round whose replies have changed nothing."""
        progress, num_replies = self._calls.progress, sum(reply.has_content() for reply in replies)
        if arrays is not None or metrics is not None or not num_replies:
            return
        name = type(self._strategy).__name__
        text = "Round %d: the strategy %s has aggregated none of %d replies; the model stays as it was."
        _logger.warning(text, progress.round, name, num_replies)
        progress.num_skipped += 1

    def _warn_of_trees(self, before: ArrayRecord, after: ArrayRecord, replies: Sequence[Message]) -> None:
        """Warn once of each fault in a sum of boosters."""
        used = [reply for reply in replies if reply.metadata.src_node_id not in self._grid.refused]
        for text in describe_faults(before, used, after):
            if text[:20] not in self._warned:
                self._warned.add(text[:20])
                _logger.warning("Round %d: %s.", self._calls.progress.round, text)

    def _send_messages(self, configure: Callable[[], Iterable[Message]]) -> list[Message]:
        """Send messages and return the replies, after a checkpoint; or continue with those that were on their way."""
        calls, grid = self._calls, self._grid
        if (message_ids := calls.message_ids) is not None:
            calls.message_ids = None
            grid.take_snapshot = self._take_snapshot
            return grid.wait_for(message_ids)
        messages = list(configure())
        if messages and grid.num_sent == calls.num_sent:
            grid.take_next_snapshot = self._take_snapshot
        calls.num_sent += bool(messages)
        return grid.send_and_receive(messages)

    def _take_snapshot(self) -> bytes:
        """Return the progress of this call, pickled; the app waits for replies meanwhile."""
        progress = self._calls.progress
        progress.attributes = pickle_attributes(self._strategy)
        progress.random_states = pickle.dumps(randomness.get_states())
        return self._grid.dump(progress)

    def _evaluate_centrally(self, progress: _Progress, number: int, evaluate_fn: EvaluateFn | None) -> None:
        if evaluate_fn is None:
            return
        assert progress.arrays is not None
        assert progress.result is not None
        metrics = evaluate_fn(number, progress.arrays)
        if metrics is not None:
            progress.result.evaluate_metrics_serverapp[number] = metrics
            self._publish(metrics, number)

    def _publish(self, metrics: MetricRecord | None, number: int) -> None:
        self._grid.publish({"server-round": number, **(metrics or {})})


def _is_of_flower(strategy: Strategy) -> bool:
    """Return whether Flower itself aggregates: a strategy of a user may have its results elsewhere."""
    return strategy.aggregate_train.__module__.startswith("flwr.")


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
    if array is None or array.stype != layout.NUMPY:
        return None
    try:
        learner: Mapping[str, Any] = json.loads(array.numpy().tobytes())["learner"]
        trees = learner["gradient_booster"]["model"]["trees"]
        return _Booster(len(trees), str(learner["learner_model_param"]["base_score"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def pickle_attributes(strategy: Strategy) -> bytes:
    """Return the attributes of a strategy, and of strategies inside it, except those that no file can hold.

    The others are functions and open resources, which are made again with the strategy.
    """
    found: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        try:
            found[name] = (
                ("strategy", pickle_attributes(value)) if isinstance(value, Strategy) else ("", pickle.dumps(value))
            )
        except Exception:
            continue
    return pickle.dumps(found)


def assign_attributes(strategy: Strategy, attributes: bytes) -> None:
    """Give a new strategy the attributes of another one. They must come from `pickle_attributes` of this machine."""
    for name, (kind, content) in pickle.loads(attributes).items():
        inner = getattr(strategy, name, None)
        if kind and isinstance(inner, Strategy):
            assign_attributes(inner, content)
        elif not kind:
            setattr(strategy, name, pickle.loads(content))
