"""A ClientApp that answers messages in this process. It is imported once, not once for each message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from flwr.app import Context, Message, RecordDict

from fedplat.config import user_code
from fedplat.errors import FlowerError
from fedplat.flower import identity, records
from fedplat.flower.app import Config, FlowerApp
from fedplat.flower.records import MessageFile, PackedMessage
from fedplat.model import Parameters

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
