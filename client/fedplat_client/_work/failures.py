"""How an assignment ends: what the client's loop learns of it, and the failure of one that the client gives up."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import cancellation, errors
from fedplat_client._auth.calls import Connection

_FAIL_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckInResult:
    """The outcome of a check-in or an assignment: whether to back off, and the server's retry window if it sent one."""

    failed: bool
    retry: model_pb2.RetryWindow | None = None


class AssignmentFailedError(errors.ClientError):
    """The client gives up the assignment; `reason` is reported to the server."""

    def __init__(self, reason: model_pb2.Reason.ValueType, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def report_failure(connection: Connection, token: str, stop: cancellation.Stop) -> bool:
    """Tell the server that the client gives up an assignment, so that it need not wait for the deadline.

    Return False if the server does not answer.
    """
    request = fleet_pb2.FailRequest(token=token, reason=stop.reason, text=stop.text)
    try:
        connection.fail(request, _FAIL_TIMEOUT_S)
    except errors.ServerUnavailableError as exc:
        _logger.debug("The failure could not be reported: %s", exc)
        return False
    except errors.CallError as exc:  # also of a revoked client, whose next check-in gets the same error
        _logger.warning("The server refused the report of a failure: %s", exc)
    return True
