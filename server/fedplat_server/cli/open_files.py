"""How many files this process may have open: each connection of a client is one of them."""

from __future__ import annotations

import contextlib
import resource

from fedplat_server import logs

MIN_OPEN_FILES = 8192
"""With fewer the daemon warns: this many connections, and the files of transfers and of the database beside them."""


def raise_limit() -> int:
    """Raises the limit of open files as far as this user may, and returns it; warns if that is not far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Many systems begin with 1,024, for programs that use select(); asyncio and gRPC do not. macOS says that there is
    # no limit, and then refuses.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        logs.get().warning(
            "few files may be open at once, and so few clients connected",
            limit=soft,
            mend=f"raise the hard limit to {MIN_OPEN_FILES}: LimitNOFILE= (systemd), ulimit -Hn, "
            "--ulimit nofile= (docker)",
        )
    return soft
