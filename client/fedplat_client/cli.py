"""The entry of `fedplat-client`; the commands are in `fedplat_client.commands`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process. Ctrl-C ends it also while its modules are imported, without a traceback."""
    try:
        from fedplat_client.commands import main as run

        run(prog_name="fedplat-client")
    except KeyboardInterrupt:
        sys.exit(130)
