"""The limit of open files of this process: each connection of a client is an open file."""

from __future__ import annotations

import contextlib
import resource

from fedplat_server import logs

MIN_OPEN_FILES = 8192
"""The daemon warns below this limit, which also includes the files of transfers and of the database."""


def raise_limit() -> int:
    """Raise the limit of open files to the hard limit and return it; warn if it is below `MIN_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The default is often 1,024, for programs that use select(); asyncio and gRPC do not. macOS reports an unlimited
    # hard limit, but refuses to set it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        logs.get().warning(
            "the limit of open files is low: few clients can connect",
            limit=soft,
            mend=f"raise the hard limit to {MIN_OPEN_FILES}: LimitNOFILE= (systemd), ulimit -Hn, "
            "--ulimit nofile= (docker)",
        )
    return soft
