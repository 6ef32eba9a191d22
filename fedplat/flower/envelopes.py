"""Messages with their metadata: what a ServerApp sends to a node, and the reply to it."""

from __future__ import annotations

import time

from flwr.app import DEFAULT_TTL, Error, Message, Metadata, RecordDict

from fedplat.flower.identity import RUN_ID, SERVER_NODE_ID
from fedplat.flower.records import MessageFile

FAILED, LATE = 2, 4
"""The codes of error replies, as Flower counts them: a client failed, or its reply did not arrive in time."""


def make_request(file: MessageFile, node_id: int) -> Message:
    """Return the message that a node receives."""
    metadata = _make_metadata("message", SERVER_NODE_ID, node_id, "", file.message_type, file.group_id)
    return Message(content=file.content, metadata=metadata)  # pyright: ignore[reportCallIssue]


def make_reply(answer: RecordDict | Error, node_id: int, message_type: str, message_id: str) -> Message:
    """Return the message that a ServerApp receives from a node, in reply to the message with this id."""
    metadata = _make_metadata(f"{message_id}-reply", node_id, SERVER_NODE_ID, message_id, message_type, "")
    return Message(answer, metadata=metadata)  # pyright: ignore[reportCallIssue]


def _make_metadata(
    message_id: str, source: int, destination: int, reply_to: str, message_type: str, group_id: str
) -> Metadata:
    return Metadata(
        run_id=RUN_ID,
        message_id=message_id,
        src_node_id=source,
        dst_node_id=destination,
        reply_to_message_id=reply_to,
        group_id=group_id,
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=message_type,
    )
