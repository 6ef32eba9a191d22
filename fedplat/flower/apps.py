"""Apps in this process: a ClientApp that answers messages, and a ServerApp in a thread that exchanges them.

`ServerAppRun.advance` lets the app run until it waits for clients, and returns the messages that it sends; the caller
delivers them and passes the replies to the next call. So the app can be driven by a server's rounds and by a simulation
in virtual time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from flwr.app import Context, Message, RecordDict

from fedplat import errors, model
from fedplat.config import user_code
from fedplat.errors import FlowerError
from fedplat.flower import durable, grid, identity, records
from fedplat.flower.app import Config, FlowerApp
from fedplat.flower.records import MessageFile, PackedMessage
from fedplat.model import Parameters
from fedplat.model.schema import MESSAGE_KEY

EMPTY_STATE = records.encode(MessageFile(RecordDict()))
"""The file of an empty `Context.state`."""


class NodeAnswer(msgspec.Struct, frozen=True):
    """The reply to a message, and what the app remembers (`Context.state`), both as files.

    The reply shares the memory of the app's arrays, so it must be sent before the app is called again.
    """

    reply: PackedMessage
    state: Parameters


class ClientAppRunner:
    """Calls the ClientApp of an app."""

    def __init__(self, app: FlowerApp) -> None:
        """Import the ClientApp. Raises `FlowerError`."""
        self.app = app
        self._client_app = app.load_client_app()

    def answer(
        self,
        file: Parameters,
        node_id: int,
        node_config: Mapping[str, bool | int | float | str],
        run_config: Config | None = None,
        state: Parameters | None = None,
    ) -> NodeAnswer:
        """Return the ClientApp's answer to the message of a file, whose arrays the app may change.

        `run_config` replaces that of the app, `state` is that of the previous answer. Raises `FlowerError` if the app
        fails or its reply is not a message.
        """
        asked = records.decode(file)
        message = records.make_message(asked, node_id)
        context = Context(
            run_id=message.metadata.run_id,
            node_id=node_id,
            node_config=dict(node_config),
            state=RecordDict() if state is None or state is EMPTY_STATE else records.decode(state).content,
            run_config=dict(self.app.run_config if run_config is None else run_config),
        )
        identity.assume(node_id)
        with user_code.wrap_errors(f"the ClientApp of {self.app.name}, called with {asked.message_type},"):
            reply = self._client_app(message, context)
        kept = records.encode(MessageFile(context.state)) if context.state else EMPTY_STATE
        return NodeAnswer(self._pack_reply(reply, asked.message_type), kept)

    def _pack_reply(self, reply: Any, message_type: str) -> PackedMessage:
        if not isinstance(reply, Message):
            raise FlowerError(
                f"the ClientApp of {self.app.name} answered {message_type} with a {type(reply).__name__}; expected a "
                "Message"
            )
        if reply.has_error():
            raise FlowerError(f"the ClientApp of {self.app.name} answered {message_type} with: {reply.error.reason}")
        file = records.pack(MessageFile(reply.content))
        if name := file.find_nonfinite():
            raise FlowerError(
                f"the ClientApp of {self.app.name} answered {message_type} with arrays that are not finite ({name}): "
                "the training has diverged; expected finite numbers, perhaps with a lower learning rate"
            )
        return file


class AppCheckpoint(NamedTuple):
    """The state of an earlier run, and the file of the message that was on its way then, whose arrays it refers to."""

    state: bytes
    message: model.Parameters


class ServerAppRun:
    """One run of a ServerApp, in a thread of its own.

    A `checkpoint` of an earlier run lets it continue with the messages that were on their way then.
    """

    def __init__(
        self,
        app: FlowerApp,
        list_nodes: Callable[[], Sequence[int]],
        run_config: Mapping[str, bool | int | float | str] | None = None,
        checkpoint: AppCheckpoint | None = None,
    ) -> None:
        """Import the ServerApp. Raises `FlowerError`."""
        self._server_app, self._app = app.load_server_app(), app
        self._run_config: Config = dict(app.run_config if run_config is None else run_config)
        self.grid = grid.FlowerGrid(list_nodes)
        if checkpoint is not None:
            durable.restore(self.grid, *checkpoint)
        self._thread: threading.Thread | None = None

    def advance(self, replies: Sequence[grid.NodeReply] = ()) -> grid.MessageSet | None:
        """Run the app with the replies to its last messages; return the next ones, or None if the app has ended.

        Raises `FedplatError` if the app has raised an exception.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"ServerApp {self._app.name}", daemon=True)
            self._thread.start()
        return self.grid.pass_replies(replies)

    @property
    def state(self) -> bytes:
        """The state with which a new run continues with the last messages; empty if the app can only start anew."""
        take_snapshot = self.grid.take_snapshot
        return self.grid.pack(take_snapshot()) if take_snapshot is not None else b""

    @property
    def final_model(self) -> model.Parameters | None:
        """The arrays that the app's strategy returned at its end, by their names; None if it has returned none."""
        if self.grid.final_arrays is None:
            return None
        file = records.encode(MessageFile(RecordDict({"arrays": self.grid.final_arrays})))
        return model.Parameters.from_arrays({name: values for name, values in file.items() if name != MESSAGE_KEY})

    def close(self) -> None:
        """End the app, which may be waiting for replies, at its next call."""
        self.grid.close()

    def _run(self) -> None:
        durable.install()
        identity.assume(identity.SERVER_NODE_ID)
        self.grid.begin()
        context = Context(identity.RUN_ID, identity.SERVER_NODE_ID, {}, RecordDict(), self._run_config)
        try:
            with user_code.wrap_errors(f"the ServerApp of {self._app.name}"), contextlib.suppress(grid.AppClosed):
                self._server_app(self.grid, context)
        except errors.FedplatError as exc:
            # A strategy of the old API divides by the sum of what its clients claim.
            is_claim = isinstance(exc.__cause__, ZeroDivisionError) and bool(self.grid.problems)
            self.grid.end(errors.FlowerError(f"{self.grid.problems[0]}; {exc}") if is_claim else exc)
        else:
            self.grid.end()
