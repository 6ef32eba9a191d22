"""A Flower strategy as the aggregation rule of an ordinary job: called once with the updates of each round.

The strategy sees what it would see in Flower: `configure_train` with the base version's arrays, and then
`aggregate_train` with one reply for each update. A reply has an ArrayRecord, the client's model (base plus update), and
a MetricRecord with the client's metrics and its weight under the job's weighting as `num-examples`. Selection,
deadlines and evaluation are fedplat's. Tensors that are not floating-point are carried by the job's own rule, and the
strategy does not see them. The strategy's attributes are the rule's memory, stored with each version; so a restarted
server makes the same version again.

Random numbers that the strategy draws from the global generators follow from the base version, which clients know: they
are for choices, not for the noise of differential privacy.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import flwr.serverapp.strategy
import msgspec
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedplat import randomness
from fedplat.aggregate import Contribution, Partial
from fedplat.config import plugins, user_code
from fedplat.config.decoding import prepare_type
from fedplat.errors import FedplatError, FlowerError, PluginError
from fedplat.flower import durable, identity, records, strategies
from fedplat.flower.records import NUM_EXAMPLES, share_arrays
from fedplat.model import FLOATING, Blocks, FlatModel, Parameters, Vector
from fedplat.texts import format_count, format_numbers, quote

MAX_QUERIES = 10
"""Times that a strategy may ask for the clients of a round: one that waits for more of them asks without end."""
_lock = threading.Lock()  # of the global random number generators, and of the process's identity


class _Memory(msgspec.Struct, frozen=True):
    """The memory of the rule: the number of rounds so far, and the strategy's pickled attributes."""

    round: int = 0
    attributes: bytes = b""


def make_strategy(options: strategies.FlowerStrategy, arguments: Mapping[str, Any]) -> Strategy:
    """Return a new strategy. Raises `PluginError` or `UserCodeError`."""
    name = plugins.name_of(options)
    place = f'aggregation.strategy = "{name}"'
    own = options.find()
    if own is None and name not in flwr.serverapp.strategy.__all__:
        raise PluginError(f"{place}: the installed flwr has no such strategy")
    kind = getattr(flwr.serverapp.strategy, name) if own is None else own
    if not issubclass(kind, Strategy):
        raise PluginError(f"{place}: {kind.__name__} is not a strategy; expected a subclass of Flower's Strategy")
    try:
        with user_code.wrap_errors(place):
            return kind(**arguments)
    except FedplatError as exc:
        if isinstance(exc.__cause__, TypeError):  # an unknown argument, or a missing one
            raise PluginError(f"{place}: {exc.__cause__}; expected its arguments in aggregation.options") from exc
        raise


def aggregate(options: strategies.FlowerStrategy, arguments: Mapping[str, Any], partial: Partial) -> Partial:
    """Return the partial result in which the strategy's step stands for all updates, with the strategy's new memory.

    Raises `ValueError` or `FlowerError` if the strategy has no usable result for these updates, and `PluginError` or
    `UserCodeError` if it has a mistake.
    """
    assert partial.base is not None, "the caller passes the base version"
    if not partial.kept:
        raise ValueError("no update was folded; a strategy needs at least one")
    if partial.weight <= 0:
        raise ValueError(f"the weights of {len(partial.kept)} updates add up to 0; a strategy needs one above 0")
    base = _read(partial.base)
    memory = msgspec.msgpack.decode(partial.memory, type=prepare_type(_Memory)) if partial.memory else _Memory()
    number = memory.round + 1
    seed = int.from_bytes(sha256(b"%d" % number + sha256(base.buffer.data).digest()).digest()[:8], "little")
    with _lock, randomness.seed_within(seed):
        identity.assume(identity.SERVER_NODE_ID)
        strategy = make_strategy(options, arguments)
        if memory.attributes:
            durable.assign_attributes(strategy, memory.attributes)
        result = _call(strategy, f"the strategy {plugins.name_of(options)}", number, base, partial.kept)
        memory = _Memory(number, durable.pickle_attributes(strategy))
    step = _subtract(result, base, f"the strategy {plugins.name_of(options)}")
    return dataclasses.replace(partial, total=step, weight=1.0, kept=(), memory=msgspec.msgpack.encode(memory))


def _call(
    strategy: Strategy, name: str, number: int, base: Parameters, kept: Sequence[tuple[Blocks, Contribution]]
) -> ArrayRecord:
    clients = [contribution.client_id or str(index) for index, (_, contribution) in enumerate(kept)]
    grid = _CohortGrid(name, [identity.node_id(client) for client in clients])
    needed = max(getattr(strategy, "min_available_nodes", 0), getattr(strategy, "min_train_nodes", 0))
    if needed > len(kept):
        raise ValueError(
            f"{name} waits for {format_count(needed, 'client')}, and the round has "
            f"{format_count(len(kept), 'update')}; expected at most so many in "
            "its options min_available_nodes and min_train_nodes"
        )
    try:
        with user_code.wrap_errors(name):
            list(strategy.configure_train(number, _make_record(base.copy()), ConfigRecord(), grid))
            returned: Any = strategy.aggregate_train(number, list(_make_replies(base, kept, grid.nodes)))
    except FedplatError as exc:
        if type(exc.__cause__).__module__.startswith("flwr."):  # a strategy's own refusal, without a line of its code
            raise FlowerError(f"{name} cannot aggregate the round: {exc.__cause__}") from exc
        raise
    result: Any = returned[0] if isinstance(returned, tuple) and returned else returned
    if result is None:
        raise FlowerError(
            f"{name} returned no arrays for a round of {len(kept)} updates; expected an ArrayRecord (some strategies "
            "need more updates)"
        )
    if not isinstance(result, ArrayRecord):
        raise PluginError(f"{name} returned a {type(result).__name__}; expected an ArrayRecord and a MetricRecord")
    return result


def _make_replies(
    base: Parameters, kept: Sequence[tuple[Blocks, Contribution]], nodes: Sequence[int]
) -> Iterator[Message]:
    shared = set[str].intersection(*(set(contribution.metrics) for _, contribution in kept))
    vector = np.empty(base.schema.num_floating, np.float32)
    for node, (update, contribution) in zip(nodes, kept, strict=True):
        start = 0
        for block in update:
            vector[start : start + block.size] = block
            start += block.size
        metrics = {key: float(contribution.metrics[key]) for key in sorted(shared)}
        content = RecordDict(
            {
                "arrays": _make_record(base.plus(vector)),
                "metrics": MetricRecord({**metrics, NUM_EXAMPLES: float(contribution.weight)}),
            }
        )
        yield records.make_reply(content, node, "train", str(node))


def _make_record(model: Parameters) -> ArrayRecord:
    """Return the floating-point tensors of a model, as views."""
    floating = (tensor.name for tensor in model.schema.tensors if tensor.dtype in FLOATING)
    return share_arrays({key: model[key] for key in floating})


def _subtract(result: ArrayRecord, base: Parameters, name: str) -> Vector:
    """Return a result minus the base version, whose entries that are not floating-point are left out."""
    expected = _make_record(base)
    if missing := [key for key in expected if key not in result]:
        raise FlowerError(
            f"{name} returned no array {quote(missing[0])} ({len(missing)} missing); expected the model's"
        )
    if extra := [key for key in result if key not in expected]:
        raise FlowerError(f"{name} returned the array {quote(str(extra[0]))}; expected only those of the model")
    steps = [np.empty(0, np.float32)]
    for key, array in expected.items():
        found, value = result[key].numpy(), array.numpy()
        if found.shape != value.shape:
            raise FlowerError(
                f"{name} returned the array {quote(key)} of shape {format_numbers(found.shape)}; expected "
                f"{format_numbers(value.shape)}"
            )
        if found.dtype.kind not in "fiub" and found.dtype != value.dtype:
            raise FlowerError(f"{name} returned the array {quote(key)} of {found.dtype}; expected {value.dtype}")
        step = found.astype(np.float64) - value.astype(np.float64)
        if not np.isfinite(step).all():
            raise FlowerError(f"{name} returned the array {quote(key)} with NaN or infinite values")
        steps.append(step.ravel().astype(np.float32))
    return np.concatenate(steps)


def _read(base: FlatModel) -> Parameters:
    """Return a model in memory."""
    if isinstance(base, Parameters):
        return base
    size = base.schema.size_bytes
    with base.reader(size) as read:
        return Parameters(base.schema, np.array(read(0, size)))


class _CohortGrid(Grid):
    """A grid of the clients whose updates are in the round; nothing can be sent to them any more."""

    def __init__(self, name: str, nodes: list[int]) -> None:
        self.nodes = nodes
        self._name = name
        self._num_queries = 0

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Raise an error: the rule of a job has no run."""
        raise self._error("asked for its run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        """Return the clients of the round."""
        self._num_queries += 1
        if self._num_queries > MAX_QUERIES:
            raise FlowerError(f"{self._name} waits for more than the {len(self.nodes)} clients of the round")
        return list(self.nodes)

    def push_messages(self, messages: Any) -> list[str]:
        """Raise an error: the clients have trained already."""
        raise self._error("sent messages")

    def pull_messages(self, message_ids: Any) -> list[Message]:
        """Raise an error: there are no messages."""
        raise self._error("asked for messages")

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        """Raise an error: the clients have trained already."""
        raise self._error("sent messages")

    def _error(self, action: str) -> FlowerError:
        return FlowerError(
            f"{self._name} {action} itself; expected only configure_train and aggregate_train (a strategy that does "
            "more can run as a Flower app)"
        )
