"""The grid of a ServerApp: what it sends to clients, and receives, as sets of messages.

All messages of a `MessageSet` have the same content: messages with other contents follow in the next ones, so that no
client receives what is meant for another one.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from flwr.app import Array, Error, Message, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from fedplat.errors import FedplatError, FlowerError
from fedplat.flower import claims, identity, records
from fedplat.flower.records import FAILED, LATE, MessageFile, PackedMessage
from fedplat.model import Parameters

_logger = logging.getLogger(__name__)
GATHER_S = 0.05
"""Messages of several threads of an app are sent together if there is no longer pause between them."""


class MessageSet(msgspec.Struct, frozen=True):
    """A message for several nodes. It shares the memory of the app's arrays until the app continues."""

    file: PackedMessage
    nodes: tuple[int, ...]
    message_type: str


class NodeReply(msgspec.Struct, frozen=True):
    """The reply of a node: its content, or None with the reason of its failure."""

    node_id: int
    content: RecordDict | None
    error: str = ""

    @classmethod
    def read(cls, node_id: int, file: Parameters) -> NodeReply:
        """Return the reply in a file, whose arrays are views of it. A file that cannot be read is a failure."""
        try:
            return cls(node_id, records.decode(file).content)
        except FlowerError as exc:
            return cls(node_id, None, str(exc))


class _Sent(msgspec.Struct, frozen=True):
    """Messages with the same content that are on their way, or will be: the ids of the messages by node."""

    file: PackedMessage
    message_type: str
    group_id: str
    message_ids: dict[int, str]


class AppClosed(SystemExit):
    """Ends a thread of an app that is not needed any more; Python prints no traceback for it."""


class FlowerGrid(Grid):
    """The grid of a ServerApp: Flower's interface to the clients, in front of fedplat.

    Calls may come from several threads of the app. The methods without a leading `_` that Flower does not know are for
    `durable.py`.
    """

    def __init__(self, list_nodes: Callable[[], Sequence[int]]) -> None:
        self.rounds: Any = None
        """The state of `durable.py`."""
        self.take_snapshot: Callable[[], bytes] | None = None
        """Returns what the strategy needs to continue from the last messages; None if only a new start can."""
        self.take_next_snapshot: Callable[[], bytes] | None = None
        """The same for the messages that are sent next."""
        self.final_arrays: Any = None
        """The arrays that the strategy has returned."""
        self.num_sent = 0
        """The number of calls that have sent messages."""
        self.name_node: Callable[[int], str] = "node {}".format
        """Returns how messages name a node."""
        self.max_weight_factor = 0.0
        """How many times the median a reply may weigh (`flower.max_weight_factor`); 0: any number."""
        self.refused: dict[int, str] = {}
        """The nodes whose replies to the last messages were refused, and why."""
        self.problems: list[str] = []
        """What was wrong with the claims in the replies to the last messages."""
        self._list_nodes = list_nodes
        self._main = threading.get_ident()
        self._changed = threading.Condition()
        self._waiting: list[_Sent] = []
        self._sent: _Sent | None = None
        self._replies: dict[str, Message] = {}
        self._metrics: dict[str, float] = {}
        self._ready_at = 0.0
        self._next_id = 0
        self._is_closed = self._is_over = False
        self._error: FedplatError | None = None

    # --- called by the app ---

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run in a process."""

    @property
    def run(self) -> Any:
        """Run information, as far as the old API of servers reads it."""
        return _RunInfo()

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        """Return the ids of the clients that may work for this app now."""
        with self._changed:
            self._check_open()
        return list(self._list_nodes())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, and return their ids."""
        return self._push(messages, continues=True)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived, and an error for each message whose reply is too late."""
        with self._changed:
            self._check_open()
            return [self._replies.pop(each) for each in message_ids if each in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and wait until each was answered, or is too late by the deadlines of the job."""
        return self.wait_for(self._push(messages, continues=False))

    # --- called by durable.py ---

    def wait_for(self, message_ids: Sequence[str]) -> list[Message]:
        """Wait until each message was answered or is too late, and return the replies."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or all(each in self._replies for each in message_ids))
            self._check_open()
            found = [self._replies.pop(each) for each in message_ids]
        return [each for each in found if each.has_content() or each.error.code != LATE]

    def refuse(self, node_id: int, text: str) -> None:
        """Note that the reply of a node to the last messages was refused."""
        self.refused[node_id] = text

    def publish(self, metrics: Mapping[str, object]) -> None:
        """Add metrics of the strategy to those that `take_metrics` returns."""
        self._metrics = claims.select_metrics({**self._metrics, **metrics}.items())

    def dump(self, value: object) -> bytes:
        """Pickle a value without the arrays of the message that is on its way, which `load` takes from its file."""
        names: dict[int, tuple[str, str]] = {}
        if self._sent is not None:
            arrays = self._sent.file.content.array_records.items()
            names = {id(array): (name, key) for name, record in arrays for key, array in record.items()}
        out = io.BytesIO()
        _Pickler(out, names).dump(value)
        return out.getvalue()

    def load(self, content: bytes) -> Any:
        """Return a value that `dump` has pickled."""
        assert self._sent is not None
        return _Unpickler(io.BytesIO(content), self._sent.file.content).load()

    def pack(self, strategy: bytes) -> bytes:
        """Return the state of a run: that of its strategy, and the messages and replies on their way."""
        replies = {name: _pack_reply(reply) for name, reply in self._replies.items()}
        # The message that is on its way is not needed again: only what its replies answer is.
        sent = [_describe(self._sent)] if self._sent is not None else []
        waiting = [(each.file.to_bytes(), *_describe(each)) for each in self._waiting]
        return pickle.dumps((strategy, sent, waiting, replies, self._next_id))

    def unpack(self, state: bytes, message: Parameters) -> tuple[bytes, list[str]]:
        """Restore the messages and replies of a run; return its strategy's state and the messages' ids.

        `message` is the file of the message that is on its way.
        """
        strategy, sent, waiting, replies, self._next_id = pickle.loads(state)  # the server's own file
        self._sent = next((_Sent(_read_packed(message), *rest) for rest in sent), None)
        self._waiting = [_Sent(_read_packed(Parameters.from_bytes(bytearray(file))), *rest) for file, *rest in waiting]
        self._replies = {name: _unpack_reply(*reply) for name, reply in replies.items()}
        open_groups = [*self._waiting, *([self._sent] if self._sent is not None else [])]
        ids = {name for each in open_groups for name in each.message_ids.values()} | self._replies.keys()
        return strategy, sorted(ids, key=int)

    # --- called by ServerAppRun ---

    def pass_replies(self, replies: Sequence[NodeReply]) -> MessageSet | None:
        """Pass the replies to the last messages to the app; return the next messages, or None if the app has ended.

        Raises what the app has raised, as `FlowerError` or `UserCodeError`.
        """
        with self._changed:
            self.refused = {}
            self._deliver(replies)
            while not self._is_over:
                delay = self._ready_at - time.monotonic() if self._waiting else None
                if delay is not None and delay <= 0.0:
                    break
                self._changed.wait(delay)
            if self._error is not None:
                raise self._error
            if not self._waiting:
                return None
            self._sent = self._waiting.pop(0)
            return MessageSet(self._sent.file, tuple(self._sent.message_ids), self._sent.message_type)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics that the strategy has returned since the last call, as far as they can be reported."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def begin(self) -> None:
        """Let this thread be the app's own."""
        self._main = threading.get_ident()

    def end(self, error: FedplatError | None = None) -> None:
        """Note that the app has ended."""
        with self._changed:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """End the app's threads at their next call."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise AppClosed

    def _push(self, messages: Iterable[Message], *, continues: bool) -> list[str]:
        """Send messages. An app that `continues` before they are answered may change its arrays meanwhile."""
        listed = list(messages)
        ids: list[str] = []
        with self._changed:
            self._check_open()
            groups: dict[tuple[int, str, str], list[_Sent]] = {}
            if listed:
                self.num_sent += 1
                self.take_snapshot, self.take_next_snapshot = self.take_next_snapshot, None
            for message in listed:
                self._next_id += 1
                ids.append(str(self._next_id))
                self._add(groups, message, ids[-1], copies=continues)
            # An app of the old API sends one message from each of several threads.
            self._ready_at = time.monotonic() + (0.0 if threading.get_ident() == self._main else GATHER_S)
            self._changed.notify_all()
        return ids

    def _add(
        self, groups: dict[tuple[int, str, str], list[_Sent]], message: Message, message_id: str, *, copies: bool
    ) -> None:
        metadata = message.metadata
        node, kind = metadata.dst_node_id, (metadata.message_type, metadata.group_id)
        found = groups.setdefault((id(message.content), *kind), [])
        if not found:  # equal contents are one object in the strategies of Flower, but not in the old API
            file = records.pack(MessageFile(message.content, *kind))
            if key := file.find_nonfinite():
                text = "The app sends the array %s with NaN or infinite numbers, which no client can train with."
                _logger.warning(text, key)
            file = file.copy() if copies else file
            found += [each for each in self._waiting if each.file == file]
        else:
            file = found[0].file
        for sent in found:
            if node not in sent.message_ids:
                sent.message_ids[node] = message_id
                return
        self._waiting.append(_Sent(file, *kind, {node: message_id}))
        found.append(self._waiting[-1])

    def _deliver(self, replies: Sequence[NodeReply]) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        arrived = {reply.node_id: reply for reply in replies}
        contents = {self.name_node(each.node_id): each.content for each in replies if each.content is not None}
        self.problems = claims.limit_old_claims(contents, self.max_weight_factor)
        for problem in self.problems:
            _logger.warning("In the replies to %s, %s.", sent.message_type, problem)
        for node, message_id in sent.message_ids.items():
            code = FAILED if node in arrived else LATE
            reply = arrived.get(node, NodeReply(node, None, "the reply did not arrive in time"))
            self._replies[message_id] = _make_reply(reply, sent.message_type, message_id, code)
        self._changed.notify_all()


class _Pickler(pickle.Pickler):
    """Writes the names of records and keys in place of the arrays with these identities."""

    def __init__(self, out: io.BytesIO, names: Mapping[int, tuple[str, str]]) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._names = names

    @override
    def persistent_id(self, obj: object) -> tuple[str, str] | None:
        return self._names.get(id(obj)) if isinstance(obj, Array) else None


class _Unpickler(pickle.Unpickler):
    """Takes the arrays that `_Pickler` has named from the content of a message."""

    def __init__(self, file: io.BytesIO, content: RecordDict) -> None:
        super().__init__(file)  # the server's own file
        self._content = content

    @override
    def persistent_load(self, pid: tuple[str, str]) -> Array:
        record, key = pid
        return self._content.array_records[record][key]


class _RunInfo(msgspec.Struct, frozen=True):
    run_id: int = identity.RUN_ID


def _make_reply(reply: NodeReply, message_type: str, message_id: str, code: int) -> Message:
    """Return the message that a ServerApp receives; `code` is that of an error."""
    answer = reply.content if reply.content is not None else Error(code, reply.error)
    return records.make_reply(answer, reply.node_id, message_type, message_id)


def _describe(sent: _Sent) -> tuple[str, str, dict[int, str]]:
    return sent.message_type, sent.group_id, sent.message_ids


def _read_packed(file: Parameters) -> PackedMessage:
    return records.pack(records.decode(file))


def _pack_reply(reply: Message) -> tuple[NodeReply, bytes, str, str, int]:
    metadata = reply.metadata
    content = records.encode(MessageFile(reply.content)).to_bytes() if reply.has_content() else b""
    error, code = ("", 0) if reply.has_content() else (reply.error.reason or "", reply.error.code)
    packed = NodeReply(metadata.src_node_id, None, error)
    return packed, content, metadata.message_type, metadata.reply_to_message_id, code


def _unpack_reply(reply: NodeReply, content: bytes, message_type: str, message_id: str, code: int) -> Message:
    if content:
        reply = NodeReply.read(reply.node_id, Parameters.from_bytes(bytearray(content)))
    return _make_reply(reply, message_type, message_id, code)
