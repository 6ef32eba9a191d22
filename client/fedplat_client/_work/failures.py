"""The failure of an assignment that the client itself gives up."""

from __future__ import annotations

from fedplat.wire.v1 import model_pb2
from fedplat_client.errors import ClientError


class AssignmentFailedError(ClientError):
    """The client gives up the assignment; `reason` is reported to the server."""

    def __init__(self, reason: model_pb2.Reason.ValueType, text: str) -> None:
        super().__init__(text)
        self.reason = reason
