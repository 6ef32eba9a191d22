"""The entry of `fedplat-server`; the commands are in `fedplat_server.cli.commands`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from fedplat_server.storage.data_dir import PRIVATE_UMASK


def main() -> None:
    """Runs the command of this process: a mistake is one clear line on stderr.

    Exit status: 0 done, 1 something failed and may work later, 2 the command line or the configuration is wrong.
    """
    # The database, the models and what commands write are for this user only, and so is what evaluators, trainers and
    # ranks write: processes inherit it.
    os.umask(PRIVATE_UMASK)
    # gRPC's C library writes lines of its own to stderr when a port is taken; we say that in words. It reads this
    # when it is imported, and the process that evaluators run in shall not import it at all: hence the late imports.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # As the first process of a container we would ignore SIGTERM until the daemon has its own handler.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _run() -> int:
    from fedplat.errors import FedplatError
    from fedplat_server.cli.commands import app
    from fedplat_server.errors import ConfigError

    try:
        app(prog_name="fedplat-server")
    except FedplatError as exc:
        print(f"fedplat-server: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    return 0
