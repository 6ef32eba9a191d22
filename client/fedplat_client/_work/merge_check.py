"""Query whether an update that was reported earlier has been merged."""

from __future__ import annotations

import functools

from fedplat.wire.v1 import fleet_pb2
from fedplat_client._auth.calls import Connection
from fedplat_client._state.two_phase import SentReport, WasMerged
from fedplat_client.backoff import retry
from fedplat_client.errors import CallRefusedError, ServerUnavailableError
from fedplat_client.options import ClientOptions
from fedplat_client.task import Control

_MERGE_CHECK_ATTEMPTS = 3


def make_merge_check(connection: Connection, options: ClientOptions, control: Control) -> WasMerged:
    """Return a function that queries the server, once per report, whether it was merged.

    It raises `Cancelled`, and `ServerUnavailableError` if the server does not answer.
    """

    @functools.cache
    def was_merged(sent: SentReport) -> bool:
        """Report again: after the end of an attempt, only merged updates get a receipt."""
        request = fleet_pb2.ReportRequest(token=sent.token, digest=sent.digest)
        try:
            answer = retry(lambda: connection.report(request), options, control.signal, attempts=_MERGE_CHECK_ATTEMPTS)
        except ServerUnavailableError:
            control.signal.check()
            raise
        except CallRefusedError:
            control.signal.check()
            return False
        return answer.HasField("receipt")

    return was_merged
