"""What an open attempt waits for, in words."""

from __future__ import annotations

from collections.abc import Callable

from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2


def describe(attempt: admin_pb2.Round, moment: Callable[[float], str]) -> str:
    """Return for whom an open attempt waits and until when, such as `waits for c-1 (silent) until 20:11:43`.

    `moment` formats a time. Empty if the attempt waits for no client.
    """
    if not attempt.HasField("waiting"):
        return ""
    return describe_waiting(attempt.waiting, attempt.busy, moment)


def describe_waiting(waits: admin_pb2.AttemptWait, num_busy: int, moment: Callable[[float], str]) -> str:
    """Return the same for `num_busy` clients at work; if the number is not known, 0."""
    silent, named = set(waits.silent_client_ids), list(waits.client_ids)
    if not named:
        whom = "waits for clients to check in"
    elif num_busy > len(named):
        whom = f"waits for {format_count(num_busy, 'client')}"
        whom += f", of which {', '.join(sorted(silent))} {'is' if len(silent) == 1 else 'are'} silent" if silent else ""
    else:
        whom = "waits for " + ", ".join(f"{name} (silent)" if name in silent else name for name in named)
    return f"{whom} until {moment(waits.until_unix_s)}" if waits.until_unix_s else whom
