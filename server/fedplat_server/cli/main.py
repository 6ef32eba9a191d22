"""The entry of `fedplat-server`; the commands are in `fedplat_server.cli.commands`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line of this process; an error is one clear line on stderr.

    Exit status: 0 success, 1 a failure that may be temporary, such as a data folder in use, 2 a wrong command line or
    configuration.
    """
    # The first process of a container would ignore SIGTERM until the daemon has installed its handler.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        # Here, since Ctrl-C may come before the imports are done.
        from fedplat.command_output import checked_output
        from fedplat_server.storage.data_dir import PRIVATE_UMASK

        # Files are readable by this user only: the database, models, output of commands, and what evaluators, trainers
        # and ranks write, whose processes inherit the mask.
        os.umask(PRIVATE_UMASK)
        with checked_output("fedplat-server"):
            sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _run() -> int:
    from fedplat.errors import USAGE_ERRORS, FedplatError
    from fedplat_server.cli.commands import app
    from fedplat_server.errors import ConfigError, FolderInUseError

    try:
        app(prog_name="fedplat-server")
    except FedplatError as exc:
        print(f"fedplat-server: {exc}", file=sys.stderr)
        is_busy = isinstance(exc, FolderInUseError)  # until another process ends
        return 2 if isinstance(exc, (ConfigError, *USAGE_ERRORS)) and not is_busy else 1
    return 0
