"""How an assignment ends: what the client's loop learns of it, and the failure of one that the client gives up."""

from __future__ import annotations

from dataclasses import dataclass

from fedplat.wire.v1 import model_pb2
from fedplat_client.errors import ClientError


@dataclass(frozen=True)
class CheckInResult:
    """The outcome of a check-in or an assignment: whether to back off, and the server's retry window if it sent one."""

    failed: bool
    retry: model_pb2.RetryWindow | None = None


class AssignmentFailedError(ClientError):
    """The client gives up the assignment; `reason` is reported to the server."""

    def __init__(self, reason: model_pb2.Reason.ValueType, text: str) -> None:
        super().__init__(text)
        self.reason = reason
