"""What gRPC tells of a call that failed, in words for people."""

from __future__ import annotations

import contextlib

import grpc

from fedplat import wire
from fedplat.cli import formats


def retry_window(exc: grpc.RpcError) -> str:
    """Return when the server wants to be asked again; empty if it does not name a time."""
    for entry in exc.trailing_metadata() or ():
        if entry.key == wire.METADATA_RETRY:
            with contextlib.suppress(ValueError):
                earliest, latest = map(float, str(entry.value).split())
                return f"; try again in {formats.duration(earliest)} to {formats.duration(latest)}"
    return ""


def reason(details: str) -> str:
    """Return the part of gRPC's account that a person can use."""
    if "address lookup failed" in details:
        return "the host name is not known"
    if details in ("Cancelling all calls", "Socket closed", "CANCELLED"):
        return "the connection was closed"
    for prefix in ("Failed to connect to remote host: ", "last error: "):
        if prefix in details:
            return details.rpartition(prefix)[2]
    return details
